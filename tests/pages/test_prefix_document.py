"""docs/prefix.md runs."""

from __future__ import annotations

import re

from kvpage.pages.events import DEFAULT_MOST_HASHES
from support.checkout import ROOT

TEXT = (ROOT / "docs" / "prefix.md").read_text()


def test_the_guide_runs() -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    assert code.count("assert ") >= 6
    exec(compile(code, "docs/prefix.md", "exec"), {})


def test_the_guide_names_the_size_of_the_log() -> None:
    assert f"as many as have {DEFAULT_MOST_HASHES:,} hashes together" in TEXT
