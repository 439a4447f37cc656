"""Ids of tests that would differ from process to process, or name two tests, are refused before anything runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from conftest import pytest_collection_finish


def collected(*node_ids: str) -> Any:
    return SimpleNamespace(items=[SimpleNamespace(nodeid=node_id) for node_id in node_ids])


@pytest.mark.parametrize("node_ids", [("a::b[1]", "a::b[1]"), ("a::b", "a::c[<object object at 0x7f41c0396d90>]")])
def test_ids_that_cannot_be_are_refused(node_ids: tuple[str, ...]) -> None:
    with pytest.raises(pytest.UsageError):
        pytest_collection_finish(collected(*node_ids))
