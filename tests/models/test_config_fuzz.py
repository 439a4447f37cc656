"""Mutated configs by the hundred: each makes a proven plan or is refused in words."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvpage
from kvpage.errors import InternalError, KvpageError, SpecInvalid
from support.config_fuzz import check_told, config_file, fuzzed


def test_fuzzed_configs_are_planned_or_refused_in_words(seed: int, tmp_path: Path) -> None:
    tally = fuzzed(tmp_path, seed, range(250))
    tally.require_nothing_lost()
    assert {"planned", "spec-invalid", "json-invalid"} <= tally.outcomes.keys()


def test_the_same_seed_makes_the_same_files() -> None:
    assert [config_file(7, number) for number in range(20)] == [config_file(7, number) for number in range(20)]


@pytest.mark.parametrize(
    "error",
    [
        ZeroDivisionError("division by zero"),
        RecursionError("too deep"),
        InternalError("kvpage made a mistake"),
        SpecInvalid("somewhere something is wrong"),
        kvpage.errors.NotFound("x" * 3000),
        kvpage.errors.NotFound("\x1b[31m"),
    ],
)
def test_the_check_fires_for_what_is_no_error_in_words(error: Exception, tmp_path: Path) -> None:
    def plan(request: object) -> kvpage.Plan:
        raise error

    (number,) = [number for number in range(50) if config_file(1, number)[:1] == b"{"][:1]
    tally = fuzzed(tmp_path, 1, range(number, number + 20), plan)
    assert tally.lost > 0
    if isinstance(error, KvpageError):
        with pytest.raises(AssertionError):
            check_told(error)
