"""Help, examples and options of every command there is: found by looking, so that a new one cannot be forgotten."""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.main import get_command

from kvpage.cli.commands import app
from kvpage.exit_status import DONE, TRY_AGAIN
from support.api_service import ApiService, worker_pids
from support.command_line import run, run_here
from support.known_commands import options as known_options
from support.leaks import leak_guard
from support.plan_requests import small_request

WITHOUT_JSON = {
    "serve": "goes on until it is ended; its log is JSON off a terminal",
    "worker": "the same; worker drain and worker replace have it",
}
PASSED_ON = {"serve", "worker", "config"}
"""To the server, which reads their options."""
SERVICE_OPTIONS = ["--url", "--token-file", "--ca-file", "--run-dir"]
OF_FLEET = {"fleet up", "fleet plan", "fleet status", "fleet down"}
WITHOUT_SERVICE = {"plan", "simulate", "version", "doctor", "demo", *OF_FLEET, *PASSED_ON}
NOT_RUN = {
    "fleet": "needs a Ray cluster; tests/fleet runs it",
    "demo": "takes long; tests/cli/test_demo.py runs it",
    "doctor": "takes long; tests/doctor runs it",
    "serve": "goes on; what tests start as a service is the same program",
    "worker": "goes on; drain and replace are run below",
}


def commands(command: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Those that do something, by what is typed after `kvpage`."""
    for name, child in getattr(command or get_command(app), "commands", {}).items():
        if hasattr(child, "commands"):
            yield from commands(child, (*path, name))
        else:
            yield " ".join((*path, name)), child


def option_names(command: Any) -> list[str]:
    return [one.opts[0] for one in command.params if one.param_type_name == "option" and one.name != "help"]


def examples_of(command: Any) -> list[str]:
    lines = (command.epilog or "").splitlines()
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ kvpage ")]


def all_examples() -> list[str]:
    root = get_command(app)
    return [line for command in (root, root.commands["pools"]) for line in examples_of(command)] + [  # type: ignore[attr-defined]
        line for _, command in commands() for line in examples_of(command)
    ]


QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 4096,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16", "vocab_size": 151936,
}  # fmt: skip


# --- what every command has -------------------------------------------------------------------------------------------


def without_json(found: Iterator[tuple[str, Any]]) -> set[str]:
    """Of those that print something."""
    return {path for path, command in found if path not in PASSED_ON and "--json" not in option_names(command)}


def test_every_command_can_answer_in_json() -> None:
    assert without_json(commands()) == set()
    assert "--json" in known_options()["worker", "drain"]
    assert "--json" in known_options()["worker", "replace"]
    assert PASSED_ON - {"config"} == set(WITHOUT_JSON)


def test_the_search_for_commands_without_json_finds_one() -> None:
    other = typer.Typer()
    other.command("quiet")(lambda: None)
    other.command("loud")(lambda: None)
    assert without_json(commands(get_command(other))) == {"quiet", "loud"}


@pytest.mark.parametrize("path", [path for path, _ in commands()])
def test_help_has_an_example_that_is_one(path: str) -> None:
    command = dict(commands())[path]
    assert command.help, path
    lines = examples_of(command)
    assert lines
    for line in lines:
        assert len(line) < 78, "it would be broken in a terminal of 80 columns"
        assert f"{line} ".startswith(f"kvpage {path} ")


def test_every_value_has_a_metavar_in_capitals() -> None:
    for path, command in commands():
        for one in command.params:
            if one.name != "help" and not getattr(one, "is_flag", False):
                assert one.metavar == (one.metavar or "").upper() != "", f"{path}: {one.name}"


def test_which_service_is_asked_last_and_alike_everywhere() -> None:
    for path, command in commands():
        names = option_names(command)
        if path in WITHOUT_SERVICE:
            assert not {"--url", "--token-file"} & set(names), path
        else:
            assert names[-4:] == SERVICE_OPTIONS, path
            assert names.index("--json") == len(names) - 5, path


def test_kvpage_alone_shows_its_help() -> None:
    done = run_here()
    assert done.returncode == 2
    assert "Examples:" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["polls"], "No such command 'polls'. Did you mean 'pools'? See `kvpage --help`"),
        (["pools", "lst"], "Did you mean 'list'? See `kvpage pools --help`"),
        (["plan", "--stratgy", "auto"], "--strategy); see `kvpage plan --help`"),
        (["pools", "create"], "Missing argument 'FILE'; see `kvpage pools create --help`"),
        (["top", "--interval", "x"], "'--interval'"),
    ],
)
def test_a_mistyped_command_line_is_one_line_that_says_what_was_meant(arguments: list[str], said: str) -> None:
    done, told = run_here(*arguments), run_here(*arguments, "--json")
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert line.startswith("error usage: ")
    assert said in line
    assert (told.returncode, told.stdout) == (2, "")
    found = json.loads(told.stderr)
    assert (found["code"], found["retryable"]) == ("usage", False)
    assert set(found) == {"code", "message", "details", "retryable"}


def test_an_error_in_json_has_the_faults_and_the_same_status() -> None:
    done = run_here("plan", "-", "--json", stdin='{"layers": 5}')
    told = json.loads(done.stderr)
    assert (done.returncode, done.stdout, told["code"]) == (2, "", "spec-invalid")
    assert "/layers" in [fault["pointer"] for fault in told["errors"]]


# --- the examples, run ------------------------------------------------------------------------------------------------


def make_files(folder: Path) -> None:
    """Those that the examples name."""
    (folder / "model.yaml").write_text(yaml.safe_dump(small_request()))
    (folder / "Qwen3-8B").mkdir()
    (folder / "Qwen3-8B/config.json").write_text(json.dumps(QWEN3_8B))


@pytest.fixture(scope="module")
def run_dir_of_service() -> Iterator[str]:
    with leak_guard(), tempfile.TemporaryDirectory(prefix="kvp-") as folder:
        with ApiService(Path(folder), "--memory", "512MiB") as service:
            yield folder
            assert worker_pids(service.run_directory)


def runnable() -> list[str]:
    """What makes something comes before what looks at it, what deletes it last."""
    ranks = {"create": 0, "set-tenant": 1, "delete": 3}
    lines = [line for line in dict.fromkeys(all_examples()) if line.split()[1] not in NOT_RUN]
    return sorted(lines, key=lambda line: ranks.get(" ".join(line.split()[2:3]), 2))


def bounded(words: list[str]) -> list[str]:
    """What ends a command that would go on, or go on for long."""
    if words[0] == "simulate":
        return ["--runs", "1", "--steps", "50", "--warm-up-steps", "0"]
    if "--changes" in words:
        return ["--timeout", "0.5"]
    if words[0] == "events" and "--count" not in words:
        return ["--count", "1"]
    return ["--once"] if words[0] == "top" and "--once" not in words else []


def test_every_example_runs(run_dir_of_service: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    ran = []
    for line in runnable():
        words = shlex.split(line)[1:]
        program = run if words[0] in PASSED_ON else run_here
        done = program(*words, *bounded(words), KVPAGE_RUN_DIR=run_dir_of_service)
        # Nothing changes meanwhile; tests/cli/test_events.py sees what does.
        assert done.returncode == (TRY_AGAIN if "--changes" in words else DONE), f"{line}: {done.stderr}"
        if "--json" in words:
            for told in done.stdout.splitlines():
                json.loads(told)
        ran.append(line)
    assert len(ran) > 25
    assert {line.split()[1] for line in all_examples()} - {line.split()[1] for line in ran} == set(NOT_RUN)


def test_examples_of_the_worker_are_right(run_dir_of_service: str) -> None:
    [start, replace, drain] = examples_of(dict(commands())["worker"])
    assert {word for word in start.split() if word.startswith("--")} <= known_options()["worker",]
    replaced = run(*shlex.split(replace)[1:], KVPAGE_RUN_DIR=run_dir_of_service)
    assert replaced.returncode == DONE, replaced.stderr
    assert json.loads(replaced.stdout)["device"] == "host"
    drained = run(*shlex.split(drain)[1:], "--json", "--run-dir", "/nonexistent")
    assert (drained.returncode, json.loads(drained.stderr)["retryable"]) == (TRY_AGAIN, True)


def test_examples_of_serve_and_demo_have_options_that_there_are() -> None:
    for path in ("serve", "demo"):
        for line in examples_of(dict(commands())[path]):
            assert {word for word in line.split() if word.startswith("--")} <= known_options()[path,]
