"""docs/cli.md is what the commands say of themselves."""

from __future__ import annotations

import pytest
from typer.main import get_command

import cli_reference
from kvpage.cli.commands import app
from kvpage.cli.completion import TIMEOUT_S
from kvpage.cli.failing import USAGE
from kvpage.cli.where import TOKEN_FILE_VARIABLE, URL_VARIABLE
from kvpage.exit_status import MEANINGS


@pytest.fixture(scope="module")
def written() -> str:
    return cli_reference.write(cli_reference.PAGE.read_text())


def test_the_page_is_written_from_the_commands(written: str) -> None:
    assert cli_reference.PAGE.read_text() == written, "run python scripts/cli_reference.py"


def test_every_command_and_every_status_is_there(written: str) -> None:
    paths = [path for path, _ in cli_reference.commands(get_command(app))]
    assert {"plan", "events", "pools create", "pools set-tenant"} <= set(paths)
    for path in [*paths, *cli_reference.PROGRAMS]:
        assert f"# `kvpage {path}`" in written
    for status in MEANINGS:
        assert f"\n| {status} | " in written


def test_options_of_the_server_are_read_from_its_help(written: str) -> None:
    """However long the names are: argparse puts the help of long ones on another line."""
    rows = [line for line in written.splitlines() if line.startswith("| `--")]
    assert [row for row in rows if row.split(" | ")[1].strip(" |") == ""] == []
    assert any(row.startswith("| `--external-workers") for row in rows)
    assert any(row.startswith("| `--lose-pools`") for row in rows)


def test_the_prose_is_right() -> None:
    page = cli_reference.PAGE.read_text()
    assert f"for at most {TIMEOUT_S:g} s" in page
    for name in (f"`{USAGE}`", f"`{URL_VARIABLE}`", f"`{TOKEN_FILE_VARIABLE}`"):
        assert name in page


def test_what_was_written_by_hand_into_the_tables_is_found(written: str) -> None:
    changed = written.replace("| `--once` |", "| `--twice` |")
    assert changed != written
    assert cli_reference.write(changed) == written
