"""What is written for those who carry on: the changelog says whom a change affects, decisions are all in their index,
and the files that CONTRIBUTING.md names exist.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.checkout import ROOT

KINDS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")


def faults(changelog: str) -> Iterator[str]:
    """One line for each thing that is not as CONTRIBUTING.md says."""
    kind = ""
    for number, block in enumerate(re.split(r"\n(?=- |#)", changelog)):
        line = block.splitlines()[0]
        if line.startswith("### "):
            kind = line.removeprefix("### ").strip()
            if kind not in KINDS:
                yield f"{kind!r} is none of {', '.join(KINDS)}"
        elif line.startswith("## "):
            kind = ""
        elif line.startswith("- "):
            text = " ".join(block.split())
            if not kind:
                yield f"under no heading: {line}"
            if not text.endswith("."):
                yield f"not a sentence: {line}"
            if kind not in ("", "Added") and not re.search(r"\bWho\b[^.]*:", text):
                yield f"does not say whom it affects: {line}"
        elif number and not line.startswith("# "):
            yield f"neither heading nor entry: {line}"


def test_the_changelog_says_whom_a_change_affects() -> None:
    assert list(faults((ROOT / "CHANGELOG.md").read_text())) == []


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("## 1\n\n### Changed\n- Ports begin at 8. Who binds them: take others.\n", 0),
        ("## 1\n\n### Added\n- Ports, any\n  number of them.\n", 0),
        ("## 1\n\n### Changed\n- Ports begin at 8.\n", 1),
        ("## 1\n\n### Changes\n- Ports. Who: x.\n", 1),
        ("## 1\n- Ports.\n", 1),
        ("## 1\n\n### Added\n- Ports\n", 1),
        ("## 1\n\n### Fixed\n- One. Who: x.\n## 2\n- Another.\n", 1),
    ],
)
def test_the_changelog_check_fires(text: str, number: int) -> None:
    assert len(list(faults("# Changelog\n\nWhat changed.\n\n" + text))) == number


def index_rows(index: str) -> dict[str, str]:
    """By the name of the file, the number that its row shows."""
    return {name: number for number, name in re.findall(r"^\| \[(\d+)\]\(([^)]+)\) \| \S.* \|$", index, re.MULTILINE)}


def test_every_decision_is_in_the_index_under_its_number() -> None:
    folder = ROOT / "docs" / "decisions"
    files = {path.name for path in folder.glob("*.md")} - {"README.md"}
    rows = index_rows((folder / "README.md").read_text())
    assert rows == {name: str(int(name[:4])) for name in files}
    assert sorted(map(int, rows.values())) == [*range(1, len(files) + 1)], "a number is missing or used twice"


def test_a_decision_without_a_sentence_is_no_row() -> None:
    assert index_rows("| [1](0001-a.md) | a |\n| [2](0002-b.md) |  |\n") == {"0001-a.md": "1"}


PATH = re.compile(r"`((?:kvpage|server|tests|docs|scripts|deploy|examples)/[\w./-]*)`")


def missing_paths(page: str, root: Path) -> list[str]:
    return [path for path in PATH.findall(page) if not (root / path).exists()]


def test_the_files_that_contributing_names_exist() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert len(PATH.findall(page)) > 40
    assert missing_paths(page, ROOT) == []


def test_a_file_that_is_missing_is_found(tmp_path: Path) -> None:
    (tmp_path / "kvpage").mkdir()
    assert missing_paths("`kvpage/` and `kvpage/gone.py`", tmp_path) == ["kvpage/gone.py"]


def test_the_files_named_for_a_metric_are_those_that_name_metrics() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    [told] = re.findall(r"^### … a metric\n\n1\. (.+)$", page, re.MULTILINE)
    named = {path for path in PATH.findall(told) if path.startswith("server/")}
    sources = ROOT / "server" / "kvpage_server"
    having = {
        f"server/kvpage_server/{path.name}" for path in sources.glob("metrics*.py") if '"kvpage_' in path.read_text()
    }
    assert named == having


def test_contributing_tells_how_to_add_each_thing() -> None:
    told = re.findall(r"^### … an? (.+)$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    things = ("kind of layer", "family of models", "attention backend", "release of vLLM for the connector")
    assert told == [*things, "HTTP operation", "metric", "setting", "benchmark", "command", "error code"]
