"""`kvpage simulate`: its tables, its options, and the document that has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest

import simulation_tables
from kvpage.cli.simulate_layouts import POSSIBLE
from kvpage.errors import SpecInvalid
from kvpage.request import PlanRequest
from kvpage.simulation.report import MAX_RUNS, Extent
from kvpage.simulation.streams import SHORT
from models.public_configs import config
from planner import build
from simulated.models import MODELS
from support.command_line import run, run_here

LAYERS = [build.full("full.{i}", count=10, size=192), build.sliding("window.{i}", count=5)]
PADS = {"layers": LAYERS, "memory_bytes": 1 << 28, "strategy": "unify"}


@pytest.fixture
def request_file(tmp_path: Path) -> str:
    path = tmp_path / "request.json"
    path.write_text(json.dumps(PADS))
    return str(path)


def simulated(*arguments: str) -> dict[str, Any]:
    done = run_here("simulate", *arguments, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_every_strategy_has_a_row_in_equal_memory(request_file: str) -> None:
    found = simulated(request_file, "--stream", "short", "--memory", "512MiB", "--runs", "2")
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == ["unify", "scale_then_pad", "slab", "nested", "pools"]
    assert {row["memory_bytes"] for row in rows.values()} == {512 << 20}
    assert rows["nested"]["mean_running"] >= rows["unify"]["mean_running"] > 1
    assert found["extent"] == {"steps": 300, "warm_up_steps": 0, "runs": 2, "seed": 1}
    for row in rows.values():
        assert 0 < row["live_share"] <= row["held_share"] <= 1
        assert row["fewest_running"] <= row["mean_running"] <= row["most_running"]


def test_the_same_seed_prints_the_same_and_another_does_not(request_file: str) -> None:
    first, again, other = (
        simulated(request_file, "--strategies", "nested", "--runs", "1", "--seed", seed)["rows"]
        for seed in ("3", "3", "4")
    )
    assert first == again != other


def test_a_table_for_people(request_file: str, tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("100,20\n50,40\n900000,10\n")
    done = run("simulate", request_file, "--stream", str(lengths), "--steps", "50", "--warm-up-steps", "5")
    assert (done.returncode, done.stderr) == (0, "")
    assert "3 requests of a file, repeated" in done.stdout
    assert "50 steps after 5" in done.stdout
    assert "too long" in done.stdout
    assert "%" in next(line for line in done.stdout.splitlines() if line.strip().startswith("nested"))


def test_conversations_have_a_row_for_each_policy(request_file: str) -> None:
    options = ["--prefix-caching", "--conversations", "10", "--steps", "1500", "--warm-up-steps", "1000", "--runs", "1"]
    rows = simulated(request_file, *options, "--strategies", "unify,nested,pools")["rows"]
    assert [(row["name"], row["policy"]) for row in rows] == [
        ("unify", "older_of_block_and_slab"),
        ("nested", "own_oldest"),
        ("nested", "older_of_block_and_slab"),
    ]
    assert all(0 <= row["found_share"] <= 1 and row["pinned_share"] <= 1 for row in rows)
    done = run_here("simulate", request_file, *options, "--strategies", "nested", COLUMNS="80")
    assert "10 conversations at once, 3-10 turns each" in done.stdout
    assert "…" not in done.stdout


def test_a_strategy_without_a_plan_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    request = PADS | {"layers": [build.full("full"), build.state("state", [[3, 3]], ["bfloat16"])]}
    path = tmp_path / "hybrid.json"
    path.write_text(json.dumps(request))
    found = simulated(str(path), "--strategies", "unify,slab", "--steps", "20")
    assert [row["name"] for row in found["rows"]] == ["slab"]
    assert "cannot be padded" in found["refused"]["unify"]
    shown = run_here("simulate", str(path), "--strategies", "unify,slab", "--steps", "20")
    assert "unify has no layout" in shown.stdout


def test_a_model_is_planned_from_its_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config("qwen3-next-80b-a3b")))
    done = run_here("simulate", "--model", str(tmp_path), "--memory", "8GiB", "--steps", "20", "--runs", "1")
    assert done.returncode == 0, done.stderr
    assert "nested" in done.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--stream", "longest"], "'longest' is none of short, chat, long, and no file"),
        (["--strategies", "best"], "none of unify, scale_then_pad, slab, nested, pools, auto"),
        (["--strategies", "pools"], "names only pools"),
        (["--memory", "much"], "size 'much'"),
        (["--memory", "64KiB"], "memory_bytes is 65536"),
        (["--steps", "0"], "steps is 0"),
        (["--runs", "-1"], "runs is -1"),
        (["--seed", "-1"], "seed is -1"),
        (["--warm-up-steps", "1000001"], "warm_up_steps is 1000001"),
        (["--prefix-caching", "--conversations", "0"], "conversations is 0"),
        (["--prefix-caching", "--stream", "chat"], "leave one of the two out"),
        (["--model", "config.json"], "one of the two"),
        (["--strategies", "nested", "--allocator", "flat"], "allocator"),
    ],
)
def test_bad_options_are_one_line(request_file: str, options: list[str], said: str) -> None:
    done = run_here("simulate", request_file, *options)
    assert done.returncode != 0
    assert done.stdout == ""
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("text", "said"), [("[]", "object"), ('{"layers": [], "num_blocks": 9}', "--memory")])
def test_a_request_that_cannot_be_compared_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "request.json"
    path.write_text(text)
    done = run_here("simulate", str(path))
    assert done.returncode == 2
    assert said in done.stderr


def test_the_strategies_are_those_of_a_request() -> None:
    known = get_args(PlanRequest.model_fields["strategy"].annotation)
    assert set(POSSIBLE) == {*known, "pools"}


def test_too_many_runs_are_refused() -> None:
    Extent(steps=1, runs=MAX_RUNS)
    with pytest.raises(SpecInvalid, match="runs"):
        Extent(steps=1, runs=MAX_RUNS + 1)


def test_the_table_in_the_document_is_what_the_command_prints() -> None:
    """One row of it, computed again. When it differs: make simulation-tables."""
    row = simulation_tables.batches_row("gemma-3-27b", SHORT)
    assert row in simulation_tables.DOCUMENT.read_text()


def test_every_table_has_its_place_in_the_document() -> None:
    document = simulation_tables.DOCUMENT.read_text()
    for name in simulation_tables.make_sections():
        assert "\n| row |\n<!-- end" in simulation_tables.put(document, name, "| row |\n")
    with pytest.raises(ValueError, match="lacks"):
        simulation_tables.put(document, "nothing", "| row |\n")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("model", MODELS)
def test_every_model_of_the_tables_has_a_nested_plan_that_holds_at_least_what_vllms_rule_does(model: str) -> None:
    """One run of 100 steps of the short stream: unlike the tables a second, not minutes."""
    extent = Extent(steps=100, runs=1)
    rows = simulation_tables.stream_rows(model, SHORT, extent)
    assert rows["nested"].mean_running >= rows.get("unify", rows["slab"]).mean_running
    assert rows["nested"].live_share <= rows["nested"].held_share <= 1
