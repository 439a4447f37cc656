"""What /metrics says, as values, and whether it adds up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

Series = dict[frozenset[tuple[str, str]], float]


class Scraped:
    """The text that a scrape gave."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.families: dict[str, Metric] = {}
        self._samples: dict[str, Series] = {}
        for family in text_string_to_metric_families(text):
            name = family.name + ("_total" if family.type == "counter" else "")
            assert name not in self.families, f"{name} is described twice"
            self.families[name] = family
            for sample in family.samples:
                series = self._samples.setdefault(sample.name, {})
                labels = frozenset(sample.labels.items())
                assert labels not in series, f"{sample.name} has two samples of {dict(labels)}"
                series[labels] = sample.value

    def all(self, name: str) -> Series:
        return self._samples.get(name, {})

    def value(self, name: str, **labels: str) -> float:
        """Of the only sample with these labels and perhaps others."""
        found = [value for key, value in self.all(name).items() if labels.items() <= dict(key).items()]
        assert len(found) == 1, f"{name} has {len(found)} samples of {labels}"
        return found[0]

    def sum(self, name: str, **labels: str) -> float:
        return sum(value for key, value in self.all(name).items() if labels.items() <= dict(key).items())

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """The values of the samples with these labels, by another of theirs."""
        found: dict[str, float] = {}
        for key, value in self.all(name).items():
            named = dict(key)
            if labels.items() <= named.items():
                found[named[label]] = found.get(named[label], 0) + value
        return found


def conservation_faults(scraped: Scraped, pool: str, blocks_per_slab: Sequence[int], slab_bytes: int) -> Iterator[str]:
    """What does not add up in a pool of which each group cuts a slab into so many blocks."""
    slabs = scraped.by("kvpage_slabs", "state", pool=pool)
    owned = scraped.by("kvpage_group_slabs", "group", pool=pool)
    if sum(owned.values()) != slabs["used"] + slabs["idle"]:
        yield f"groups own {sum(owned.values()):g} slabs, but {slabs['used'] + slabs['idle']:g} are not free"
    if scraped.sum("kvpage_slab_bytes", pool=pool) != scraped.value("kvpage_pool_buffer_bytes", pool=pool):
        yield "the slabs have not the bytes of the buffer"
    if scraped.value("kvpage_slab_bytes", pool=pool, state="free") != slabs["free"] * slab_bytes:
        yield "the free slabs have not the bytes of so many"
    if slabs["null"] != 1:
        yield f"{slabs['null']:g} slabs are nobody's"
    for group, cut in enumerate(blocks_per_slab):
        yield from _group_faults(scraped, pool, str(group), cut)


def _group_faults(scraped: Scraped, pool: str, group: str, blocks_per_slab: int) -> Iterator[str]:
    blocks = scraped.by("kvpage_blocks", "state", pool=pool, group=group)
    num_blocks = scraped.value("kvpage_group_slabs", pool=pool, group=group) * blocks_per_slab
    if sum(blocks.values()) != num_blocks or min(blocks.values()) < 0:
        yield f"group {group}: {_told(blocks)} are not the {num_blocks:g} blocks of its slabs"
    if scraped.sum("kvpage_leased_blocks", pool=pool, group=group) < blocks["used"]:
        yield f"group {group}: more blocks are used than leases hold"
    if scraped.value("kvpage_available_blocks", pool=pool, group=group) < blocks["free"] + blocks["cached"]:
        yield f"group {group}: less is available than is free or cached"


def _told(counts: Mapping[str, float]) -> str:
    return " + ".join(f"{count:g} {name}" for name, count in counts.items())
