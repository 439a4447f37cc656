"""Which rank goes to which device of which node. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvpage.client.fleet_resources import FleetDevice, Place
from kvpage.errors import FieldError, NotEnoughMemory, SpecInvalid, shorten
from kvpage.fleet.records import NodeReport


def place(num_ranks: int, stage: int, reports: Mapping[str, NodeReport]) -> tuple[Place, ...]:
    """A device for each rank, none twice. `stage`: so many ranks in a row talk to each other most (tensor parallel):
    they get one node where any has room for them, else as few as possible.

    The nodes with the most memory come first: the rank with the least decides for all. Raises `NotEnoughMemory`.
    """
    free = {name: _usable(report) for name, report in reports.items()}
    num_free = sum(map(len, free.values()))
    if num_free < num_ranks:
        raise NotEnoughMemory(
            f"{num_ranks} ranks need a device each; {num_free} devices on {len(reports)} nodes have memory left; add "
            f"nodes, give plans back, or plan fewer ranks",
            details={"num_ranks": num_ranks, "num_devices": num_free},
        )
    order = sorted(free, key=lambda name: (-_smallest(free[name][: min(stage, len(free[name]))]), name))
    places: list[Place] = []
    for first in range(0, num_ranks, stage):
        places += _stage(min(stage, num_ranks - first), order, free)
    return tuple(places)


def _stage(size: int, order: Sequence[str], free: Mapping[str, list[FleetDevice]]) -> list[Place]:
    """Takes what it uses out of `free`."""
    taken: list[Place] = []
    while len(taken) < size:
        missing = size - len(taken)
        whole = next((name for name in order if len(free[name]) >= missing), None)
        name = whole if whole is not None else max(order, key=lambda one: len(free[one]))
        for device in free[name][:missing]:
            taken.append(Place(node=name, device=device.device))
        del free[name][:missing]
    return taken


def _usable(report: NodeReport) -> list[FleetDevice]:
    """By memory, the most first; of equal ones in the order of their numbers."""
    usable = [device for device in report.devices if device.state == "ready" and device.available_bytes > 0]
    return sorted(usable, key=lambda device: -device.available_bytes)


def _smallest(devices: Sequence[FleetDevice]) -> int:
    return min((device.available_bytes for device in devices), default=0)


def check_places(places: Sequence[Place], num_ranks: int, reports: Mapping[str, NodeReport]) -> None:
    """Places that somebody chose. Raises `SpecInvalid`, with a pointer to the first that cannot be."""
    if len(places) != num_ranks:
        raise SpecInvalid(f"/places: {len(places)} places for {num_ranks} ranks; give one for each, in order")
    seen: set[Place] = set()
    for rank, one in enumerate(places):
        fault = _fault(one, reports) or ("is the place of another rank too" if one in seen else "")
        if fault:
            detail = f"the place of rank {rank}, device {shorten(one.device)} of node {shorten(one.node)}, {fault}"
            raise SpecInvalid(f"/places/{rank}: {detail}", errors=[FieldError(f"/places/{rank}", detail)])
        seen.add(one)


def _fault(one: Place, reports: Mapping[str, NodeReport]) -> str:
    report = reports.get(one.node)
    if report is None:
        return f"is on no node of the fleet; they are {shorten(', '.join(sorted(reports)))}"
    device = next((device for device in report.devices if device.device == one.device), None)
    if device is None:
        return f"is not served there; that node has {', '.join(device.device for device in report.devices) or 'none'}"
    return "" if device.state == "ready" else f"is {device.state}"
