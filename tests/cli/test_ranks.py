"""`kvpage plan` of several ranks: a row for each sort, what holds for all, warnings beside it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

import kvpage
from kvpage.ranked_plan import RankedPlan
from support.command_line import run_here
from support.plan_requests import MEMORY_BYTES, small_request

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "torch_dtype": "bfloat16", "max_position_embeddings": 512,
}  # fmt: skip


def run(*arguments: str, stdin: object = None, columns: int = 80) -> subprocess.CompletedProcess[str]:
    return run_here("plan", *arguments, stdin=json.dumps(stdin), COLUMNS=str(columns))


def rows(output: str) -> dict[str, list[str]]:
    """Cells of the table's rows by what is in the first."""
    cells = [line.split() for line in output.splitlines() if line[:2].strip().isdigit()]
    return {row[0]: row[1:] for row in cells}


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


def test_ranks_that_are_alike_share_a_row(config: str) -> None:
    done = run("--model", config, "--tp", "8", "--pp", "3", "--memory", "1MiB", "--all-ranks")
    assert done.returncode == 0
    assert "note: 8 ranks share 4 KV heads" in done.stderr
    found = rows(done.stdout)
    assert list(found) == ["0-7", "8-15", "16-23"]
    request: dict[str, Any] = {"strategy": "unify", "memory_bytes": 1 << 20, "ranks": "all"}
    plans = kvpage.plan_ranks(request | {"model": {"config": CONFIG, "tp": 8, "pp": 3}})
    assert [row[0] for row in found.values()] == ["1", "2", "1"]
    assert [row[-1] for row in found.values()] == [plan.plan_id[7:15] for plan in plans.ranks[::8]]
    assert "KV replicas            2\n" in done.stdout
    assert f"blocks                 {plans.num_blocks:,} on every rank\n" in done.stdout


def test_the_ranks_of_a_file_are_printed_with_a_warning() -> None:
    ranks = [{"memory_bytes": 2 * MEMORY_BYTES}, {}, {"memory_bytes": 2 * MEMORY_BYTES}]
    done = run("-", stdin=small_request(ranks=ranks))
    assert done.returncode == 0
    assert list(rows(done.stdout)) == ["0,", "1"]
    assert "0, 2 " in done.stdout
    assert done.stderr.startswith("warning: rank 1 holds only")


def test_json_is_that_of_the_library() -> None:
    request = small_request(ranks=[{"layers": ["target.{i}"]}, {"layers": ["draft.{i}"]}])
    done = run("-", "--json", stdin=request)
    assert RankedPlan.from_json(done.stdout.encode()) == kvpage.plan_ranks(request)


def test_ranks_that_attend_to_their_own_requests_keep_all_heads(config: str) -> None:
    done = run("--model", config, "--tp", "4", "--attention-dp", "4", "--memory", "1MiB", "--json")
    layer = json.loads(done.stdout)["layers"]["model.layers.0.self_attn.attn"]
    assert layer["tensors"][0]["shape"][3] == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--svg", "-"], "--svg and --compare are of one rank"),
        (["--compare"], "--svg and --compare are of one rank"),
        (["--pp", "2", "--pp-stage", "1"], "all stages are planned"),
        (["--tp", "2000"], "from 1 to 1024"),
    ],
)
def test_what_all_ranks_do_not_go_with_is_refused(config: str, arguments: list[str], words: str) -> None:
    done = run("--model", config, "--memory", "1MiB", "--all-ranks", *arguments)
    assert done.returncode == 2
    assert words in done.stderr.replace("\n", " ")


def test_all_ranks_of_a_file_without_a_model_are_refused() -> None:
    done = run("-", "--all-ranks", stdin=small_request())
    assert done.returncode == 2
    assert "say what each rank keeps" in done.stderr
