"""docs/security.md: every "cannot" names a test that is there, and every role is explained."""

from __future__ import annotations

import ast
import re

import pytest

from kvpage_server.roles import ROLES_BY_LABEL
from support.checkout import ROOT

TEXT = (ROOT / "docs" / "security.md").read_text()
HEAD = "| cannot | tried by |\n| --- | --- |\n"
_NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def missing_tests(text: str) -> list[str]:
    """Those that the text names and that are not there."""
    return [f"{path}::{name}" for path, name in _NAMED.findall(text) if name not in names_in(path)]


def names_in(path: str) -> set[str]:
    if not (ROOT / path).is_file():
        return set()
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, functions)}


def untried(text: str) -> list[str]:
    """Rows of the tables of what one cannot do that name no test."""
    rows, is_inside = [], False
    for line in text.splitlines():
        if line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if "cannot" in cells:
                is_inside = True
            elif is_inside and not set(line) <= set("|- ") and not _NAMED.search(cells[-1]):
                rows.append(line)
        else:
            is_inside = False
    return rows


def test_the_first_paragraph_says_what_the_boundary_is() -> None:
    first = TEXT.split("\n\n")[1]
    assert first.startswith("**A pool is the boundary.**")


def test_every_cannot_names_a_test_that_is_there() -> None:
    assert untried(TEXT) == []
    assert missing_tests(TEXT) == []
    assert len(_NAMED.findall(TEXT)) > 30


def test_every_role_is_explained() -> None:
    for label in ROLES_BY_LABEL:
        assert re.search(rf"^\| `{label}` \| ", TEXT, re.MULTILINE), label


@pytest.mark.parametrize(
    ("row", "is_untried", "is_missing"),
    [
        (f"{HEAD}| fly | nobody |", True, False),
        (f"{HEAD}| fly | `tests/docs/test_security_document.py::test_absent` |", False, True),
        (f"{HEAD}| fly | `tests/absent.py::test_absent` |", False, True),
        ("| who | may |\n| --- | --- |\n| birds | fly |", False, False),
    ],
)
def test_the_check_fires(row: str, is_untried: bool, is_missing: bool) -> None:
    assert (bool(untried(row)), bool(missing_tests(row))) == (is_untried, is_missing)
