"""docs/settings.md: its table is that of the code, and what it shows is what is printed."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from kvpage.errors import SpecInvalid
from kvpage_server.setting_fields import Fields
from kvpage_server.setting_sources import resolve
from settings_table import BEGIN, END, PAGE, write

TEXT = PAGE.read_text()


def test_the_table_is_written_from_the_code() -> None:
    assert write(TEXT) == TEXT, "python scripts/settings_table.py"


def test_the_table_has_every_setting() -> None:
    table = TEXT.split(BEGIN)[1].split(END)[0]
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == list(Fields.model_fields)


def test_a_table_of_another_time_is_seen() -> None:
    assert write(TEXT.replace("| `port` |", "| `prt` |")) == TEXT


def test_the_example_is_a_file_of_settings(tmp_path: Path) -> None:
    [example] = re.findall(r"^```toml\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    file = tmp_path / "kvpage.toml"
    file.write_text(example)
    origins = resolve({"config": str(file)}, {}).origins
    assert set(origins) == set(tomllib.loads(example))
    shown = [line for line in TEXT.splitlines() if "/etc/kvpage/kvpage.toml:" in line and line.startswith(("d", "g"))]
    assert len(shown) == 2
    for line in shown:  # the file of the example
        name, _, place = line.split()
        assert str(origins[name]).rpartition(":")[2] == place.rpartition(":")[2]


def test_the_errors_shown_are_those_told(tmp_path: Path) -> None:
    file = tmp_path / "kvpage.toml"
    file.write_text('\n\nport = "8080"\nprot = 1\n')
    with pytest.raises(SpecInvalid) as refused:
        resolve({"config": str(file)}, {})
    for line in refused.value.message.replace(str(file), "/etc/kvpage/kvpage.toml").splitlines():
        assert f"kvpage serve: {line}\n" in TEXT
