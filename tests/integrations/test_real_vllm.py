"""The stand-ins are like vLLM's own classes: those of an installed vLLM, or of its unpacked wheel, are read too.

Its interface module is loaded alone, in a process of its own: importing all of vLLM needs a GPU's libraries. Set
VLLM_SOURCE to the folder that holds the package `vllm` (0.24 to 0.33).
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvpage

PROGRAM = Path(__file__).with_name("real_vllm_program.py")


def source() -> Path:
    """The folder of the package; skips where there is none."""
    named = os.environ.get("VLLM_SOURCE")
    found = importlib.util.find_spec("vllm") if named is None else None
    if named is None and (found is None or found.origin is None):
        pytest.skip("no vLLM: install it, or name its folder in VLLM_SOURCE")
    return Path(named) if named else Path(str(found.origin if found else "")).parents[1]


def test_the_classes_of_a_real_vllm_are_read() -> None:
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(source())], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert answer["refused"] == {}
    assert {layer["kind"] for layer in answer["layers"]} >= {
        "full_attention",
        "sliding_window",
        "mamba",
        "mla_attention",
    }
    common = {"num_blocks": 3, "max_num_encoder_input_tokens": 64, "strategy": "unify"}
    for layer in answer["layers"]:
        plan = kvpage.plan({"layers": [layer]} | common)
        plan.check()
        if layer["name"] in answer["pages"]:
            assert plan.layers[layer["name"]].page_size_bytes == answer["pages"][layer["name"]], layer
