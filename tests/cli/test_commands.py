"""The command line: what is printed, where, and the exit status."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import kvpage
from kvpage.exit_status import TRY_AGAIN
from support.api_service import ApiService
from support.command_line import COMMAND, run, run_here
from support.plan_requests import small_request

REQUEST = json.dumps(small_request())


@pytest.mark.parametrize(
    ("arguments", "stdin"),
    [
        (("plan", "-"), REQUEST),
        (("plan", "-", "--compare"), REQUEST),
        (("plan", "-", "--json"), REQUEST),
        (("plan", "-"), "{"),
        (("plan", "-"), json.dumps(small_request(memory_bytes=1))),
        (("plan",), ""),
        (("pools", "list", "--run-dir", "/nonexistent"), ""),
    ],
)
def test_a_command_does_the_same_in_this_process(arguments: tuple[str, ...], stdin: str) -> None:
    """Otherwise the tests that save the start of a program would show nothing."""
    program, here = run(*arguments, stdin=stdin), run_here(*arguments, stdin=stdin)
    assert (here.returncode, here.stdout, here.stderr) == (program.returncode, program.stdout, program.stderr)
    assert here.stdout or here.stderr


@pytest.fixture
def request_file(tmp_path: Path) -> str:
    path = tmp_path / "request.json"
    path.write_text(json.dumps(small_request()))
    return str(path)


def test_plan_prints_a_row_for_like_layers_and_the_totals(request_file: str) -> None:
    done = run("plan", request_file)
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: line for line in done.stdout.splitlines() if "…" in line}
    assert set(rows) == {"target.0", "draft.0"}
    assert "pad" in rows["draft.0"].split()
    assert "12,288" in rows["draft.0"]
    assert "4,096 (33.3%)" in rows["draft.0"]
    plan = kvpage.plan(small_request())
    assert plan.plan_id in done.stdout
    assert f"{plan.num_blocks} of {plan.bytes_per_block:,} bytes" in done.stdout


def test_reasons_are_printed_whole_however_narrow_the_terminal(request_file: str) -> None:
    reason = kvpage.plan(small_request()).layers["draft.0"].reason
    narrow = run_here("plan", request_file, COLUMNS="60")
    assert f"draft.0 … draft.4: {reason}" in narrow.stdout


def test_all_prints_every_layer(request_file: str) -> None:
    done = run_here("plan", request_file, "--all")
    assert sum(line.split()[:1] in ([f"target.{i}"] for i in range(10)) for line in done.stdout.splitlines()) == 10


def test_json_is_the_plan(request_file: str) -> None:
    done = run_here("plan", request_file, "--json")
    assert kvpage.Plan.from_json(done.stdout.encode()) == kvpage.plan(small_request())


@pytest.mark.parametrize("write", [json.dumps, yaml.safe_dump], ids=["JSON", "YAML"])
def test_standard_input_may_be_json_or_yaml(write: object) -> None:
    assert callable(write)
    done = run("plan", "-", "--json", stdin=write(small_request()))
    assert kvpage.Plan.from_json(done.stdout.encode()) == kvpage.plan(small_request())


def test_without_a_strategy_a_person_gets_the_best_there_is() -> None:
    request = small_request()
    auto = kvpage.plan(request | {"strategy": "auto"})
    del request["strategy"]
    done = run_here("plan", "-", "--json", stdin=json.dumps(request))
    assert kvpage.Plan.from_json(done.stdout.encode()) == auto


def test_a_plan_says_how_it_was_chosen() -> None:
    request = small_request(workload=[{"tokens": 100}, {"min_tokens": 200, "max_tokens": 300, "weight": 2}])
    del request["strategy"]
    plan = kvpage.plan(request | {"strategy": "auto"})
    assert plan.efficiency is not None
    printed = run_here("plan", "-", stdin=json.dumps(request)).stdout
    assert f"{plan.efficiency.held_over_live - 1:.2%} more than it needs" in printed
    assert "requests of 100, 200-300 tokens" in printed
    assert len(plan.rejected) == 2
    for other in plan.rejected:
        assert f"not {other.strategy}" in printed


@pytest.mark.parametrize(
    ("text", "code", "status"),
    [
        ("", "spec-invalid", 2),
        ("[1, 2]", "spec-invalid", 2),
        ('{"layers": 5}', "spec-invalid", 2),
        ('{"layers": [], "layers": []}', "json-invalid", 2),
        ("layers: &a []\nother: *a", "json-invalid", 2),
        ("layers: []\nlayers: []", "json-invalid", 2),
        ("a: [", "json-invalid", 2),
        ("{" * 40, "json-invalid", 2),
        ("- " * 5000 + "x", "json-invalid", 2),
        ("x: \x00", "json-invalid", 2),
        ("layers: 2020-99-99", "json-invalid", 2),
        (json.dumps(small_request(strategy="nested", allocator="flat")), "spec-invalid", 2),
        (json.dumps(small_request(memory_bytes=1)), "not-enough-memory", 1),
        ("x" * (5 << 20), "too-large", 2),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else None,
)
def test_bad_input_is_one_clear_error(text: str, code: str, status: int) -> None:
    done = run_here("plan", "-", stdin=text)
    assert done.returncode == status
    assert done.stderr.startswith(f"error {code}: ")
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_file_that_is_not_there() -> None:
    done = run("plan", "no-such-file.json")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no-such-file.json" in done.stderr


def test_a_reader_that_stops_reading_is_no_error(request_file: str) -> None:
    program = subprocess.Popen(
        [*COMMAND, "plan", request_file, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert program.stdout is not None
    program.stdout.close()
    assert program.stderr is not None
    assert b"Traceback" not in program.stderr.read()
    program.stderr.close()
    program.wait(60)


def test_version_and_help() -> None:
    assert run("--version").stdout == f"kvpage {kvpage.__version__}\n"
    assert "pools" in run("--help").stdout
    assert "--run-dir" in run("serve", "--help").stdout
    assert "--device" in run("worker", "--help").stdout


@pytest.fixture
def service(run_dir: Path) -> Iterator[ApiService]:
    with ApiService(run_dir) as service:
        yield service


def test_a_pool_from_its_creation_to_its_end(service: ApiService, request_file: str) -> None:
    where = ("--run-dir", str(service.run_directory.path))
    created = run("pools", "create", request_file, "--name", "mimo", "--json", *where)
    assert created.returncode == 0, created.stderr
    assert json.loads(created.stdout)["state"] == "ready"
    with kvpage.attach("mimo", run_dir=where[1], client_name="the engine"):
        shown = run_here("pools", "show", "mimo", *where)
        assert "held by    the engine" in shown.stdout
        refused = run_here("pools", "delete", "mimo", "--wait", "0.05", *where)
        assert refused.returncode == 1
        assert refused.stderr.startswith("error conflict: ")
        assert "the engine" in refused.stderr
    pool_id = json.loads(created.stdout)["id"]
    assert "held by    nobody" in run_here("pools", "show", pool_id, *where).stdout
    assert pool_id in run_here("pools", "list", *where).stdout
    listed = run_here("pools", "list", "--json", *where)
    assert [pool["name"] for pool in json.loads(listed.stdout)] == ["mimo"]
    assert run_here("pools", "delete", pool_id, "--device", "cuda:0", *where).returncode != 0
    assert run_here("pools", "delete", pool_id, *where).returncode == 0
    gone = run_here("pools", "show", "mimo", *where)
    assert gone.returncode == 1
    assert gone.stderr.startswith("error pool-not-found: ")


def test_a_pool_is_made_from_the_rank_that_is_named(service: ApiService, tmp_path: Path) -> None:
    request = small_request(ranks=[{"layers": ["target.{i}"]}, {"layers": ["draft.{i}"]}])
    path = tmp_path / "ranks.json"
    path.write_text(json.dumps(request))
    where = ("--run-dir", str(service.run_directory.path))
    created = run_here("pools", "create", str(path), "--name", "draft", "--rank", "1", "--json", *where)
    assert json.loads(created.stdout)["plan_id"] == kvpage.plan_ranks(request).ranks[1].plan_id
    refused = run_here("pools", "create", str(path), "--name", "draft", *where)
    assert refused.returncode == 2
    assert "the request has 2 ranks, and a pool is of one" in refused.stderr


def test_names_are_printed_as_they_are(service: ApiService, request_file: str) -> None:
    """Brackets in a name are no instruction to the terminal."""
    where = ("--run-dir", str(service.run_directory.path))
    name = "[red]pool[/red]"
    assert run_here("pools", "create", request_file, "--name", name, *where).returncode == 0
    assert f"{name} (" in run_here("pools", "show", name, *where).stdout
    assert name in run_here("pools", "list", *where).stdout
    assert f"deleted {name}" in run_here("pools", "delete", name, *where).stderr


def test_a_name_may_look_like_an_id(service: ApiService, request_file: str) -> None:
    where = ("--run-dir", str(service.run_directory.path))
    name = "pool-0123456789abcdef"
    assert run_here("pools", "create", request_file, "--name", name, *where).returncode == 0
    assert f"pool       {name} (" in run_here("pools", "show", name, *where).stdout


def test_without_a_service_the_error_says_how_to_start_one(run_dir: Path) -> None:
    done = run_here("pools", "list", "--run-dir", str(run_dir))
    assert done.returncode == TRY_AGAIN
    assert "kvpage serve" in done.stderr


def test_a_strategy_named_on_the_command_line_is_taken() -> None:
    request = small_request(strategy="unify")
    done = run_here("plan", "-", "--strategy", "auto", "--allocator", "slabs", "--json", stdin=json.dumps(request))
    assert kvpage.Plan.from_json(done.stdout.encode()) == kvpage.plan(
        request | {"strategy": "auto", "allocator": "slabs"}
    )


def test_a_strategy_that_does_not_exist_is_refused() -> None:
    done = run_here("plan", "-", "--strategy", "best", stdin=json.dumps(small_request()))
    assert done.returncode == 2
    assert "/strategy" in done.stderr
