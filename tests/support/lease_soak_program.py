"""Run as a program: one client of the soak. It works at random until a line comes on its standard input, tells on its
standard output what it holds, and ends in order when the input does.

`lease_soak_program.py RUN_DIR POOL LEASE SEED KEEP_S JOURNAL`

What it is about to do, and what came of it, goes into the journal, which outlives it: killed, its successor adopts the
lease and goes on from there. Into the first bytes of every block that it holds it writes a tag: for a block of its own
whose it is, for one with content the hash of that. It looks whether the tag is still there before it frees the block,
and when it was given one with content. A block that two own shows as a tag of the other.
"""

from __future__ import annotations

import json
import os
import random
import select
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import kvpage
from kvpage.client.block_stock import BlockStock
from kvpage.client.patience import Patience
from kvpage.client.socket_lease import SocketLease, SocketReservation
from kvpage.errors import Conflict, KvpageError, NotFound, OutOfBlocks
from kvpage.memory.kinds import memory_kind
from kvpage.pages.arrays import Ints
from kvpage.pages.steps import Content, Grant, Step
from kvpage.plans import Plan
from kvpage.run_directory import RunDirectory
from kvpage.wire import messages
from kvpage.wire.client import WorkerClient

TAG_BYTES = 16
TOKEN = "0123456789abcdef"
TIMEOUT_S = 60.0
NUM_PROMPTS, PROMPT_BLOCKS, BLOCK_TOKENS = 12, 4, 16
LONGEST_WAIT_S = 0.2

Place = tuple[int, int]
Tags = dict[Place, bytes]
Entry = dict[str, Any]


class Memory:
    """The pool's memory, mapped, and where in it a block begins."""

    def __init__(self, run_dir: str, pool: str) -> None:
        socket_path, patience = RunDirectory(Path(run_dir)).worker_socket("host"), Patience(TIMEOUT_S)
        while True:
            try:
                self.client = WorkerClient(socket_path, timeout_s=TIMEOUT_S)
                reply = self.client.request(messages.Attach(name=pool))
                break
            except KvpageError as error:
                patience.wait(error)
        assert isinstance(reply.body, messages.Attached)
        assert reply.body.plan is not None
        [fd], [info] = reply.fds, reply.body.chunks
        self.mapping = memory_kind(info.kind, info.device_uuid).map_chunk(fd, info.size_bytes, info.handle)
        os.close(fd)
        self.plan = Plan.from_json(reply.body.plan)
        self.bytes = memoryview(self.mapping.claim).cast("B")

    def place(self, group: int, block: int) -> memoryview:
        layer = self.plan.layers[self.plan.groups[group].layers[0]].tensors[0]
        start = layer.offset_bytes + block * layer.strides_bytes[layer.block_axis]
        return self.bytes[start : start + self.plan.groups[group].block_stride_bytes]

    def tag(self, group: int, block: int) -> bytes:
        return bytes(self.place(group, block)[:TAG_BYTES])

    def write(self, tags: Mapping[Place, bytes]) -> None:
        for (group, block), tag in tags.items():
            self.place(group, block)[:TAG_BYTES] = tag

    def clear(self, group: int, ids: Ints) -> None:
        for block in ids.tolist():
            place = self.place(group, block)
            place[:] = bytes(len(place))


def prompt_hash(prompt: int, group: int, block: int) -> bytes:
    return blake2b(f"{prompt} {group} {block}".encode(), digest_size=TAG_BYTES).digest()


class Journal:
    """What a client has done, a line each; the last one may say what it was about to do."""

    def __init__(self, path: Path) -> None:
        lines = path.read_text().splitlines() if path.exists() else []
        self.entries: list[Entry] = [json.loads(line) for line in lines]
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)

    def write(self, **entry: Any) -> None:
        os.write(self._fd, json.dumps(entry).encode() + b"\n")

    @contextmanager
    def doing(self, what: str, **more: Any) -> Iterator[Entry]:
        """What is put into the entry meanwhile is written with its end."""
        self.write(do=what, **more)
        entry: Entry = {}
        yield entry
        self.write(done=what, **entry)


class Worker:
    """One lease, the books of it, and random work."""

    def __init__(self, memory: Memory, journal: Journal, name: str, seed: int) -> None:
        self.memory, self.journal, self.name = memory, journal, name
        self.chance = random.Random(seed)
        self.times = Counter[Place]()
        self.tags: Tags = {}
        self.counts = Counter[str]()
        self.reservation: SocketReservation | None = None
        self.serial = sum(1 for _ in journal.entries) << 8
        self.cut = [group.blocks_per_slab for group in memory.plan.groups]
        self.is_state = [group.kind == "mamba" for group in memory.plan.groups]
        self.lease: SocketLease

    # --- beginning ----------------------------------------------------------------------------------------------------

    def begin(self, run_dir: str, pool: str, keep_s: float) -> None:
        options: dict[str, Any] = {
            "name": self.name, "token": TOKEN, "device": "host", "run_dir": run_dir, "keep_s": keep_s,
            "timeout_s": TIMEOUT_S, "clear": self.memory.clear,
        }  # fmt: skip
        if keep_s and self.journal.entries:
            try:
                self.lease = kvpage.adopt_lease(pool, **options)
            except NotFound:
                assert all("done" not in entry for entry in self.journal.entries), "a lease that was opened is lost"
            else:
                self.counts["adopted"] += 1
                self._resume()
                return
        with self.journal.doing("open"):
            self.lease = kvpage.open_lease(pool, **options)
        self.counts["opened"] += 1

    def _resume(self) -> None:
        """As the one before left it, and what that one was about to do, done once."""
        pending: Entry | None = None
        unsure: Place | None = None
        for entry in self.journal.entries:
            if "unsure" in entry:
                group, block = entry["unsure"]
                unsure = group, block
            elif "sure" in entry:
                unsure = None
            else:
                pending = entry if "do" in entry else None
            self._replay(entry)
        if pending is not None and "step" in pending:
            try:
                self._step(pending, is_new=False)
            except (OutOfBlocks, Conflict) as refused:
                self.counts[type(refused).__name__] += 1
        elif pending is not None:
            self._find_out(pending)
        if unsure is not None and self.times[unsure] == 1:  # held before, or given out anew before it was held here
            self.step(is_sure=False, free={unsure[0]: [unsure[1]]})
        self.audit()
        self._save("resumed")

    def _replay(self, entry: Entry) -> None:
        for group, block, times, tag in entry.get("set", ()):
            self._set((group, block), times, bytes.fromhex(tag))

    def _set(self, place: Place, times: int, tag: bytes) -> None:
        if times:
            self.times[place], self.tags[place] = times, tag
        else:
            self.times.pop(place, None)
            self.tags.pop(place, None)

    def _save(self, done: str) -> None:
        self.journal.write(done=done, set=[[*place, n, self.tags[place].hex()] for place, n in self.times.items()])

    def _find_out(self, pending: Entry) -> None:
        """An operation whose key nobody knows: it was done or not. It only ever adds."""
        held = self._held()
        new = held - self.times
        assert not self.times - held, f"{pending} has taken {self.times - held} away"
        for place, times in new.items():
            tag = self.memory.tag(*place)
            if pending["do"] == "take":
                assert tag.hex() in pending["tags"][str(place[0])], f"{pending} has given {place} with {tag.hex()}"
            elif place not in self.times:
                assert pending["do"] in ("commit reserved", "stock"), f"{pending} has given {place}"
                tag = self._own_tag()
                self.memory.write({place: tag})
            self._set(place, self.times[place] + times, tag)

    # --- looking ------------------------------------------------------------------------------------------------------

    def _held(self) -> Counter[Place]:
        return Counter(
            {
                (group, int(block)): int(times)
                for group, held in self.lease.held().items()
                for block, times in zip(held.ids, held.times, strict=True)
            }
        )

    def audit(self) -> None:
        held = self._held()
        assert held == self.times, f"more is held: {held - self.times}; less is held: {self.times - held}"
        self.verify(self.times)

    def verify(self, places: Any) -> None:
        for place in places:
            found = self.memory.tag(*place)
            assert found == self.tags[place], f"block {place} has tag {found.hex()}, not {self.tags[place].hex()}"

    def _own_tag(self) -> bytes:
        self.serial += 1
        return blake2b(f"{self.name} {self.serial}".encode(), digest_size=TAG_BYTES).digest()

    # --- steps --------------------------------------------------------------------------------------------------------

    def step(self, wait_s: float = 0.0, *, is_sure: bool = True, **parts: Any) -> dict[int, list[int]]:
        """`allocate`, `free`, `retain`, and `commit`: by group, ids and hashes in hex. `is_sure`: what is freed has the
        tag that it should have."""
        if is_sure:
            self.verify(_places(parts.get("free", {})))
        granted = self._step({"step": {"key": self.lease.new_key(), **parts}, "wait_s": wait_s})
        if not is_sure:
            self.journal.write(sure=False)
        return granted

    def _step(self, entry: Entry, *, is_new: bool = True) -> dict[int, list[int]]:
        parts: dict[str, Any] = {
            name: value if name == "key" else {int(group): some for group, some in value.items()}
            for name, value in entry["step"].items()
        }
        free, retain, commit = (parts.get(name, {}) for name in ("free", "retain", "commit"))
        if is_new:
            self.journal.write(do="step", **entry)
        contents = {
            (group, block): bytes.fromhex(tag)
            for group, (ids, tags) in commit.items()
            for block, tag in zip(ids, tags, strict=True)
        }
        self.memory.write({place: tag for place, tag in contents.items() if self.times[place]})
        self.tags |= {place: tag for place, tag in contents.items() if self.times[place]}
        step = Step(
            key=parts["key"], allocate=parts.get("allocate", {}), free=free, retain=retain,
            commit={
                group: Content(ids, [bytes.fromhex(tag) for tag in tags]) for group, (ids, tags) in commit.items()
            },
        )  # fmt: skip
        try:
            grant = self.lease.step(step, wait_s=entry["wait_s"])
        except (OutOfBlocks, Conflict):
            self._done(contents)
            raise
        changed = {*contents, *_places(free), *_places(retain)}
        for place in _places(retain):
            self.tags.setdefault(place, self.memory.tag(*place))
        self.times.update(_places(retain))
        self.times.subtract(_places(free))
        return self._granted(grant, changed)

    def _granted(self, grant: Grant, changed: Any = ()) -> dict[int, list[int]]:
        ids: dict[int, list[int]] = {group: some.tolist() for group, some in grant.ids.items()}
        new = [(group, block) for group, some in ids.items() for block in some]
        for place in new:
            # Given back in the same step, it may be given out again.
            assert not self.times[place], f"{place} is given out, and is held here"
            if self.is_state[place[0]]:
                assert not any(self.memory.place(*place)), f"state {place} was not cleared"
            self.times[place], self.tags[place] = 1, self._own_tag()
        self.memory.write({place: self.tags[place] for place in new})
        self._done([*changed, *new])
        return ids

    def _done(self, places: Any) -> None:
        for place in places:
            if not self.times[place]:
                self._set(place, 0, b"")
        known = [place for place in dict.fromkeys(places) if place in self.times]
        gone = [place for place in dict.fromkeys(places) if place not in self.times]
        self.journal.write(
            done="step",
            set=[
                *([*place, self.times[place], self.tags[place].hex()] for place in known),
                *([*place, 0, ""] for place in gone),
            ],
        )

    def some(self, most: int, wanted: Callable[[Place], bool] = lambda place: True) -> dict[int, list[int]]:
        """Of what is held, by group, no block more often than it is."""
        elements = sorted(place for place in self.times.elements() if wanted(place))
        chosen = self.chance.sample(elements, min(self.chance.randint(0, most), len(elements)))
        return {group: [block for at, block in chosen if at == group] for group in {at for at, _ in chosen}}

    def counts_of(self, most: int) -> dict[int, int]:
        return {group: self.chance.randint(1, most) for group in range(len(self.cut)) if self.chance.random() < 0.6}

    # --- random work --------------------------------------------------------------------------------------------------

    def work(self) -> None:
        """One random operation."""
        kinds: dict[Callable[[], None], int] = {
            self.allocate: 6, self.free: 6, self.mixed: 6, self.retain: 2, self.commit: 4, self.take: 6, self.share: 3,
            self.reserve: 3, self.settle: 4, self.use_stock: 2, self.audit: 1,
        }  # fmt: skip
        operation = self.chance.choices([*kinds], [*kinds.values()])[0]
        try:
            operation()
        except OutOfBlocks:
            self.counts["out of blocks"] += 1
            self.step(free=self.some(40))
        self.counts["operations"] += 1
        if self.times.total() > 60:
            self.step(free=self.some(60))

    def allocate(self) -> None:
        wait_s = self.chance.choice((0.0, 0.0, LONGEST_WAIT_S))
        self.counts["with deadlines"] += wait_s > 0
        self.step(wait_s, allocate=self.counts_of(5))

    def free(self) -> None:
        self.step(free=self.some(12))

    def mixed(self) -> None:
        self.step(free=self.some(6), allocate=self.counts_of(3), retain=self._once(self.some(2)))

    def _once(self, ids: dict[int, list[int]]) -> dict[int, list[int]]:
        return {group: sorted(set(some)) for group, some in ids.items()}

    def retain(self) -> None:
        self.step(retain=self._once(self.some(4)))

    def commit(self) -> None:
        """Compute the beginning of a prompt, for others to find."""
        prompt, length = self.chance.randrange(NUM_PROMPTS), self.chance.randint(1, PROMPT_BLOCKS)
        ids = self.step(allocate=dict.fromkeys(range(len(self.cut)), length))
        self.step(
            commit={
                group: (some, [prompt_hash(prompt, group, block).hex() for block in range(length)])
                for group, some in ids.items()
            }
        )
        self.counts["committed"] += length * len(self.cut)
        if self.chance.random() < 0.5:
            self.step(free=ids)

    def take(self) -> None:
        """The cached beginning of a prompt, which has the content that its hashes say."""
        prompt = self.chance.randrange(NUM_PROMPTS)
        groups, blocks = range(len(self.cut)), range(PROMPT_BLOCKS)
        hashes = [[prompt_hash(prompt, group, block) for block in blocks] for group in groups]
        tags = {str(group): [one.hex() for one in some] for group, some in enumerate(hashes)}
        with self.journal.doing("take", tags=tags) as done:
            found = self.lease.take_prefix(hashes, PROMPT_BLOCKS * BLOCK_TOKENS)
            end = found.num_tokens // BLOCK_TOKENS
            for group, ids in enumerate(found.ids):
                for block, tag in zip(ids.tolist(), hashes[group][end - len(ids) : end], strict=True):
                    self.times[group, block] += 1
                    self.tags.setdefault((group, block), tag)
            places = [(group, int(block)) for group, ids in enumerate(found.ids) for block in ids]
            done["set"] = [[*place, self.times[place], self.tags[place].hex()] for place in places]
        self.verify(places)
        self.counts["prefixes taken"] += bool(places)

    def share(self) -> None:
        """Hold one block that others hold, or that is cached, by its number. Whether it still has that content when it
        is held is looked at then: until somebody holds it, it may be given out anew."""
        prompt, group = self.chance.randrange(NUM_PROMPTS), self.chance.randrange(len(self.cut))
        tag = prompt_hash(prompt, group, self.chance.randrange(PROMPT_BLOCKS))
        [block] = self.lease.find_contents(group, [tag]).tolist()
        if not block:
            return
        self.journal.write(unsure=[group, block])
        try:
            self.step(retain={group: [block]})
        except Conflict:  # nobody holds it any more
            self.journal.write(sure=False)
            return
        if self.lease.find_contents(group, [tag]).tolist() == [block]:
            self.tags[group, block] = tag
            self.verify([(group, block)])
            self.counts["blocks shared"] += 1
            self.journal.write(sure=True, set=[[group, block, self.times[group, block], tag.hex()]])
        else:
            self.step(is_sure=False, free={group: [block]})

    def reserve(self) -> None:
        if self.reservation is None:
            self.reservation = self.lease.reserve(self.counts_of(4), wait_s=self.chance.choice((0.0, LONGEST_WAIT_S)))

    def settle(self) -> None:
        """What was reserved is taken or given back; it is lost when the worker has died."""
        reservation, self.reservation = self.reservation, None
        if reservation is None:
            return
        try:
            if self.chance.random() < 0.6:
                self.journal.write(do="commit reserved")
                self._granted(reservation.commit())
            else:
                reservation.give_back()
        except NotFound:
            self._done(())
            self.counts["reservations lost"] += 1

    def use_stock(self) -> None:
        group = self.chance.choice([group for group, is_state in enumerate(self.is_state) if not is_state])
        with self.journal.doing("stock"):
            with BlockStock(self.lease, group, batch=3) as stock:
                ids: list[int] = []
                with suppress(OutOfBlocks):
                    while len(ids) < self.chance.randint(1, 7):
                        ids.append(stock.take())
                own = {(group, block): self._own_tag() for block in ids}
                self.memory.write(own)
                assert not any(self.times[place] for place in own), "a stock gave out what is held here"
                assert all(self.memory.tag(*place) == tag for place, tag in own.items())
                for block in ids:
                    stock.put(block)

    # --- ending -------------------------------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        if self.reservation is not None:
            self.settle()
        if not +self.times:  # that there is something to prove
            with suppress(OutOfBlocks):
                self.step(allocate={0: 1})
        self.audit()
        held = [[*place, times, self.tags[place].hex()] for place, times in sorted(self.times.items())]
        return {"lease": self.name, "held": held, "counts": self.counts}


def _places(ids: Mapping[int, Sequence[int]]) -> list[Place]:
    return [(group, block) for group, some in ids.items() for block in some]


def main() -> None:
    run_dir, pool, name, seed, keep_s, journal = sys.argv[1:]
    memory = Memory(run_dir, pool)
    worker = Worker(memory, Journal(Path(journal)), name, int(seed))
    worker.begin(run_dir, pool, float(keep_s))
    counts = worker.counts
    print(json.dumps({"begun": name, "counts": counts}), flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        worker.work()
        if counts["operations"] % 16 == 0:
            print(json.dumps({"counts": counts}), flush=True)
    sys.stdin.readline()
    print(json.dumps(worker.report()), flush=True)
    sys.stdin.readline()
    worker.lease.close()
    memory.client.close()


if __name__ == "__main__":
    main()
