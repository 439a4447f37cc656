"""Command line first, then KVPAGE_ variables, then defaults; what cannot be served is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kvpage.errors import SpecInvalid
from kvpage.run_directory import RunDirectory
from kvpage_server.access import secret_token
from kvpage_server.configured import from_command_line
from kvpage_server.settings import Settings

TOKEN = b"0123456789abcdef0123456789abcdef"


def test_defaults_serve_the_host_on_the_unix_socket_only() -> None:
    settings = from_command_line(["--run-dir", "/run/here"], {})
    assert settings == Settings(run_directory=RunDirectory(Path("/run/here")))
    assert settings.devices == ("host",)
    assert settings.port is None


def test_arguments_win_over_variables() -> None:
    environ = {
        "KVPAGE_DEVICES": "cuda:0,cuda:1",
        "KVPAGE_PORT": "81",
        "KVPAGE_MEMORY": "0.25",
        "KVPAGE_HOST": "localhost",
    }
    settings = from_command_line(["--run-dir", "/r", "--port", "82", "--device", "host"], environ)
    assert (settings.devices, settings.port, settings.memory, settings.host) == (("host",), 82, "0.25", "localhost")
    settings = from_command_line(["--run-dir", "/r"], environ)
    assert (settings.devices, settings.port) == (("cuda:0", "cuda:1"), 81)


@pytest.mark.parametrize("arguments", [["--port", "x"], ["--nonsense"], ["--lea"], ["extra"]])
def test_unknown_arguments_end_with_a_usage_message(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        from_command_line(["--run-dir", "/r", *arguments], {})
    assert ended.value.code == 2
    assert "usage: kvpage serve" in capsys.readouterr().err


@pytest.mark.parametrize(
    "changes",
    [
        {"devices": ()},
        {"devices": ("host", "host")},
        {"devices": ("../escape",)},
        {"port": 65536},
        {"port": -1},
        {"port": 80, "host": "0.0.0.0"},
        {"port": 80, "host": "192.0.2.1"},
        {"port": 80, "host": "::"},
        {"port": 80, "host": "example.org"},
    ],
)
def test_what_cannot_be_served_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(SpecInvalid):
        Settings(run_directory=RunDirectory(Path("/r")), **changes)


def test_a_token_opens_other_addresses(tmp_path: Path) -> None:
    settings = Settings(run_directory=RunDirectory(tmp_path), port=80, host="0.0.0.0", token_file=tmp_path / "token")
    assert settings.host == "0.0.0.0"


def test_groups_are_found_by_number_and_name() -> None:
    directory = RunDirectory(Path("/r"))
    assert Settings(run_directory=directory).group_gid is None
    assert Settings(run_directory=directory, group="12345").group_gid == 12345
    assert Settings(run_directory=directory, group="root").group_gid == 0
    with pytest.raises(SpecInvalid):
        _ = Settings(run_directory=directory, group="no-such-group-here").group_gid


def write_token(path: Path, content: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_a_token_is_read_without_its_line_end(tmp_path: Path) -> None:
    assert secret_token(write_token(tmp_path / "token", TOKEN + b"\r\n")) == TOKEN


@pytest.mark.parametrize("content", [b"", b"short", TOKEN + b"\n" + TOKEN, b"\xff" * 32, b"a b" * 10])
def test_a_token_that_cannot_be_sent_or_is_too_short_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(SpecInvalid):
        secret_token(write_token(tmp_path / "token", content))


def test_a_token_everybody_can_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecInvalid, match="everybody"):
        secret_token(write_token(tmp_path / "token", TOKEN, 0o644))
    with pytest.raises(SpecInvalid, match=os.strerror(2)):
        secret_token(tmp_path / "missing")
