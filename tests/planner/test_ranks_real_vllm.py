"""Public models in pipeline stages: groups, blocks and bytes are those of vLLM 0.24's own functions, where it is there.

Set VLLM_SOURCE to the folder that holds the package `vllm`.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvpage
from integrations.test_real_vllm import source
from kvpage.errors import KvpageError
from kvpage.models import read_model
from models.public_configs import CONFIGS, config

Json = dict[str, Any]
PROGRAM = Path(__file__).with_name("real_ranks_program.py")
GIB = 1 << 30


def stages_of(name: str, num_stages: int) -> Json:
    """The layers of a public model with caches of their own, cut anywhere, and a memory for each stage."""
    rng = random.Random(f"{name} {num_stages}")
    read = (layer for layer in read_model(config(name)).layers if "kv_sharing_target" not in layer)
    layers = [{"block_size": 64} | layer for layer in read]
    cuts = sorted(rng.sample(range(1, len(layers)), k=min(num_stages, len(layers)) - 1))
    stages = [layers[start:end] for start, end in zip([0, *cuts], [*cuts, len(layers)], strict=True)]
    return {"stages": stages, "memories": [rng.randint(300, 400) * GIB for _ in stages], "max_model_len": 4096}


def answers_of_vllm(cases: list[Json]) -> list[Json]:
    folder = source()
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder)], input=json.dumps(cases), capture_output=True, text=True,
        check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: list[Json] = json.loads(done.stdout)
    return found


def answer_of_kvpage(case: Json) -> Json:
    ranks = [{"layers": of, "memory_bytes": has} for of, has in zip(case["stages"], case["memories"], strict=True)]
    try:
        plans = kvpage.plan_ranks({"strategy": "unify", "ranks": ranks, "max_model_len": case["max_model_len"]}).ranks
    except KvpageError as error:
        return {"refused": error.message}
    return {
        "groups": [[list(group.layers) for group in plan.groups] for plan in plans],
        "block_sizes": [[group.block_size for group in plan.groups] for plan in plans],
        "num_blocks": [plan.num_blocks for plan in plans],
        "bytes": [plan.buffer_size_bytes for plan in plans],
        "concurrency": [plan.capacity.max_concurrency for plan in plans],
    }


def test_stages_of_public_models_are_those_of_vllm() -> None:
    """In all that kvpage and vLLM say alike of the model on one rank: 0.24 joins rows of two widths, for example."""
    pytest.importorskip("torch")
    alone = {name: stages_of(name, 1) for name in CONFIGS}
    answers = zip(alone.items(), answers_of_vllm([*alone.values()]), strict=True)
    alike = {name: in_common(answer_of_kvpage(case), theirs) for (name, case), theirs in answers}
    assert sum("bytes" in keys for keys in alike.values()) > 20
    assert "num_blocks" in alike["deepseek-v4-flash"]  # packed; vLLM lists each tensor with the size of all
    split = {(name, num_stages): stages_of(name, num_stages) for name in CONFIGS for num_stages in (2, 3, 5)}
    for ((name, num_stages), case), theirs in zip(split.items(), answers_of_vllm([*split.values()]), strict=True):
        mine = answer_of_kvpage(case)
        assert alike[name] <= in_common(mine, theirs), (name, num_stages)


def in_common(mine: Json, theirs: Json) -> set[str]:
    return {key for key in mine.keys() & theirs.keys() if mine[key] == theirs[key]}
