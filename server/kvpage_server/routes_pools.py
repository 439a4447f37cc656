"""`/v1/pools` and `/v1/devices`: what the device workers hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from kvpage.client.block_resources import PoolBlocks
from kvpage.client.resources import DeviceList, Failure, ForgottenPool, Holder, Pool, PoolList, PoolTensor, PoolTensors
from kvpage.errors import Conflict, FieldError, KvpageError, SpecInvalid, error_from_code, shorten
from kvpage.models.options import MAX_RANKS
from kvpage.plans import Plan
from kvpage.wire import messages
from kvpage.wire.messages import PoolState
from kvpage_server import openapi
from kvpage_server.access import require_role
from kvpage_server.audit import begin, record
from kvpage_server.bodies import json_body, parsed, preferred_wait_s
from kvpage_server.device_pools import NewPool
from kvpage_server.encoded_plans import EncodedPlan, EncodedRanks
from kvpage_server.json_answers import json_answer
from kvpage_server.plan_queue import Asker, asker_of
from kvpage_server.queries import is_true, known_query, query_wait_s, wait_s
from kvpage_server.roles import FORCED_DELETE
from kvpage_server.services import Services, services_of

MAX_NAME_BYTES = 256


class PoolRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/pools`."""

    name: str
    request: dict[str, Any]
    """A plan request, planned again by the server."""
    rank: Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)] | None = None
    """With a request of several ranks, whose plan the pool is made from: the place in its ranks."""
    device: str = "host"
    plan_id: Annotated[str, msgspec.Meta(pattern="^sha256:[0-9a-f]{64}$", max_length=71)] | None = None
    """What the caller expects it to give; another result is refused."""
    handle_kind: Literal["memfd", "cuda_vmm", "cuda_ipc"] | None = None
    """How its memory is shared; left out, as is best on the device. `cuda_ipc` is never chosen by itself."""


def add_routes(app: FastAPI) -> None:
    app.add_api_route(
        "/v1/pools", post_pool, methods=["POST"], operation_id="create_pool", summary="Create a pool",
        status_code=201, openapi_extra=openapi.POOL_REQUEST_BODY, responses=openapi.POST_POOL_ANSWERS,
    )  # fmt: skip
    app.add_api_route(
        "/v1/pools", get_pools, methods=["GET"], operation_id="list_pools", summary="All pools",
        openapi_extra=openapi.POOL_FILTERS, responses=openapi.POOL_LIST_ANSWERS,
    )  # fmt: skip
    app.add_api_route(
        "/v1/pools/{pool_id}", get_pool, methods=["GET"], operation_id="get_pool", summary="One pool",
        openapi_extra=openapi.WAIT_PARAMETER, responses=openapi.POOL_ANSWERS,
    )  # fmt: skip
    app.add_api_route(
        "/v1/pools/{pool_id}", delete_pool, methods=["DELETE"], operation_id="delete_pool", summary="Delete a pool",
        status_code=204, openapi_extra=openapi.DELETE_PARAMETERS, responses=openapi.DELETE_POOL_ANSWERS,
    )  # fmt: skip
    app.add_api_route(
        "/v1/pools/{pool_id}/tensors", get_tensors, methods=["GET"], operation_id="get_pool_tensors",
        summary="Shape, strides and offset of every tensor", responses=openapi.TENSOR_ANSWERS,
    )  # fmt: skip
    app.add_api_route(
        "/v1/devices", get_devices, methods=["GET"], operation_id="list_devices", summary="All devices",
        responses=openapi.DEVICE_ANSWERS,
    )  # fmt: skip


async def post_pool(request: Request) -> Response:
    """201 when ready, 202 while the memory is being committed, 200 when the pool was there already."""
    services = services_of(request)
    known_query(request)
    body, asker = await json_body(request), asker_of(request.scope)
    max_bytes = services.settings.intake.max_body_bytes
    asked = await services.plans.in_thread(lambda: _pool_request(body, max_bytes), asker)
    record(request, name=asked.name, device=asked.device)
    plan = await _planned(services, asked, asker)
    granted_s = preferred_wait_s(request)
    await begin(request, plan_id=plan.plan_id, rank=asked.rank)
    new = NewPool(name=asked.name, device=asked.device, plan=plan, handle_kind=asked.handle_kind or "")
    creation = await services.pools.create_pool(new, wait_s=granted_s)
    pool = creation.pool
    record(request, pool_id=pool.pool_id)
    if pool.error is not None:
        raise _failure(pool)
    status = 200 if not creation.created else 201 if pool.state == "ready" else 202
    headers = {"Location": f"/v1/pools/{pool.pool_id}"}
    if granted_s > 0:
        headers["Preference-Applied"] = f"wait={granted_s:.0f}"
    return json_answer(pool_resource(pool), status, headers)


async def get_pools(request: Request) -> Response:
    """`?name=` and `?device=` choose."""
    query = known_query(request, "name", "device")
    pools = await services_of(request).pools.pools(device=query.get("device"), name=query.get("name"))
    return json_answer(PoolList(pools=[pool_resource(pool) for pool in pools]))


async def get_pool(request: Request, pool_id: str) -> Response:
    """`?wait=N` waits while the pool is creating or deleting."""
    pools = services_of(request).pools
    pool = await pools.pool(pool_id, wait_s=query_wait_s(request))
    blocks = await pools.blocks(pool_id) if pool.state == "ready" else None
    if blocks is None:
        return json_answer(pool_resource(pool))
    shown = msgspec.convert(blocks, PoolBlocks, from_attributes=True)
    return json_answer(msgspec.structs.replace(pool_resource(pool), blocks=shown))


async def delete_pool(request: Request, pool_id: str) -> Response:
    """204 when the memory is given back. `?wait=N` waits for holders to let go. With `?force=true` a pool that is held
    then is forgotten: 200 with what stays in use and who keeps it.
    """
    query = known_query(request, "wait", "force")
    is_forced = is_true(query, "force")
    if is_forced:
        record(request, force=True)
        require_role(request.scope, FORCED_DELETE)
    timeout_s = wait_s(query)
    await begin(request)
    deleted = await services_of(request).pools.delete_pool(pool_id, wait_s=timeout_s, force=is_forced)
    if deleted.pinned_bytes is None:
        return Response(status_code=204)
    return json_answer(
        ForgottenPool(
            id=pool_id,
            pinned_bytes=deleted.pinned_bytes,
            num_holders=deleted.num_holders,
            holders=_holders(deleted.holders),
        )
    )


async def get_tensors(request: Request, pool_id: str) -> Response:
    services = services_of(request)
    known_query(request)
    pool = await services.pools.pool(pool_id)
    plan = services.plans.full(pool.plan_id) or await services.pools.plan(pool.plan_id)
    tensors = await services.plans.in_thread(lambda: _tensors(pool, plan), asker_of(request.scope))
    return Response(tensors, media_type="application/json")


async def get_devices(request: Request) -> Response:
    known_query(request)
    return json_answer(DeviceList(devices=await services_of(request).pools.devices()))


def pool_resource(pool: PoolState) -> Pool:
    error = pool.error
    return Pool(
        id=pool.pool_id,
        name=pool.name,
        device=pool.device,
        state=pool.state,
        plan_id=pool.plan_id,
        epoch=pool.epoch,
        buffer_size_bytes=pool.buffer_size_bytes,
        committed_bytes=pool.committed_bytes,
        num_holders=pool.num_holders,
        holders=_holders(pool.holders),
        error=None if error is None else Failure(code=error.code, message=error.message, details=error.details),
    )


def _holders(holders: Sequence[messages.Holder]) -> list[Holder]:
    return [Holder(pid=holder.pid, uid=holder.uid, client_name=holder.client_name) for holder in holders]


async def _planned(services: Services, asked: PoolRequest, asker: Asker) -> EncodedPlan:
    """The plan of the request inside a pool's request; its faults point into the whole body."""
    try:
        made = await services.plans.plan_request(asked.request, asker)
    except KvpageError as error:
        if not error.errors:
            raise
        inside = [FieldError("/request" + fault.pointer, fault.detail) for fault in error.errors]
        raise error_from_code(error.code, error.message, details=error.details, errors=inside) from error
    plan = _of_rank(made, asked.rank)
    if asked.plan_id is not None and asked.plan_id != plan.plan_id:
        raise Conflict(
            f"the request gives plan {plan.plan_id}, not the expected {asked.plan_id}: the request or the version of "
            f"kvpage differs from when that id was made",
            details={"plan_id": plan.plan_id, "expected_plan_id": asked.plan_id},
        )
    return plan


def _of_rank(made: EncodedPlan | EncodedRanks, rank: int | None) -> EncodedPlan:
    """The plan of the rank that the pool is for. Raises `SpecInvalid` where that is not one."""
    if isinstance(made, EncodedPlan):
        if rank is None:
            return made
        detail = f"rank is {rank}, but the request is of one rank; leave it out, or give the request ranks"
    elif rank is None:
        detail = f"the request has {len(made.plans)} ranks, and a pool is of one: say which, from 0"
    elif rank < len(made.plans):
        return made.plans[rank]
    else:
        detail = f"rank is {rank}, but the request has {len(made.plans)} ranks, from 0"
    raise SpecInvalid(f"/rank: {detail}", errors=[FieldError("/rank", detail)])


def _pool_request(body: bytes, max_bytes: int) -> PoolRequest:
    asked = parsed(body, PoolRequest, max_bytes)
    size_bytes = len(asked.name.encode())
    if not 1 <= size_bytes <= MAX_NAME_BYTES or not asked.name.isprintable():
        name = f"name '{shorten(asked.name)}' has {size_bytes} bytes"
        text = f"{name}; it must have 1 to {MAX_NAME_BYTES}, and printable characters only"
        raise SpecInvalid(text, errors=[FieldError("/name", text)])
    return asked


def _failure(pool: PoolState) -> KvpageError:
    assert pool.error is not None
    error = pool.error.to_error()
    error.details.setdefault("pool_id", pool.pool_id)
    return error


def _tensors(pool: PoolState, plan_json: bytes) -> bytes:
    plan = Plan.from_json(plan_json)
    tensors = [
        PoolTensor(
            layer=layer.name,
            name=view.name,
            dtype=view.dtype,
            shape=view.shape,
            strides_bytes=view.strides_bytes,
            offset_bytes=view.offset_bytes,
        )
        for layer in plan.layers.values()
        for view in layer.tensors
    ]
    return msgspec.json.encode(
        PoolTensors(
            pool_id=pool.pool_id,
            plan_id=pool.plan_id,
            epoch=pool.epoch,
            device=pool.device,
            buffer_size_bytes=pool.buffer_size_bytes,
            tensors=tensors,
        )
    )
