"""docs/models.md: its Python runs, and its tables are those of the code."""

from __future__ import annotations

import re

import pytest

from kvpage.models.entry import SCHEMA
from kvpage.models.formats import KV_FORMATS
from kvpage.models.options import OPTION_NAMES
from kvpage.models.registry import FAMILIES, WRAPPERS
from support.checkout import ROOT

TEXT = (ROOT / "docs" / "models.md").read_text()


def section(title: str) -> str:
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_the_guide_runs() -> None:
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL))
    assert code.count("assert ") >= 4
    exec(compile(code, "docs/models.md", "exec"), {})


def test_the_table_of_model_types_is_complete() -> None:
    rows = [line.split("|") for line in section("Model types").splitlines() if line.startswith("| ")][2:]
    listed = [name for row in rows for name in re.findall(r"`([^`]+)`", row[2])]
    assert sorted(listed) == sorted([*FAMILIES, *WRAPPERS])


def test_the_table_of_options_is_complete() -> None:
    first_cells = re.findall(r"^\| (`.+?) \|", section("Options"), re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(first_cells))) == sorted([*OPTION_NAMES, "draft"])
    assert set(SCHEMA["properties"]) == {*OPTION_NAMES, "draft", "config"}


@pytest.mark.parametrize("name", sorted(KV_FORMATS))
def test_the_formats_of_the_cache_are_named(name: str) -> None:
    assert f"`{name}`" in section("Options")
