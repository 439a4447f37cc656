"""Samples of metrics by their labels, of which there are boundedly many."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Literal, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from kvpage.wire.leasing import Latency

MAX_POOLS_NAMED, MAX_TENANTS_NAMED = 256, 100
OTHER = "other"
"""Label of all that are not named, added up."""
_SUM = "sum"


class Named:
    """Which of the things that anybody can make are told apart. One that is stays so as long as it is there: what is
    counted under its name does not jump when others come.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._named: set[tuple[str, ...]] = set()

    def keep(self, present: Iterable[tuple[str, ...]]) -> None:
        """These are there now, and no others. The last part of each is its name."""
        found = list(dict.fromkeys(present))
        self._named &= set(found)
        for key in found:
            if len(self._named) >= self._limit:
                return
            self._named.add(key)

    def label(self, *key: str) -> str:
        return key[-1] if key in self._named else OTHER


class Described(NamedTuple):
    """A metric, as /metrics describes it."""

    kind: Literal["counter", "gauge", "histogram"]
    meaning: str
    labels: tuple[str, ...]


class Samples:
    """Of the metrics of a table. Those with the same labels are added up, which is how what is not named is counted."""

    def __init__(self, table: Mapping[str, Described]) -> None:
        self._table = table
        self._values: dict[str, dict[tuple[str, ...], float]] = {name: {} for name in table}

    def add(self, name: str, value: float | None, *labels: str) -> None:
        """None: not known, so that there is no sample."""
        if value is not None:
            values = self._values[name]
            values[labels] = values.get(labels, 0) + value

    def add_latency(self, name: str, latency: Latency, *labels: str) -> None:
        bounds = [*map(str, latency.bounds_s), "+Inf"]
        for bound, count in zip(bounds, accumulate(latency.counts), strict=True):
            self.add(name, count, *labels, bound)
        self.add(name, latency.sum_s, *labels, _SUM)

    def values(self, name: str) -> Mapping[tuple[str, ...], float]:
        return self._values[name]

    def families(self) -> Iterator[Metric]:
        for name, (kind, meaning, labels) in self._table.items():
            if kind == "histogram":
                yield self._histogram(name, meaning, labels)
                continue
            family = (CounterMetricFamily if kind == "counter" else GaugeMetricFamily)(name, meaning, labels=labels)
            for values, value in self._values[name].items():
                family.add_metric(values, value)
            yield family

    def _histogram(self, name: str, meaning: str, labels: tuple[str, ...]) -> Metric:
        family = HistogramMetricFamily(name, meaning, labels=labels)
        found: dict[tuple[str, ...], dict[str, float]] = {}
        for (*values, bound), value in self._values[name].items():
            found.setdefault(tuple(values), {})[bound] = value
        for key, parts in found.items():
            sum_s = parts.pop(_SUM)
            family.add_metric(key, list(parts.items()), sum_s)
        return family
