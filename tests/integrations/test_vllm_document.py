"""docs/vllm.md: its Python runs, and it names every class and field that is known."""

from __future__ import annotations

import re

import pytest

from kvpage.integrations.vllm import objects
from support.checkout import ROOT

TEXT = (ROOT / "docs" / "vllm.md").read_text()


def test_the_guide_runs() -> None:
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL))
    assert code.count("assert ") >= 2
    exec(compile(code, "docs/vllm.md", "exec"), {})


def test_the_table_of_classes_is_that_of_the_code() -> None:
    rows = [line.split("|") for line in TEXT.splitlines() if line.startswith("| `")]
    listed = {name: row[2].strip(" `") for row in rows for name in re.findall(r"`(\w+)`", row[1])}
    packed = {"TQFullAttentionSpec": "mla_attention"}  # its rows are for its backend to read
    assert listed == objects.KINDS | packed | {objects.WRAPPER: ""}


@pytest.mark.parametrize("name", sorted({*objects.WITHOUT_EFFECT.split(), *objects.NO_KIND}))
def test_what_is_left_out_is_named(name: str) -> None:
    assert f"`{name}`" in TEXT
