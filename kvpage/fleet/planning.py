"""From a request and what the nodes report to a plan of the fleet. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvpage.client.fleet_resources import Place
from kvpage.errors import FieldError, NotEnoughMemory, SpecInvalid
from kvpage.fleet.placement import check_places, place
from kvpage.fleet.records import FleetRecord, NodeReport, digest
from kvpage.planner.ranks import plan_ranks
from kvpage.ranked_request import RankedRequest
from kvpage.request_faults import faults_at_model


def plan_fleet(
    request: Mapping[str, Any],
    *,
    plan_id: str,
    name: str,
    reports: Mapping[str, NodeReport],
    places: Sequence[Place] | None = None,
) -> FleetRecord:
    """Every rank of `request` on a device, with as many blocks as the rank with the fewest can hold.

    A rank without `memory_bytes` has what its device has left, unless the request says how much, or `num_blocks`.
    Raises as `kvpage.plan_ranks`, and `NotEnoughMemory` naming the device.
    """
    asked = digest(request)
    every = _with_ranks(request)
    with faults_at_model(every):
        kept = RankedRequest.parse(_unsized(every)).kept
    if places is None:
        places = place(len(kept), _stage_of(request), reports)
    check_places(places, len(kept), reports)
    sized = _sized(every, kept, places, reports)
    try:
        planned = plan_ranks(sized)
    except NotEnoughMemory as error:
        raise _at_its_place(error, places) from error
    return FleetRecord(
        id=plan_id,
        name=name,
        asked=asked,
        request=sized,
        num_blocks=planned.num_blocks,
        plan_ids=tuple(_ids_of(planned.ranks)),
        places=tuple(places),
    )


def _with_ranks(request: Mapping[str, Any]) -> dict[str, Any]:
    """A model has all its ranks, other requests one if they do not say."""
    if not isinstance(request, Mapping):
        raise SpecInvalid(f"a plan request is a mapping, not {type(request).__name__}")
    for field in ("model", "ranks"):
        if field in request and request[field] is None:
            detail = f"{field} is null; leave it out, or say what it is"
            raise SpecInvalid(f"/{field}: {detail}", errors=[FieldError(f"/{field}", detail)])
    if "ranks" in request:
        return dict(request)
    return dict(request) | {"ranks": "all" if request.get("model") is not None else [{}]}


def _unsized(request: Mapping[str, Any]) -> dict[str, Any]:
    """The same layers and ranks without any memory: enough to say who keeps what, before it is known where."""
    rest = {key: value for key, value in request.items() if key != "memory_bytes"} | {"num_blocks": 1}
    if isinstance(rest["ranks"], list):
        rest["ranks"] = [
            {key: value for key, value in rank.items() if key != "memory_bytes"} if isinstance(rank, Mapping) else rank
            for rank in rest["ranks"]
        ]
    return rest


def _sized(
    request: Mapping[str, Any],
    kept: Sequence[tuple[str, ...]],
    places: Sequence[Place],
    reports: Mapping[str, NodeReport],
) -> dict[str, Any]:
    """With the memory of each rank in it. Ranks that keep the same layers get that of the least of them, which decides:
    so a thousand of them are planned once.
    """
    if request.get("num_blocks") is not None or request.get("memory_bytes") is not None:
        return dict(request)
    available = [_available(one, reports) for one in places]
    ranks = request["ranks"]
    own = [dict(rank) for rank in ranks] if isinstance(ranks, list) else [{} for _ in kept]
    least: dict[tuple[str, ...], int] = {}
    for layers, memory_bytes in zip(kept, available, strict=True):
        least[layers] = min(memory_bytes, least.get(layers, memory_bytes))
    for rank, layers in zip(own, kept, strict=True):
        rank.setdefault("memory_bytes", least[layers])
    return dict(request) | {"ranks": own}


def _available(one: Place, reports: Mapping[str, NodeReport]) -> int:
    return next(device.available_bytes for device in reports[one.node].devices if device.device == one.device)


def _stage_of(request: Mapping[str, Any]) -> int:
    """Ranks in a row that share layers: tp of a model, else all."""
    model = request.get("model")
    tp = model.get("tp", 1) if isinstance(model, Mapping) else None
    if isinstance(tp, int) and tp > 0:
        return tp
    ranks = request.get("ranks")
    return max(1, len(ranks)) if isinstance(ranks, list) else 1


def _ids_of(plans: Sequence[Any]) -> list[str]:
    """Ranks that are alike share a plan object, whose id is computed once."""
    known: dict[int, str] = {}
    return [known.get(id(plan)) or known.setdefault(id(plan), plan.plan_id) for plan in plans]


def _at_its_place(error: NotEnoughMemory, places: Sequence[Place]) -> NotEnoughMemory:
    rank = error.details.get("rank")
    if not isinstance(rank, int):
        return error
    one = places[rank]
    return NotEnoughMemory(
        f"{error.message} (device {one.device} of node {one.node})",
        details={**error.details, "node": one.node, "device": one.device},
        errors=error.errors,
    )
