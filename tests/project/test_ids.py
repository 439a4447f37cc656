"""What the suite does before anything runs: ids that would differ from process to process, or name two tests, are
refused, and the files that take long come first.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conftest import LONGEST_FIRST, TESTS, pytest_collection_finish, pytest_collection_modifyitems


def collected(*node_ids: str) -> Any:
    return SimpleNamespace(items=[SimpleNamespace(nodeid=node_id) for node_id in node_ids])


class Item:
    def __init__(self, path: Path) -> None:
        self.path = path

    def get_closest_marker(self, name: str) -> None:
        """None of these has a marker."""


@pytest.mark.parametrize("node_ids", [("a::b[1]", "a::b[1]"), ("a::b", "a::c[<object object at 0x7f41c0396d90>]")])
def test_ids_that_cannot_be_are_refused(node_ids: tuple[str, ...]) -> None:
    with pytest.raises(pytest.UsageError):
        pytest_collection_finish(collected(*node_ids))


def test_the_longest_files_come_first_in_their_order_and_the_others_stay_in_theirs(pytestconfig: pytest.Config) -> None:
    names = ["wire/b.py", LONGEST_FIRST[1], "wire/a.py", LONGEST_FIRST[0]]
    items: list[Any] = [Item(TESTS / name) for name in names]
    pytest_collection_modifyitems(pytestconfig, items)
    assert [item.path for item in items] == [TESTS / name for name in (*LONGEST_FIRST[:2], "wire/b.py", "wire/a.py")]


def test_the_longest_files_exist() -> None:
    assert [name for name in LONGEST_FIRST if not (TESTS / name).is_file()] == []
