"""What the marker `sampled` leaves out, and that it leaves nothing out for good."""

from __future__ import annotations

from typing import Any

import pytest

from support.sampling import left_out


class Case:
    """As much of a pytest item as is looked at."""

    def __init__(self, nodeid: str, count: int | None, *, is_long: bool = False) -> None:
        self.nodeid = nodeid
        self._markers = {
            "sampled": None if count is None else pytest.mark.sampled(count).mark,
            "long": pytest.mark.long.mark if is_long else None,
        }

    def get_closest_marker(self, name: str) -> Any:
        return self._markers[name]


def cases(name: str, number: int, count: int | None, *, is_long: bool = False) -> list[Any]:
    return [Case(f"{name}[{place}]", count, is_long=is_long) for place in range(number)]


def names(items: set[Any]) -> set[str]:
    return {item.nodeid for item in items}


def test_as_many_cases_stay_as_the_marker_says() -> None:
    many, few, all_of_them = cases("many", 50, 7), cases("few", 3, 7), cases("all", 5, None)
    out = left_out([*many, *few, *all_of_them], seed=1)
    assert len(out) == 43
    assert out < set(many)


def test_cases_of_the_long_tier_take_no_place_of_others() -> None:
    ordinary, long = cases("t", 4, 3), cases("t", 50, 3, is_long=True)
    out = left_out([*long, *ordinary], seed=1)
    assert len(out) == 1
    assert out < set(ordinary)


def test_processes_of_one_run_choose_alike_and_runs_do_not() -> None:
    first, again, other = (names(left_out(cases("t", 20, 5), seed)) for seed in (1, 1, 2))
    assert first == again != other


def test_after_some_runs_every_case_was_tried() -> None:
    never = set.intersection(*(names(left_out(cases("t", 20, 5), seed)) for seed in range(50)))
    assert never == set()


def test_two_tests_leave_out_other_cases() -> None:
    out = names(left_out([*cases("one", 20, 10), *cases("two", 20, 10)], seed=3))
    assert {name.removeprefix("one") for name in out if name.startswith("one")} != {
        name.removeprefix("two") for name in out if name.startswith("two")
    }


def test_all_processes_of_a_run_have_its_seed(request: pytest.FixtureRequest) -> None:
    given = getattr(request.config, "workerinput", None)
    if given is None:
        pytest.skip("one process runs all tests; make test has several")
    assert given["seed"] == request.config.option.hypothesis_seed
