"""An engine's process finds its rank's pool on its own machine. Needs the worker and the record, nothing else."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from kvpage.client.arguments import checked_seconds
from kvpage.client.attachment import Attachment
from kvpage.client.connection import attach as attach_pool
from kvpage.client.finding import DEFAULT_TIMEOUT_S, find_run_directory
from kvpage.client.patience import Patience
from kvpage.errors import Conflict, DeviceUnavailable, KvpageError, PoolNotFound, SpecInvalid, shorten
from kvpage.fleet.record_store import records_in
from kvpage.fleet.records import FleetRecord, check_name


def attach(
    name: str,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
    run_dir: str | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    environ: Mapping[str, str] | None = None,
    **options: Any,
) -> Attachment:
    """Map this rank's pool of the fleet's plan `name`, as `kvpage.attach` does.

    `rank`, `world_size`, `local_rank`: left out, those of `environ` (the process's own: RANK, WORLD_SIZE, LOCAL_RANK).
    Without a rank the local one chooses among the ranks of this node. `options`: as `kvpage.attach` takes.

    Waits up to `timeout_s` for a plan that is not committed yet. Raises `Conflict` where the plan is for another number
    of ranks, the rank is on another node, or its pool has another number of blocks than the fleet's; `StaleHandle`
    where the pool has another plan; `PoolNotFound` where this node has no such plan; `SpecInvalid` for a rank
    that cannot be; and as `kvpage.attach`.
    """
    check_name(name)
    given = os.environ if environ is None else environ
    rank = _number("rank", "RANK", rank, given)
    world_size = _number("world_size", "WORLD_SIZE", world_size, given)
    local_rank = _number("local_rank", "LOCAL_RANK", local_rank, given)
    patience = Patience(checked_seconds("timeout_s", timeout_s))
    while True:
        try:
            node, record = _committed(name, run_dir)
            return _attach(record, _rank(record, node, rank, world_size, local_rank), run_dir, patience.left_s, options)
        except KvpageError as error:
            patience.wait(error)


def _attach(
    record: FleetRecord, rank: int, run_dir: str | None, timeout_s: float, options: Mapping[str, Any]
) -> Attachment:
    device, plan_id = record.places[rank].device, record.plan_ids[rank]
    attachment = attach_pool(
        record.pool_name(rank), device=device, run_dir=run_dir, plan_id=plan_id, timeout_s=timeout_s, **options
    )
    if attachment.plan.num_blocks != record.num_blocks:
        num_blocks = attachment.plan.num_blocks
        attachment.close()
        raise Conflict(
            f"rank {rank} of {record.name!r} has {num_blocks} blocks here, the fleet's plan {record.num_blocks}: their "
            f"blocks would not mean the same tokens",
            details={"num_blocks": num_blocks, "expected_num_blocks": record.num_blocks},
        )
    return attachment


def _committed(name: str, run_dir: str | None) -> tuple[str, FleetRecord]:
    """This node and its record of the plan. Raises `DeviceUnavailable`, which is waited for, while it is reserved."""
    folder = find_run_directory(run_dir).path
    found = [(node, record) for node, record in records_in(folder) if record.name == name]
    for phase in ("committed", "reserved"):
        for node, record in found:
            if record.phase == phase == "committed":
                return node, record
            if record.phase == phase:
                raise DeviceUnavailable(f"the fleet's plan {name!r} is not committed yet", details={"id": record.id})
    raise PoolNotFound(
        f"no plan {name!r} of a fleet has a rank on this machine ({shorten(str(folder))} has no record of it); "
        f"`kvpage fleet status` says where its ranks are",
        details={"name": name},
    )


def _rank(record: FleetRecord, node: str, rank: int | None, world_size: int | None, local_rank: int | None) -> int:
    if world_size is not None and world_size != record.world_size:
        raise Conflict(
            f"this process is one of {world_size} ranks, the fleet's plan {record.name!r} has {record.world_size}; "
            f"start as many, or plan for as many",
            details={"world_size": world_size, "expected_world_size": record.world_size},
        )
    here = record.ranks_on(node)
    if rank is None:
        rank = _by_local_rank(record, node, here, local_rank)
    if rank >= record.world_size:
        raise SpecInvalid(f"rank {rank} is not among the {record.world_size} ranks of {record.name!r}, from 0")
    if rank not in here:
        place = record.places[rank]
        raise Conflict(
            f"rank {rank} of {record.name!r} is on node {place.node}, device {place.device}; this node, {node}, "
            f"has ranks {', '.join(map(str, here))}",
            details={"rank": rank, "node": place.node, "device": place.device},
        )
    return rank


def _by_local_rank(record: FleetRecord, node: str, here: tuple[int, ...], local_rank: int | None) -> int:
    if local_rank is None and len(here) == 1:
        return here[0]
    if local_rank is None:
        raise SpecInvalid(f"node {node} has {len(here)} ranks of {record.name!r}; say rank=, or set RANK or LOCAL_RANK")
    if local_rank >= len(here):
        raise SpecInvalid(f"local rank {local_rank} is not among the {len(here)} ranks of {record.name!r} on {node}")
    return here[local_rank]


def _number(field: str, variable: str, given: int | None, environ: Mapping[str, str]) -> int | None:
    if given is not None:
        text, value = repr(given), given
    else:
        field, text = variable, environ.get(variable, "")
        if not text:
            return None
        value = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1
    if type(value) is not int or value < 0:
        raise SpecInvalid(f"{field} is {shorten(text)}; it must be a whole number from 0")
    return value
