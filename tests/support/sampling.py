"""Some of a test's many cases in each run, others in the next: the marker `sampled`."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable

import pytest


def left_out(items: Iterable[pytest.Item], seed: int) -> set[pytest.Item]:
    """Cases that the run with this seed does without: of each test marked `sampled(n)` all but n.

    The seed alone decides, so all processes of a run choose alike.
    """
    cases: defaultdict[tuple[str, int], list[pytest.Item]] = defaultdict(list)
    for item in items:
        sampled = item.get_closest_marker("sampled")
        if sampled and not item.get_closest_marker("long"):  # those are of the long tier anyway
            cases[item.nodeid.partition("[")[0], sampled.args[0]].append(item)
    return {
        item
        for (name, count), group in cases.items()
        for item in random.Random(f"{seed} {name}").sample(group, max(0, len(group) - count))
    }
