"""Odd environments, files and arguments: one line that says what is wrong, and never a traceback."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from support.api_service import ApiService
from support.checkout import ROOT
from support.command_line import COMMAND, run, run_here
from support.plan_requests import small_request

NOWHERE = "http://127.0.0.1:1"
REQUEST = json.dumps(small_request())


def only_line(done: subprocess.CompletedProcess[str]) -> str:
    """The one line of an error."""
    [line] = done.stderr.splitlines()
    assert done.stdout == ""
    return line


ASCII = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0"}


def test_tables_are_printed_where_only_ascii_is(run_dir: Path) -> None:
    request = small_request(layers=[{**small_request()["layers"][0], "name": "é→{i}"}])
    planned = run("plan", "-", stdin=json.dumps(request), **ASCII)
    with ApiService(run_dir) as service, service.client() as client:
        client.create_pool(request, name="é→")
        listed = run("pools", "list", "--run-dir", str(run_dir), **ASCII)
    for done in (planned, listed):
        assert "\\xe9\\u2192" in done.stdout
        assert (done.returncode, done.stderr) == (0, "")


def test_closed_streams(tmp_path: Path) -> None:
    def closing(*fds: int) -> subprocess.CompletedProcess[str]:
        closed = " ".join(f"{fd}>&-" for fd in fds)
        line = f'exec "$@" {closed}'
        return subprocess.run(
            ["bash", "-c", line, "bash", *COMMAND, "plan", "-"], capture_output=True, text=True, check=False, timeout=60
        )

    no_input = closing(0)
    assert no_input.returncode == 2
    assert only_line(no_input).startswith("error spec-invalid: cannot read standard input")
    assert closing(0, 1).returncode == 2
    assert closing(0, 2).returncode == 2


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_is_said() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, "plan", "-"], input=REQUEST, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1
    assert done.stderr == "error: [Errno 28] No space left on device\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_picture_that_the_disk_does_not_take_is_no_wrong_name() -> None:
    done = run_here("plan", "-", "--svg", "/dev/full", "--json", stdin=REQUEST)
    assert (done.returncode, json.loads(done.stderr)["code"]) == (1, "output")


NO_FILE = "nowhere/at.all"
MODEL = str(next((ROOT / "tests" / "data" / "models").iterdir()))


@pytest.mark.parametrize("path", [NO_FILE, "", "x" * 300], ids=["missing", "a folder", "a long name"])
@pytest.mark.parametrize(
    "command",
    [
        ["plan", NO_FILE],
        ["plan", "--memory", "1GiB", "--model", NO_FILE],
        ["plan", "--memory", "1GiB", "--model", MODEL, "--draft", NO_FILE],
        ["plan", "-", "--svg", NO_FILE],
        ["simulate", NO_FILE],
        ["simulate", "-", "--stream", NO_FILE],
        ["pools", "create", NO_FILE, "--name", "one", "--url", NOWHERE],
        ["pools", "list", "--url", NOWHERE, "--token-file", NO_FILE],
        ["pools", "list", "--url", "https://127.0.0.1:1", "--ca-file", NO_FILE],
        ["health", "--url", NOWHERE, "--token-file", NO_FILE],
        ["health", "--url", "https://127.0.0.1:1", "--ca-file", NO_FILE],
    ],
    ids=" ".join,
)
def test_a_file_that_is_wrong_is_wrong_input_whatever_command_it_is_for(
    tmp_path: Path, command: list[str], path: str
) -> None:
    typed = [str(tmp_path / path) if word == NO_FILE else word for word in command]
    done = run_here(*typed, stdin=REQUEST)
    assert done.returncode == 2
    assert only_line(done).startswith("error spec-invalid: ")


def _missing(folder: Path) -> Path:
    return folder / "nowhere"


def _holding(content: bytes) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        path = folder / "token"
        path.write_bytes(content)
        return path

    return write


@pytest.mark.parametrize(
    "token",
    [
        _missing,
        _holding(b""),
        _holding(b"\xff\xfe" * 20),
        _holding("é".encode() * 20),
        _holding(b"two\nlines"),
        _holding(b"a" * 5000),
        lambda _: Path("/dev/zero"),
        lambda folder: folder,
    ],
    ids=["missing", "empty", "no text", "not ASCII", "two lines", "long", "endless", "a folder"],
)
def test_a_token_file_that_holds_no_token(tmp_path: Path, token: Callable[[Path], Path]) -> None:
    path = token(tmp_path)
    done = run_here("pools", "list", "--url", NOWHERE, "--token-file", str(path))
    assert done.returncode == 2
    assert only_line(done).startswith(f"error spec-invalid: the token file {path} ")


@pytest.mark.parametrize("url", ["http://[::1", "http://", "http://:80", "http://a:99999", "http://a:b", "ftp://a", ""])
def test_a_url_that_is_none(url: str) -> None:
    done = run_here("pools", "list", "--url", url)
    assert done.returncode == 2
    assert only_line(done).startswith("error spec-invalid: url ")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("command", ["create", "show", "delete"])
def test_a_name_that_is_no_text(tmp_path: Path, command: str) -> None:
    path = tmp_path / "request.json"
    path.write_text(REQUEST)
    name = [b"-", b"--name", b"\xff"] if command == "create" else [b"\xff"]
    done = subprocess.run(
        [*COMMAND, "pools", command, *name, "--url", NOWHERE], input=REQUEST.encode(), capture_output=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith(b"error spec-invalid: ")
    assert b"Traceback" not in done.stderr


def test_each_fault_is_printed_once() -> None:
    request = small_request(strategy=7, num_blocks=0)
    done = run_here("plan", "-", stdin=json.dumps(request))
    assert done.stderr.count("/strategy") == 1
    assert done.stderr.count("/num_blocks") == 1


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--ready-fd", "99"], "--ready-fd 99 is not open"),
        (["--ready-fd", "-1"], "--ready-fd -1 is not open"),
        (["--ready-fd", "99999999999999999999"], "is not open"),
        (["--ready-fd", "0"], "open for reading only"),
        (["--group", "99999999999"], "4294967294"),
        (["--group", "4294967295"], "4294967294"),
        (["--group", "²"], "no group"),
        (["--token-file", "/dev/zero"], "not an ordinary file"),
    ],
)
def test_what_serve_cannot_start_with(run_dir: Path, arguments: list[str], reason: str) -> None:
    done = run("serve", "--run-dir", str(run_dir), *arguments)
    assert done.returncode == 2
    assert reason in only_line(done)
