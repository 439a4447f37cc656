"""Random operations of leases on a pool, beside a model that only counts who holds what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvpage.errors import Conflict, KvpageError, OutOfBlocks, SpecInvalid, StaleHandle
from kvpage.pages.leased_pool import LeasedPool
from kvpage.pages.leases import Lease, QuotaExceeded
from kvpage.pages.reservations import commit_reservation, reserve
from kvpage.pages.steps import Content, Grant, Step
from kvpage.pages.tenants import Tenant
from support.leased_pools import LAYERS, content, held_of, new_buffer, plan_of, state_of

Block = tuple[int, int]
"""Group, block id."""
TOKEN = "good enough for a test"
TENANTS = ("", "search", "chat")


@dataclass(eq=False)
class Holder:
    lease: Lease
    tenant: str
    held: Counter[Block] = field(default_factory=Counter)
    reservations: list[tuple[Lease, Counter[int]]] = field(default_factory=list)
    """And how many blocks of each group are left of it."""
    last: tuple[Callable[[], Any], Any] | None = None
    """How to ask again for its last answer, and that answer."""


class Leases(RuleBasedStateMachine):
    @initialize(name=st.sampled_from(sorted(LAYERS)), num_slabs=st.integers(5, 12))
    def start(self, name: str, num_slabs: int) -> None:
        self.plan = plan_of(name, num_slabs)
        self.cuts = tuple(group.blocks_per_slab for group in self.plan.groups)
        self.buffer = new_buffer(self.plan)
        self.pool = LeasedPool(self.plan, self.buffer)
        self.holders: dict[str, Holder] = {}
        self.contents: dict[Block, bytes] = {}
        """Of blocks that were committed; it may be gone of those that nobody holds."""
        self.quotas: dict[str, int | None] = {}
        self.num_keys = self.num_contents = 0

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            self.pool.close()
            self.buffer.close()

    # --- the model ----------------------------------------------------------------------------------------------------

    def agree(self) -> None:
        self.pool.check()
        held: Counter[Block] = Counter()
        assert {lease.record.name for lease in self.pool.book} == set(self.holders)
        for holder in self.holders.values():
            assert as_counter(held_of(self.pool, holder.lease)) == holder.held
            held += holder.held
        for group in range(len(self.cuts)):
            reserved = sum(left[group] for holder in self.holders.values() for _, left in holder.reservations)
            assert self.pool.blocks.counts(group).used == len([one for one in held if one[0] == group]) + reserved
        for tenant in TENANTS:
            assert self.pool.usage.used_bytes(tenant) == self.used_bytes(tenant)
        for (group, block), hashed in self.contents.items():
            if (group, block) in held:
                assert self.pool.index.blocks_of(group, [hashed]) == [block]

    def used_bytes(self, tenant: str) -> int:
        mine = [holder for holder in self.holders.values() if holder.tenant == tenant]
        blocks = Counter(group for holder in mine for group, _ in holder.held)
        for holder in mine:
            for _, left in holder.reservations:
                blocks.update(left)
        return self.bytes_of(blocks)

    def bytes_of(self, counts: Counter[int]) -> int:
        return sum(count * self.pool.block_bytes[group] for group, count in counts.items())

    def took(self, holder: Holder, ids: dict[int, Any]) -> None:
        for group, blocks in ids.items():
            for block in blocks.tolist():
                assert block >= self.cuts[group]
                assert not any((group, block) in other.held for other in self.holders.values())
                self.contents.pop((group, block), None)
                holder.held[group, block] += 1
        slabs = [(group, block // self.cuts[group]) for one in self.holders.values() for group, block in one.held]
        assert len({slab for _, slab in slabs}) == len(set(slabs)), "a slab is of two groups"

    def is_over_quota(self, tenant: str, change_bytes: int) -> bool:
        quota = self.quotas.get(tenant)
        return quota is not None and change_bytes > 0 and self.used_bytes(tenant) + change_bytes > quota

    def has_room(self, counts: Counter[int]) -> bool:
        """Surely."""
        slabs = self.pool.blocks.slab_counts()
        return sum(-(-count // self.cuts[group]) for group, count in counts.items()) <= slabs.free + slabs.idle

    def holder(self, data: st.DataObject) -> Holder:
        return self.holders[data.draw(st.sampled_from(sorted(self.holders)), "lease")]

    def key(self, data: st.DataObject) -> int:
        self.num_keys += 1
        return data.draw(st.sampled_from([0, self.num_keys]), "key")

    def counts(self, data: st.DataObject) -> Counter[int]:
        groups = data.draw(st.lists(st.sampled_from(range(len(self.cuts))), unique=True), "groups")
        return Counter({group: data.draw(st.integers(0, 2 * self.cuts[group] + 1), "n") for group in groups})

    def some(self, data: st.DataObject, blocks: list[Block], label: str) -> dict[int, list[int]]:
        chosen = data.draw(st.lists(st.sampled_from(sorted(blocks)), max_size=6), label) if blocks else []
        return {group: [block for at, block in chosen if at == group] for group in {at for at, _ in chosen}}

    # --- leases -------------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.holders) < 4)
    @rule(tenant=st.sampled_from(TENANTS))
    def open(self, tenant: str) -> None:
        name = next(name for name in "abcd" if name not in self.holders)
        self.holders[name] = Holder(self.pool.open(name, tenant=tenant, token=TOKEN).lease, tenant)
        self.agree()

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        holder = self.holder(data)
        old, old_id = holder.lease, holder.lease.lease_id
        holder.lease = self.pool.adopt(old.record.name, TOKEN)
        reservations, holder.reservations = holder.reservations, []
        acts: list[Callable[[], object]] = [
            lambda: self.pool.do(old, Step(key=self.num_keys, allocate={0: 1})),
            lambda: self.pool.allocate_one(old, 0),
            lambda: self.pool.free_one(old, 0, 1),
            lambda: self.pool.close_lease(old),
            lambda: reserve(self.pool, old, {0: 1}),
            lambda: self.pool.book.get(old_id),
            *(partial(commit_reservation, self.pool, one) for one, _ in reservations),
        ]
        for act in acts:
            with pytest.raises(StaleHandle):
                act()
        self.agree()

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), owner_died=st.booleans())
    def close(self, data: st.DataObject, owner_died: bool) -> None:
        lease = self.holder(data).lease
        self.pool.close_lease(lease, owner_died=owner_died)
        del self.holders[lease.record.name]
        with pytest.raises(StaleHandle):
            self.pool.do(lease, Step())
        self.agree()

    @rule(tenant=st.sampled_from(TENANTS), slabs=st.one_of(st.none(), st.integers(0, 6)))
    def set_quota(self, tenant: str, slabs: int | None) -> None:
        quota = None if slabs is None else slabs * max(self.pool.block_bytes)
        self.pool.book.set_tenants([Tenant(name=tenant, quota_bytes=quota)])
        self.quotas[tenant] = quota
        self.agree()

    @rule()
    def reopen(self) -> None:
        self.pool.close()
        self.pool = LeasedPool(self.plan, self.buffer)
        for name, holder in self.holders.items():
            holder.lease = self.pool.book.named(name)
            assert holder.lease.state == "quarantined"
            holder.reservations = []
        self.agree()

    # --- steps --------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), as_runs=st.booleans())
    def do(self, data: st.DataObject, as_runs: bool) -> None:
        holder = self.holder(data)
        everybody = sorted({block for other in self.holders.values() for block in other.held})
        known = everybody + [block for block in self.contents if block not in everybody and self.is_cached(block)]
        retain, free = self.some(data, known, "retain"), self.some(data, everybody, "free")
        allocate, commit = self.counts(data), self.commit(data, holder)
        step = Step(
            key=self.key(data), commit=commit, retain=retain, free=free, allocate=allocate, as_runs=as_runs
        )  # fmt: skip
        after = holder.held.copy()
        after.update((group, block) for group, ids in retain.items() for block in ids)
        after.subtract((group, block) for group, ids in free.items() for block in ids)
        before = state_of(self.pool)
        try:
            grant = self.pool.do(holder.lease, step)
        except KvpageError as error:
            self.expect_unchanged(before)
            self.remember(commit)
            self.expect_reason(error, holder, after, allocate, as_runs=as_runs)
        else:
            assert min(after.values(), default=0) >= 0
            self.remember(commit)
            self.check_quota(holder, after, allocate, is_over=False)
            holder.held = +after
            assert {group: len(ids) for group, ids in grant.ids.items()} == allocate
            for ids in grant.ids.values():
                assert not as_runs or ids.tolist() == list(range(ids[0], ids[0] + len(ids)) if len(ids) else [])
            self.took(holder, grant.ids)
            holder.last = self.asking_again(holder, step, grant)
        self.agree()

    def asking_again(self, holder: Holder, step: Step, grant: Grant) -> tuple[Callable[[], Any], Any] | None:
        return (lambda: sets_of(self.pool.do(holder.lease, step)), sets_of(grant)) if step.key else None

    def is_cached(self, block: Block) -> bool:
        return self.pool.index.blocks_of(block[0], [self.contents[block]]) == [block[1]]

    def commit(self, data: st.DataObject, holder: Holder) -> dict[int, Content]:
        new = self.some(data, [block for block in holder.held if block not in self.contents], "commit")
        found = {}
        for group, ids in new.items():
            ids = sorted(set(ids))
            self.num_contents += len(ids)
            found[group] = Content(ids, [content(self.num_contents - place) for place in range(len(ids))])
        return found

    def remember(self, commit: dict[int, Content]) -> None:
        for group, one in commit.items():
            self.contents.update(((group, block), hashed) for block, hashed in zip(one.ids, one.hashes, strict=True))

    def expect_unchanged(self, before: Any) -> None:
        """But for content."""
        assert state_of(self.pool)[:2] == before[:2]

    def check_quota(self, holder: Holder, after: Counter[Block], allocate: Counter[int], *, is_over: bool) -> None:
        change = Counter(allocate)
        change.update(group for group, _ in +after)
        change.subtract(group for group, _ in holder.held)
        assert self.is_over_quota(holder.tenant, self.bytes_of(change)) == is_over

    def expect_reason(
        self, error: KvpageError, holder: Holder, after: Counter[Block], allocate: Counter[int], *, as_runs: bool
    ) -> None:
        if isinstance(error, Conflict):
            assert min(after.values()) < 0
        elif isinstance(error, QuotaExceeded):
            self.check_quota(holder, after, allocate, is_over=True)
        else:
            assert isinstance(error, OutOfBlocks)
            assert as_runs or not self.has_room(allocate)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def allocate_one(self, data: st.DataObject) -> None:
        holder, key = self.holder(data), self.key(data)
        group = data.draw(st.integers(0, len(self.cuts) - 1), "group")
        before, one = state_of(self.pool), Counter({group: 1})
        is_over = self.is_over_quota(holder.tenant, self.bytes_of(one))
        try:
            grant = self.pool.allocate_one(holder.lease, group, key)
        except QuotaExceeded:
            self.expect_unchanged(before)
            assert is_over
        except OutOfBlocks:
            self.expect_unchanged(before)
            assert not is_over
            assert not self.has_room(one)
        else:
            assert not is_over
            self.took(holder, grant.ids)
            holder.last = None
            if key:
                holder.last = (lambda: sets_of(self.pool.allocate_one(holder.lease, group, key)), sets_of(grant))
        self.agree()

    @precondition(lambda self: any(holder.held for holder in self.holders.values()))
    @rule(data=st.data())
    def free_one(self, data: st.DataObject) -> None:
        holder, key = self.holder(data), self.key(data)
        everybody = sorted({block for other in self.holders.values() for block in other.held})
        group, block = data.draw(st.sampled_from(everybody), "block")
        before = state_of(self.pool)
        if holder.held[group, block]:
            self.pool.free_one(holder.lease, group, block, key)
            holder.held[group, block] -= 1
            holder.held = +holder.held
            again = lambda: sets_of(self.pool.free_one(holder.lease, group, block, key))  # noqa: E731
            holder.last = (again, {}) if key else None
        else:
            with pytest.raises(Conflict):
                self.pool.free_one(holder.lease, group, block, key)
            self.expect_unchanged(before)
        self.agree()

    @precondition(lambda self: any(holder.last for holder in self.holders.values()))
    @rule(data=st.data())
    def ask_again(self, data: st.DataObject) -> None:
        """By the same process or the next one; the same answer, and nothing is changed."""
        names = sorted(name for name, holder in self.holders.items() if holder.last)
        holder = self.holders[data.draw(st.sampled_from(names), "lease")]
        assert holder.last is not None
        ask, answer = holder.last
        before = state_of(self.pool)
        assert ask() == answer
        assert state_of(self.pool) == before
        self.agree()

    # --- reservations -------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def reserve(self, data: st.DataObject) -> None:
        holder, counts = self.holder(data), self.counts(data)
        is_over = self.is_over_quota(holder.tenant, self.bytes_of(counts))
        try:
            reservation = reserve(self.pool, holder.lease, counts)
        except QuotaExceeded:
            assert is_over
        except OutOfBlocks:
            assert not is_over
            assert not self.has_room(counts)
        else:
            assert not is_over
            holder.reservations.append((reservation, counts))
        self.forget_what_is_gone()
        self.agree()

    def forget_what_is_gone(self) -> None:
        """Blocks that are given to somebody who does not tell which."""
        self.contents = {block: hashed for block, hashed in self.contents.items() if self.is_cached(block)}

    @precondition(lambda self: any(holder.reservations for holder in self.holders.values()))
    @rule(data=st.data(), part=st.sampled_from(["all", "some", "too many", "nothing"]))
    def commit_reservation(self, data: st.DataObject, part: str) -> None:
        names = sorted(name for name, holder in self.holders.items() if holder.reservations)
        holder, key = self.holders[data.draw(st.sampled_from(names), "lease")], self.key(data)
        reservation, left = entry = data.draw(st.sampled_from(holder.reservations), "reservation")
        if part == "nothing":
            self.pool.close_lease(reservation)
            holder.reservations.remove(entry)
        elif part == "too many":
            before = state_of(self.pool)
            with pytest.raises(OutOfBlocks):
                commit_reservation(self.pool, reservation, {0: left[0] + 1}, key)
            self.expect_unchanged(before)
        else:
            counts = None if part == "all" else {group: data.draw(st.integers(0, n), "n") for group, n in left.items()}
            grant = commit_reservation(self.pool, reservation, counts, key)
            assert {group: len(ids) for group, ids in grant.ids.items()} == (left if counts is None else counts)
            left.subtract({group: len(ids) for group, ids in grant.ids.items()})
            if not left.total():
                holder.reservations.remove(entry)
            self.took(holder, grant.ids)
            again = lambda: sets_of(self.pool.again(holder.lease, key))  # noqa: E731
            holder.last = (again, sets_of(grant)) if key else None
        self.agree()

    # --- prefixes -----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.holders and self.contents)
    @rule(data=st.data(), at_most=st.sampled_from([16, 32, 48]))
    def take_prefix(self, data: st.DataObject, at_most: int) -> None:
        holder, key = self.holder(data), self.key(data)
        hashes = []
        for group in range(len(self.cuts)):
            known = sorted(hashed for (at, _), hashed in self.contents.items() if at == group)
            hashes.append(data.draw(st.lists(st.sampled_from(known), unique=True), "hashes") if known else [])
        before = state_of(self.pool)
        try:
            match = self.pool.take_prefix(holder.lease, hashes, at_most, key)
        except OutOfBlocks:
            self.expect_unchanged(before)
        else:
            assert match.num_tokens <= at_most
            for group, ids in enumerate(match.blocks):
                for block, hashed in zip(ids.tolist(), match.hashes[group], strict=True):
                    assert self.contents[group, block] == hashed
                    holder.held[group, block] += 1
            found = [ids.tolist() for ids in match.blocks]
            holder.last = None
            if key:
                holder.last = (
                    lambda: [ids.tolist() for ids in self.pool.take_prefix(holder.lease, hashes, at_most, key).blocks],
                    found,
                )
        self.agree()

    # --- what makes no sense ------------------------------------------------------------------------------------------

    @precondition(lambda self: self.holders)
    @rule(
        data=st.data(),
        bad=st.sampled_from(
            [
                {"allocate": {99: 1}}, {"allocate": {0: -1}}, {"allocate": {-1: 1}}, {"free": {0: [0]}},
                {"retain": {0: [0]}}, {"free": {99: [1]}}, {"retain": {0: [10**6]}}, {"free": {0: [-1]}},
                {"commit": {99: Content([], [])}},
                {"commit": {0: Content([1], [b"short"])}}, {"commit": {0: Content([1, 1], [content(1), content(2)])}},
            ]
        ),
    )  # fmt: skip
    def take_a_step_that_makes_no_sense(self, data: st.DataObject, bad: dict[str, Any]) -> None:
        holder, before = self.holder(data), state_of(self.pool)
        mine = self.some(data, list(holder.held), "free")
        mine = {group: sorted(set(ids)) for group, ids in mine.items()}
        with pytest.raises((SpecInvalid, Conflict)):
            self.pool.do(holder.lease, Step(key=10**9, free={**mine, **bad.get("free", {})}, **{
                name: value for name, value in bad.items() if name != "free"
            }))  # fmt: skip
        assert state_of(self.pool) == before
        self.agree()


def as_counter(held: dict[int, dict[int, int]]) -> Counter[Block]:
    return Counter({(group, block): times for group, each in held.items() for block, times in each.items()})


def sets_of(grant: Grant | None) -> dict[int, set[int]]:
    assert grant is not None
    return {group: set(ids.tolist()) for group, ids in grant.ids.items() if len(ids)}


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=settings().max_examples // 2, stateful_step_count=30)
