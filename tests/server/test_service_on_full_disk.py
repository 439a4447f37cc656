"""A full disk, or one without room for another name, ends nothing; what cannot be done then is said with its cause."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.service_on_full_disk import full_disk


def test_the_service_goes_on_with_a_full_disk(no_leaks: None) -> None:
    full_disk("while it serves", "the server starts, and no file can be made").require_nothing_lost()


@pytest.mark.long
def test_it_starts_dies_and_is_replaced_with_a_full_disk(no_leaks: None) -> None:
    tally = full_disk()
    tally.require_nothing_lost()
    assert tally.tried == 9


def test_the_check_fires_for_a_scene_that_fails_and_where_nothing_was_tried(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("""print('{"outcomes": {"one": 1}, "losses": ["another: AssertionError"]}')""")
    with pytest.raises(AssertionError, match="1 of 2 lost"):
        full_disk(program=str(program)).require_nothing_lost()
    with pytest.raises(AssertionError, match="nothing was tried"):
        full_disk("no such scene").require_nothing_lost()
