"""A fleet as people and the HTTP server use it: start it, look at it, plan, give back, mend."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from kvpage.client.fleet_resources import Fleet, FleetEvent, FleetPlan, Place
from kvpage.errors import Conflict, DeviceUnavailable, KvpageError, shorten
from kvpage.fleet.coordinator import Coordinator, FleetView
from kvpage.fleet.records import ServiceOptions
from kvpage.fleet.state import changes, nodes_of, out_of_sight
from kvpage.fleet.transport import Transport

EVENTS_KEPT = 200
POLL_S = 0.5


class FleetManager:
    """Methods may be called from several threads: what they share is what nodes keep."""

    def __init__(self, transport: Transport, *, new_id: Callable[[], str]) -> None:
        self._transport = transport
        self._new_id = new_id
        self._given_up: set[str] = set()
        self._stepping = threading.Lock()  # guards the two below
        self._last: Fleet | None = None
        self._events: deque[FleetEvent] = deque(maxlen=EVENTS_KEPT)

    # --- looking -----------------------------------------------------------------------------------------------------

    def status(self) -> Fleet:
        coordinator = self._coordinator()
        return self._fleet(coordinator, coordinator.look())

    def plan_status(self, plan_id: str) -> FleetPlan:
        """By id or name. Raises `NotFound`."""
        return self._coordinator().standing(plan_id)

    # --- changing ----------------------------------------------------------------------------------------------------

    def up(self, options: ServiceOptions, *, wait_s: float) -> Fleet:
        """Start an allocator on each node that has none, wait until all nodes are ready, and mend.

        Raises `DeviceUnavailable` naming a node that is not ready in time.
        """
        deadline_s = time.monotonic() + wait_s
        self._transport.start(self._transport.bare(), options)
        while True:
            fleet = self.status()
            waiting = [node for node in fleet.nodes if node.state not in ("ready", "lost")]
            if fleet.nodes and not waiting:
                return self.mend()
            if time.monotonic() >= deadline_s:
                name, why = (waiting[0].name, waiting[0].detail) if waiting else ("", "the cluster has no nodes")
                raise DeviceUnavailable(
                    f"after {wait_s:g} s {len(waiting)} nodes are not ready; {name}: {shorten(why)}",
                    details={"nodes": [node.name for node in waiting]},
                )
            time.sleep(POLL_S)

    def plan(self, request: Mapping[str, Any], name: str, places: Sequence[Place] | None = None) -> FleetPlan:
        """As `Coordinator.create`."""
        return self._coordinator().create(request, name, places)

    def release(self, plan_id: str, *, force: bool = False) -> FleetPlan | None:
        """As `Coordinator.delete`."""
        return self._coordinator().delete(plan_id, force=force)

    def down(self, *, force: bool = False) -> list[FleetPlan]:
        """Give all plans back, then end services and allocators. Returns plans that nodes which are away still have.

        Raises `Conflict` when one is held, unless `force`; then nothing is ended. `DeviceUnavailable` naming a node
        whose service does not end.
        """
        coordinator = self._coordinator()
        view = coordinator.look()
        standings = coordinator.standings(view)
        held = [f"{plan.name}: {holder}" for plan in standings for rank in plan.ranks for holder in rank.holders]
        if held and not force:
            raise Conflict(f"plans are held by {shorten(', '.join(held))}; end them, or force it")
        left = [coordinator.delete(plan.id, force=force) for plan in standings]
        faults = self._transport.end(self._transport.nodes())
        for name, error in faults.items():
            raise DeviceUnavailable(f"node {name}: {error.message}", details={"nodes": list(faults)})
        return [plan for plan in left if plan is not None]

    def mend(self) -> Fleet:
        """One step of what `watch` does again and again: start allocators on nodes that came back, settle what is not
        settled, and note what has changed.
        """
        coordinator = self._coordinator()
        view = coordinator.look()
        if (bare := self._transport.bare()) and view.reports:
            self._transport.start(bare, next(iter(view.reports.values())).options)
        undone = coordinator.mend(view)
        if any(standing.state != "ready" for standing in coordinator.standings(view)):
            view = coordinator.look()
        told = {plan_id: tuple(faults) for plan_id, faults in undone.items()}
        return self._note(msgspec.structs.replace(self._fleet(coordinator, view), undone=told))

    def _note(self, fleet: Fleet) -> Fleet:
        with self._stepping:
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            if self._last is not None:
                self._events.extend(changes(self._last, fleet, now))
            self._last = fleet
            return msgspec.structs.replace(fleet, events=tuple(self._events))

    def _fleet(self, coordinator: Coordinator, view: FleetView) -> Fleet:
        plans = tuple(coordinator.standings(view))
        with self._stepping:
            last = () if self._last is None else self._last.plans
            undone = {} if self._last is None else self._last.undone
            plans += tuple(out_of_sight(last, plans, view.reports))
            nodes = nodes_of(view.reports, view.silent, self._transport.bare(), plans)
            return Fleet(nodes=nodes, plans=plans, events=tuple(self._events), undone=undone)

    def _coordinator(self) -> Coordinator:
        return Coordinator(self._transport, new_id=self._new_id, given_up=self._given_up)


class Watch:
    """A thread that mends again and again until it is closed."""

    def __init__(self, manager: FleetManager, *, interval_s: float, on_event: Callable[[FleetEvent], None]) -> None:
        """`on_event` is called in the thread."""
        self._manager = manager
        self._interval_s = interval_s
        self._on_event = on_event
        self._told: FleetEvent | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvpage-fleet", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Waits for the step it is at."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._tell(self._manager.mend().events)
            except KvpageError as error:
                self._on_event(_trouble(error))
            self._closed.wait(self._interval_s)

    def _tell(self, events: Sequence[FleetEvent]) -> None:
        first = events.index(self._told) + 1 if self._told in events else 0
        for event in events[first:]:
            self._on_event(event)
        self._told = events[-1] if events else None


def _trouble(error: KvpageError) -> FleetEvent:
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return FleetEvent(time=now, kind="node", subject="cluster", before="", after=error.message)
