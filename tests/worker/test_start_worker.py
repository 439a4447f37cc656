"""`kvpage worker`: settings from all sources become the command line of a worker that reads none of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvpage.errors import SpecInvalid, TooLarge
from kvpage.run_directory import RunDirectory
from kvpage.wire.messages import DescribeDevice, DeviceState
from kvpage_server import worker
from kvpage_server.setting_fields import fields_of
from kvpage_server.setting_sources import resolve
from kvpage_server.start_worker import WORKER, worker_command, worker_parser
from support.worker_process import WorkerProcess

STAGE = [sys.executable, "-m", "kvpage_server", "start-worker"]


def command(environ: dict[str, str], **options: Any) -> list[str]:
    return worker_command(resolve({}, {"KVPAGE_CONFIG": "/dev/null", "KVPAGE_RUN_DIR": "/r"} | environ), **options)


def test_every_setting_of_a_worker_reaches_it() -> None:
    environ = {
        "KVPAGE_DEVICE": "cuda:1", "KVPAGE_MEMORY": "64MiB", "KVPAGE_GROUP": "0", "KVPAGE_ADOPT_WITHIN_S": "2.5"
    }  # fmt: skip
    assert {name for name, _ in fields_of("worker")} - {"run_dir", "devices"} == {
        name.removeprefix("KVPAGE_").lower() for name in environ
    }
    written = command(environ, replace=True, ready_fd=7)
    assert tuple(written[: len(WORKER)]) == WORKER
    options = worker._parser().parse_args(written[len(WORKER) :])  # the worker's own
    assert vars(options) == {
        "device": "cuda:1", "run_dir": "/r", "memory": "64MiB", "group": "0", "adopt_within": 2.5, "replace": True,
        "ready_fd": 7,
    }  # fmt: skip


def test_what_is_not_set_is_left_to_the_worker() -> None:
    options = worker._parser().parse_args(command({"KVPAGE_DEVICE": "host"})[len(WORKER) :])
    assert (options.memory, options.group, options.replace, options.ready_fd) == (None, None, False, None)
    assert options.adopt_within == worker.ADOPTION_S


@pytest.mark.parametrize(
    ("environ", "error", "named"),
    [
        ({}, SpecInvalid, "KVPAGE_DEVICE"),
        ({"KVPAGE_DEVICE": "../x"}, SpecInvalid, "'../x' is none"),
        ({"KVPAGE_DEVICE": "host", "KVPAGE_MEMORY": "lots"}, SpecInvalid, "KVPAGE_MEMORY is 'lots'"),
        ({"KVPAGE_DEVICE": "host", "KVPAGE_GROUP": "no-such-group-here"}, SpecInvalid, "no group"),
        ({"KVPAGE_DEVICE": "host", "KVPAGE_RUN_DIR": "/" + "d" * 100}, TooLarge, "107"),
    ],
)
def test_what_no_worker_could_start_with_is_refused_before(
    environ: dict[str, str], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        command(environ)


def test_flags_of_the_server_are_not_those_of_a_worker(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        worker_parser().parse(["--port", "80"])
    assert "unrecognized arguments: --port" in capsys.readouterr().err


def test_a_misspelt_flag_is_answered_with_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        worker_parser().parse(["--devise", "host"])
    assert "did you mean '--device'?" in capsys.readouterr().err


@pytest.mark.usefixtures("no_leaks")
def test_a_file_configures_a_worker_that_keeps_its_process(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = run_dir / "kvpage.toml"
    file.write_text("memory = '64MiB'\nadopt_within_s = 0\nport = 80\n")
    monkeypatch.setenv("KVPAGE_CONFIG", str(file))
    with WorkerProcess(run_dir, command=STAGE) as process:
        with process.client() as client:
            state = client.ask(DescribeDevice(), DeviceState)
        assert (state.worker_pid, state.memory_limit_bytes) == (process.pid, 64 << 20)
        words = Path(f"/proc/{process.pid}/cmdline").read_text().split("\0")
        assert "--memory" in words
        assert "start-worker" not in words
        assert "pydantic" not in Path(f"/proc/{process.pid}/maps").read_text()


def test_a_wrong_setting_ends_it_with_status_2_and_whoever_waits_hears_why(run_dir: Path) -> None:
    ready_out, ready_in = os.pipe()
    typed = [*STAGE, "--device", "host", "--run-dir", str(run_dir), "--memory", "lots", "--ready-fd", str(ready_in)]
    done = subprocess.run(typed, pass_fds=[ready_in], capture_output=True, text=True, check=False, timeout=60)
    os.close(ready_in)
    with open(ready_out) as ready:
        assert "--memory is 'lots'" in ready.read()
    assert done.returncode == 2
    assert done.stderr.startswith("kvpage worker: --memory is 'lots'")
    assert not RunDirectory(run_dir).worker_socket("host").exists()


def test_a_worker_that_is_replaced_or_drained_is_found_by_the_same_settings(run_dir: Path) -> None:
    file = run_dir / "kvpage.toml"
    file.write_text(f"run_dir = '{run_dir}'\n")
    environment = {name: text for name, text in os.environ.items() if name != "KVPAGE_RUN_DIR"}
    with WorkerProcess(run_dir) as process:
        drain = [*STAGE, "drain", "--device", "host", "--lose-pools", "--config", str(file)]
        done = subprocess.run(drain, env=environment, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr
        assert process.wait() == 0
