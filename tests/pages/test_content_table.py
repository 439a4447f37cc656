"""The table from hashes to slots, beside a dictionary; also with hashes that are not random at all."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpage.pages.content_table import ContentTable, hashes_array

MASK = 2**64 - 1


def any_hash(chance: random.Random) -> bytes:
    return chance.randbytes(16)


def counted(chance: random.Random) -> bytes:
    """The first half is always the same."""
    return chance.randrange(1, 300).to_bytes(16, "big")


def colliding(chance: random.Random) -> bytes:
    """All are mixed to the same number in group 0: one bucket, one mark."""
    second = chance.randrange(1, 40)
    return ((-second * 0x9E3779B97F4A7C15) & MASK).to_bytes(8, "little") + second.to_bytes(8, "little")


class Beside:
    """A table, and the dictionary that it should be like."""

    def __init__(self, num_slots: int) -> None:
        self.rows = np.zeros((num_slots, 2), np.uint64)
        self.table = ContentTable(self.rows)
        self.known: dict[tuple[int, bytes], int] = {}
        self.num_slots = num_slots

    def free(self) -> list[int]:
        return sorted(set(range(1, self.num_slots)) - set(self.known.values()))

    def insert(self, group: int, slots: list[int], hashes: list[bytes], *, one_by_one: bool) -> None:
        for slot, content in zip(slots, hashes, strict=True):
            self.rows[slot] = hashes_array(content)[0]
            self.known[group, content] = slot
            if one_by_one:
                self.table.insert_one(group, slot, content)
        if not one_by_one:
            self.table.insert(group, np.array(slots, np.intp), hashes_array(b"".join(hashes)))

    def forget(self, keys: list[tuple[int, bytes]], *, one_by_one: bool) -> None:
        slots = [self.known.pop(key) for key in keys]
        if one_by_one:
            for slot in slots:
                self.table.forget_one(slot)
        else:
            self.table.forget(np.array(slots, np.intp))

    def check(self, asked: list[bytes]) -> None:
        for group in (0, 1):
            expected = [self.known.get((group, content), 0) for content in asked]
            assert [self.table.find_one(group, content) for content in asked] == expected
            if asked:
                assert self.table.find(group, hashes_array(b"".join(asked))).tolist() == expected
            mine = sorted(slot for (at, _), slot in self.known.items() if at == group)
            assert self.table.slots_of(group).tolist() == mine
            assert all(self.table.has(group, slot) == (slot in mine) for slot in range(self.num_slots))
        assert self.table.has_any(np.arange(self.num_slots)).sum() == len(self.known)


@pytest.mark.parametrize("make", [any_hash, counted, colliding])
@given(seed=st.integers(0, 2**32), num_slots=st.sampled_from([2, 5, 60, 400]))
def test_it_is_like_a_dictionary(make: object, seed: int, num_slots: int) -> None:
    assert callable(make)
    chance = random.Random(seed)
    beside = Beside(num_slots)
    asked: list[bytes] = []
    for _ in range(12):
        group, one_by_one = chance.randrange(2), chance.random() < 0.5
        if chance.random() < 0.6:
            hashes = list(dict.fromkeys(make(chance) for _ in range(chance.randrange(1, 80))))
            asked += hashes
            new = [content for content in hashes if (group, content) not in beside.known]
            free = beside.free()
            chance.shuffle(free)
            count = min(len(new), len(free))
            beside.insert(group, free[:count], new[:count], one_by_one=one_by_one)
        elif beside.known:
            keys = chance.sample(sorted(beside.known), chance.randint(1, len(beside.known)))
            beside.forget(keys, one_by_one=one_by_one)
        beside.check(asked)


def test_what_does_not_fit_into_its_bucket_is_found_and_forgotten() -> None:
    beside = Beside(100)
    chance = random.Random(0)
    hashes = list(dict.fromkeys(colliding(chance) for _ in range(500)))
    assert len(hashes) > 30
    beside.insert(0, list(range(1, len(hashes) + 1)), hashes, one_by_one=False)
    beside.check(hashes)
    beside.forget(list(beside.known), one_by_one=False)
    beside.check(hashes)
    beside.insert(0, list(range(1, len(hashes) + 1)), hashes, one_by_one=True)
    beside.check(hashes)


def test_forgetting_what_is_not_there_changes_nothing() -> None:
    beside = Beside(20)
    chance = random.Random(0)
    hashes = [any_hash(chance) for _ in range(5)]
    beside.insert(1, [3, 4, 5, 6, 7], hashes, one_by_one=False)
    beside.table.forget(np.array([10, 11], np.intp))
    beside.table.forget_one(12)
    beside.check(hashes)
