"""Nodes in memory, which die, return and lose messages, for the same allocators and coordinators that Ray carries."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from kvpage.client.resources import Device, Pool
from kvpage.errors import Conflict, DeviceUnavailable, KvpageError, NotEnoughMemory, PoolNotFound
from kvpage.fleet import messages
from kvpage.fleet.allocator import Allocator
from kvpage.fleet.messages import Answer, Message
from kvpage.fleet.record_store import MemoryRecords
from kvpage.fleet.records import FleetRecord, ServiceOptions
from kvpage.planner.ranks import plan_ranks


class CoordinatorDiedError(Exception):
    """No more messages come from it."""


class Sizes:
    """Bytes of each rank's buffer, planned again from the record as a node's service does; each record once."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, int]] = {}

    def of(self, record: FleetRecord, rank: int) -> int:
        """Raises `Conflict` when the request gives another plan than the record says."""
        if record.id not in self._known:
            plans = plan_ranks(record.request).ranks
            distinct = {id(plan): plan for plan in plans}.values()
            self._known[record.id] = {plan.plan_id: plan.buffer_size_bytes for plan in distinct}
        if record.plan_ids[rank] not in self._known[record.id]:
            raise Conflict(f"the request of {record.id} does not give the plan of rank {rank}")
        return self._known[record.id][record.plan_ids[rank]]


class MemoryService:
    """The service of a node: pools are numbers. What `create_pool` has made stays until it is deleted or lost."""

    def __init__(self, devices: Iterable[str], limit_bytes: int, sizes: Sizes, rng: random.Random) -> None:
        self._devices = tuple(devices)
        self._limit_bytes = limit_bytes
        self._sizes = sizes
        self._rng = rng
        self._pools: dict[str, Pool] = {}  # by id
        self._epoch = self._new_epoch()

    def _new_epoch(self) -> str:
        return f"{self._rng.getrandbits(128):032x}"

    def devices(self) -> list[Device]:
        return [
            Device(
                device=device,
                state="ready",
                handle_kinds=[],
                epoch=self._epoch,
                worker_pid=1,
                memory_limit_bytes=self._limit_bytes,
                reserved_bytes=self.reserved_bytes(device),
                num_pools=0,
            )
            for device in self._devices
        ]

    def reserved_bytes(self, device: str) -> int:
        return sum(pool.buffer_size_bytes for pool in self._pools.values() if pool.device == device)

    def pools(self) -> list[Pool]:
        return list(self._pools.values())

    def create_pool(self, record: FleetRecord, rank: int) -> Pool:
        name, device = record.pool_name(rank), record.places[rank].device
        there = next((pool for pool in self._pools.values() if (pool.device, pool.name) == (device, name)), None)
        if there is not None:
            return there
        size_bytes = self._sizes.of(record, rank)
        left_bytes = self._limit_bytes - self.reserved_bytes(device)
        if size_bytes > left_bytes:
            raise NotEnoughMemory(f"a pool takes {size_bytes} bytes; {left_bytes} are left on {device}")
        pool = Pool(
            id=f"pool-{self._rng.getrandbits(64):016x}",
            name=name,
            device=device,
            state="ready",
            plan_id=record.plan_ids[rank],
            epoch=self._epoch,
            buffer_size_bytes=size_bytes,
            committed_bytes=size_bytes,
            num_holders=0,
            holders=[],
        )
        self._pools[pool.id] = pool
        return pool

    def delete_pool(self, pool_id: str, *, force: bool) -> None:
        if self._pools.pop(pool_id, None) is None:
            raise PoolNotFound(f"there is no pool {pool_id}")

    def stop(self) -> None:
        self.lose()

    def lose(self) -> None:
        """All memory, as when the machine is switched off."""
        self._pools.clear()
        self._epoch = self._new_epoch()


class MemoryNode:
    """A machine. `restart` replaces its allocator, `lose` all that it has."""

    def __init__(self, name: str, service: MemoryService, clock: Clock) -> None:
        self.name = name
        self.service = service
        self.records = MemoryRecords(clock.now)
        self.reachable = True
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        self.allocator = Allocator(self.name, self.service, self.records, ServiceOptions())

    def lose(self) -> None:
        self.service.lose()
        self.records = MemoryRecords(self._clock.now)
        self.restart()


@dataclass(slots=True)
class Clock:
    now_s: float = 0.0

    def now(self) -> float:
        return self.now_s


@dataclass(slots=True)
class Faults:
    """How often what goes wrong, from 0 to 1. With a change only: looks are never what breaks a plan."""

    lost_question: float = 0.0
    lost_answer: float = 0.0
    death: float = 0.0
    """Of the coordinator, before a message."""
    crash: float = 0.0
    """Of the node that gets the message, with all it has; before or after it has done it."""


@dataclass(slots=True)
class Traffic:
    messages: int = 0
    bytes: int = 0
    rounds: int = 0


@dataclass(slots=True)
class MemoryTransport:
    nodes_by_name: dict[str, MemoryNode]
    rng: random.Random
    faults: Faults = field(default_factory=Faults)
    traffic: Traffic = field(default_factory=Traffic)
    forgotten: set[str] = field(default_factory=set)
    """Committed plans whose last record was on a machine that lost all it had: nobody can know of them any more."""

    def crash(self, node: MemoryNode) -> None:
        """The machine is switched off, with all it has."""
        others = [other for other in self.nodes_by_name.values() if other is not node]
        for kept in node.records.all():
            known = {
                one.record.phase for other in others for one in other.records.all() if one.record.id == kept.record.id
            }
            if kept.record.phase == "committed" and not known - {"reserved"}:
                self.forgotten.add(kept.record.id)
        node.lose()
        node.reachable = False

    def nodes(self) -> tuple[str, ...]:
        return tuple(sorted(name for name, node in self.nodes_by_name.items() if node.reachable))

    def bare(self) -> tuple[str, ...]:
        return ()

    def start(self, nodes: Iterable[str], options: ServiceOptions) -> None:
        pass

    def end(self, nodes: Iterable[str]) -> dict[str, KvpageError]:
        for name in nodes:
            self.nodes_by_name[name].service.stop()
        return {}

    @contextlib.contextmanager
    def admitted(self, nodes: Iterable[str], *, timeout_s: float) -> Iterator[None]:
        missing = [name for name in nodes if not self.nodes_by_name[name].reachable]
        if missing:
            raise DeviceUnavailable(f"node {missing[0]} has left")
        yield

    def ask(self, questions: Mapping[str, Message], *, timeout_s: float) -> dict[str, Answer | KvpageError]:
        """One after the other, in an order of its own each time."""
        self.traffic.rounds += 1
        order = list(questions)
        self.rng.shuffle(order)
        encoded: dict[int, bytes] = {}
        answers: dict[str, Answer | KvpageError] = {}
        for name in order:
            message = questions[name]
            data = encoded.get(id(message)) or encoded.setdefault(id(message), messages.encode(message))
            answers[name] = self._deliver(name, data, isinstance(message, (messages.Look, messages.Read)))
        return answers

    def _deliver(self, name: str, data: bytes, is_look: bool) -> Answer | KvpageError:
        faults = Faults() if is_look else self.faults
        node = self.nodes_by_name[name]
        if self._happens(faults.death):
            raise CoordinatorDiedError
        if self._happens(faults.crash):
            self.crash(node)
        if self._is_lost(node, faults.lost_question):
            return DeviceUnavailable(f"node {name} does not answer")
        answer = node.allocator.handle(data)
        self.traffic.messages += 2
        self.traffic.bytes += len(data) + len(answer)
        if self._happens(faults.crash):
            self.crash(node)
        if self._is_lost(node, faults.lost_answer):
            return DeviceUnavailable(f"node {name} does not answer")
        return messages.decode_answer(answer)

    def _is_lost(self, node: MemoryNode, chance: float) -> bool:
        return not node.reachable or self._happens(chance)

    def _happens(self, chance: float) -> bool:
        return chance > 0 and self.rng.random() < chance


def memory_fleet(
    rng: random.Random, *, num_nodes: int, num_devices: int, limit_bytes: int, clock: Clock | None = None
) -> MemoryTransport:
    """Alike nodes `n0000`, `n0001`, …, each with devices `cuda:0`, …"""
    clock, sizes = clock or Clock(), Sizes()
    devices = [f"cuda:{index}" for index in range(num_devices)]
    nodes = {
        name: MemoryNode(name, MemoryService(devices, limit_bytes, sizes, rng), clock)
        for name in (f"n{index:04}" for index in range(num_nodes))
    }
    return MemoryTransport(nodes, rng)
