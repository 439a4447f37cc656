"""`kvpage plan --model`: from a config on disk to a plan."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

import kvpage
from kvpage.cli.files import DEFAULT_STRATEGY
from models.public_configs import config
from support.command_line import run_here


def run(*arguments: str | Path, columns: int = 160) -> subprocess.CompletedProcess[str]:
    return run_here("plan", *map(str, arguments), COLUMNS=str(columns))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model as it lies on disk: a folder with its config."""
    (tmp_path / "config.json").write_text(json.dumps(config("qwen3-next-80b-a3b")))
    return tmp_path


def test_a_model_is_planned_as_the_request_that_names_it(folder: Path) -> None:
    done = run("--model", folder, "--tp", "2", "--ssm-dtype", "float32", "--memory", "40GiB", "--json")
    assert done.returncode == 0, done.stderr
    model = {"config": config("qwen3-next-80b-a3b"), "tp": 2, "ssm_dtype": "float32"}
    expected = kvpage.plan({"strategy": DEFAULT_STRATEGY, "model": model, "memory_bytes": 40 << 30})
    assert kvpage.Plan.from_json(done.stdout.encode()) == expected


@pytest.mark.parametrize("columns", [80, 160])
def test_like_layers_share_a_row_and_numbers_are_whole(folder: Path, columns: int) -> None:
    done = run("--model", folder, "--memory", "40GiB", "--max-model-len", "8192", columns=columns)
    assert done.returncode == 0, done.stderr
    table = done.stdout.split("plan ")[0]
    rows = [line.split() for line in table.splitlines() if line.lstrip().startswith(("12 ×", "36 ×"))]
    assert [row[0] for row in rows[:2]] == ["36", "12"]
    model = {"config": config("qwen3-next-80b-a3b")}
    request = {"strategy": DEFAULT_STRATEGY, "model": model, "memory_bytes": 40 << 30, "max_model_len": 8192}
    page = kvpage.plan(request).layers["model.layers.0.linear_attn"].page_size_bytes
    assert page >= 1_097_728  # a state
    assert f"{page:,}" in table
    assert "8,192 tokens:" in done.stdout


def test_what_a_draft_and_single_layers_have_of_their_own_is_taken(folder: Path) -> None:
    more = ("--kv-dtype", "fp8", "--kv-dtype-skip-layers", "3", "--kv-dtype-skip-layers", "7", "--mtp")
    done = run("--model", folder, "--memory", "40GiB", "--json", *more, "--draft-backend", "triton_attn")
    assert done.returncode == 0, done.stderr
    model: dict[str, object] = {"config": config("qwen3-next-80b-a3b"), "kv_dtype": "fp8"}
    model |= {"kv_dtype_skip_layers": ["3", "7"]}
    model |= {"mtp": True, "draft_backend": "triton_attn"}
    expected = kvpage.plan({"strategy": DEFAULT_STRATEGY, "model": model, "memory_bytes": 40 << 30})
    assert kvpage.Plan.from_json(done.stdout.encode()) == expected
    assert expected.layers["mtp.layers.0.self_attn.attn"].backend == "triton_attn"


def test_a_draft_and_lengths_are_taken(folder: Path, tmp_path: Path) -> None:
    draft = tmp_path / "draft.json"
    draft.write_text(json.dumps(config("qwen3-0.6b", num_hidden_layers=2)))
    more = ("--max-model-len", "4096", "--max-num-batched-tokens", "512", "--num-speculative-tokens", "2")
    done = run("--model", folder, "--draft", draft, "--memory", "40GiB", "--json", *more)
    plan = kvpage.Plan.from_json(done.stdout.encode())
    assert "draft.model.layers.1.self_attn.attn" in plan.layers
    assert plan.capacity.max_model_len == 4096
    assert plan.layers["model.layers.0.linear_attn"].tensors[0].shape[1] == 5


def test_what_was_assumed_is_said_beside_the_plan(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config("gpt-oss-120b")))
    done = run("--model", file, "--memory", "40GiB", "--json")
    assert done.stderr.startswith("note: the config names no dtype: bfloat16")
    json.loads(done.stdout)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "one of the two"),
        (("{folder}/config.json",), "kvpage plan --model FILE"),
        (("{folder}/config.json", "--compare"), "kvpage plan --model FILE"),
        (("request.json", "--model", "."), "one of the two"),
        (("--model", "nowhere", "--memory", "1GiB"), "not downloaded"),
        (("--model", "{folder}"), "--memory is missing"),
        (("--model", "{folder}", "--memory", "much"), "much"),
        (("--model", "{folder}", "--memory", "1GiB", "--tp", "3"), "/model/tp: 3 ranks share the heads"),
        (("--model", "{folder}", "--memory", "1GiB", "--kv-dtype", "fp7"), "/model/kv_dtype"),
        (("--model", "{folder}", "--memory", "1GiB", "--backend", "fastest"), "fastest"),
    ],
)
def test_what_cannot_be_planned_is_said_in_one_line(folder: Path, arguments: tuple[str, ...], words: str) -> None:
    done = run(*(argument.replace("{folder}", str(folder)) for argument in arguments))
    assert done.returncode in (1, 2)
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
