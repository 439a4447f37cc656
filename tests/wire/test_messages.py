"""Messages: every one survives the wire, and what is none is refused."""

from __future__ import annotations

import typing

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpage import errors
from kvpage.wire import messages, succession
from kvpage.wire.messages import RequestFrame
from support import lease_messages

PLAN_ID = "sha256:" + "0123456789abcdef" * 4
EPOCH = "0123456789abcdef" * 2
POOL_ID = "pool-0123456789abcdef"
POOL = messages.PoolState(
    pool_id=POOL_ID,
    name="mimo",
    device="host",
    epoch=EPOCH,
    plan_id=PLAN_ID,
    state="failed",
    buffer_size_bytes=4096,
    committed_bytes=0,
    num_holders=1,
    holders=[messages.Holder(hold_id=7, pid=12, uid=1000, client_name="engine")],
    error=messages.WireError(code="not-enough-memory", message="no", details={"needed_bytes": 4096}),
)
CHUNK = messages.ChunkInfo(kind="memfd", size_bytes=4096)
REQUESTS: list[messages.RequestBody] = [
    messages.Hello(version=1, role="api", client_name="server"),
    messages.DescribeDevice(),
    messages.CreatePool(name="mimo", plan_id=PLAN_ID, plan=b"{}", buffer_size_bytes=4096),
    messages.ListPools(),
    messages.GetPool(pool_id=POOL_ID),
    messages.FindPool(name="mimo"),
    messages.WaitPool(pool_id=POOL_ID, timeout_s=0.5),
    messages.DeletePool(pool_id=POOL_ID, timeout_s=2.5),
    messages.Attach(name="mimo", plan_id=PLAN_ID, epoch=EPOCH, known_plan_id=PLAN_ID),
    messages.Detach(hold_id=7),
    messages.ExportPool(pool_id=POOL_ID),
    messages.AdoptPool(chunks=[CHUNK]),
    succession.FinishAdoption(),
    succession.TakeOver(),
    succession.TakeConnection(number=3),
    succession.FinishTakeOver(),
    succession.DrainWorker(timeout_s=2.5, lose_pools=True),
    *lease_messages.REQUESTS,
]
REPLIES: list[messages.ReplyBody] = [
    messages.Welcome(
        version=1, epoch=EPOCH, device="host", worker_pid=3, handle_kinds=["memfd"], max_frame_bytes=8 << 20
    ),
    messages.DeviceState(
        device="host",
        epoch=EPOCH,
        worker_pid=3,
        state="ready",
        handle_kinds=["memfd"],
        memory_limit_bytes=8192,
        reserved_bytes=4096,
        pinned_bytes=0,
        num_pools=1,
        num_clients=2,
    ),
    POOL,
    messages.PoolCreated(pool=POOL, created=True),
    messages.PoolList(pools=[POOL, POOL]),
    messages.PoolDeleted(pool_id=POOL_ID),
    messages.Attached(hold_id=7, pool=POOL, plan=b"{}", chunks=[CHUNK]),
    messages.Detached(hold_id=7),
    messages.Exported(pool=POOL, chunks=[CHUNK]),
    succession.AdoptionFinished(num_pools=2),
    succession.TakenOver(pool_ids=[POOL_ID], num_connections=3, next_hold_id=8, memory_limit_bytes=8192),
    succession.ConnectionTaken(
        role="client",
        client_name="engine",
        holds=[succession.TakenHold(hold_id=7, pool_id=POOL_ID)],
        leases=[succession.TakenLease(lease_id="lease-0123456789abcdef", hold_id=8, pool_id=POOL_ID)],
        unacknowledged=5,
        unread=b"half a fra",
        unsent=b"me",
    ),
    succession.TakeOverFinished(),
    succession.WorkerDrained(num_pools=1),
    *lease_messages.REPLIES,
]


def packed(**fields: object) -> bytes:
    return msgspec.msgpack.encode(fields)


def test_the_samples_here_cover_every_message() -> None:
    assert {type(body) for body in REQUESTS} == set(typing.get_args(messages.RequestBody))
    assert {type(body) for body in REPLIES} == set(typing.get_args(messages.ReplyBody))


@pytest.mark.parametrize("body", REQUESTS, ids=lambda body: type(body).__name__)
def test_every_request_survives_the_wire(body: messages.RequestBody) -> None:
    frame = RequestFrame(id=2**64 - 1, ack=3, body=body)
    assert messages.decode_request(messages.encode(frame)) == frame


@pytest.mark.parametrize("body", REPLIES, ids=lambda body: type(body).__name__)
def test_every_reply_survives_the_wire(body: messages.ReplyBody) -> None:
    frame = messages.ReplyFrame(id=1, epoch=EPOCH, body=body)
    assert messages.decode_reply(messages.encode(frame)) == frame


def test_a_message_is_a_map_that_names_its_type_in_snake_case() -> None:
    payload = messages.encode(RequestFrame(id=1, body=messages.GetPool(pool_id=POOL_ID)))
    assert msgspec.msgpack.decode(payload) == {"id": 1, "body": {"type": "get_pool", "pool_id": POOL_ID}}


@pytest.mark.parametrize("kind", errors.ERRORS_BY_CODE.values(), ids=lambda kind: kind.code)
def test_every_error_keeps_its_class_message_and_details(kind: type[errors.KvpageError]) -> None:
    sent = messages.WireError.from_error(kind("what, why", details={"limit_bytes": 8}))
    frame = messages.ReplyFrame(id=1, epoch=EPOCH, error=sent)
    received = messages.decode_reply(messages.encode(frame)).error
    assert received is not None
    error = received.to_error()
    assert (type(error), error.message, error.details) == (kind, "what, why", {"limit_bytes": 8})


@pytest.mark.parametrize(
    "body",
    [
        {"type": "no_such_request"},
        {"type": "get_pool"},
        {"type": "get_pool", "pool_id": POOL_ID, "extra": 1},
        {"type": "get_pool", "pool_id": "pool-XYZ"},
        {"type": "get_pool", "pool_id": POOL_ID + "\n"},
        {"type": "create_pool", "name": "", "plan_id": PLAN_ID, "plan": b"", "buffer_size_bytes": 1},
        {"type": "create_pool", "name": "n", "plan_id": PLAN_ID, "plan": b"", "buffer_size_bytes": 0},
        {"type": "create_pool", "name": "n", "plan_id": PLAN_ID, "plan": b"", "buffer_size_bytes": 2**62 + 1},
        {"type": "create_pool", "name": "n", "plan_id": "sha256:12", "plan": b"", "buffer_size_bytes": 1},
        {"type": "wait_pool", "pool_id": POOL_ID, "timeout_s": -1},
        {"type": "close_lease", "lease_id": "lease-1"},
        {"type": "open_lease", "pool_id": POOL_ID, "name": "n", "ttl_s": 61.0},
        {"type": "open_lease", "pool_id": POOL_ID, "name": "n", "token": "short"},
        {"type": "take_step", "lease_id": lease_messages.LEASE_ID, "allocate": {0: -1}},
        {"type": "take_step", "lease_id": lease_messages.LEASE_ID, "allocate": {0: 2**31}},
        {"type": "take_step", "lease_id": lease_messages.LEASE_ID, "allocate": {2**15: 1}},
        {"type": "take_step", "lease_id": lease_messages.LEASE_ID, "key": -1},
        {"type": "take_step", "lease_id": lease_messages.LEASE_ID, "free": {0: [1, 2]}},
        {"type": "reserve", "lease_id": lease_messages.LEASE_ID, "blocks": {0: 1}, "ttl_s": 0},
        {"type": "read_events", "pool_id": POOL_ID, "at_most": 0},
        {"type": "wait_pool", "pool_id": POOL_ID, "timeout_s": float("nan")},
        {"type": "wait_pool", "pool_id": POOL_ID, "timeout_s": float("inf")},
        {"type": "hello", "version": 1, "role": "root"},
        {"type": "adopt_pool", "chunks": []},
        {"type": "adopt_pool", "chunks": [{"kind": "memfd", "size_bytes": 1}] * 16},
        None,
    ],
)
def test_a_request_with_a_fault_can_still_be_answered(body: object) -> None:
    decoded = messages.decode_request(packed(id=41, body=body))
    assert isinstance(decoded, messages.InvalidRequest)
    assert decoded.id == 41


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", b"\x91" * 100_000, packed(body={"type": "list_pools"}), packed(id=-1, body=None), b"\x93\x01\x02"],
    ids=["empty", "reserved byte", "deep nesting", "no id", "negative id", "cut off"],
)
def test_what_has_no_readable_id_is_a_protocol_error(payload: bytes) -> None:
    with pytest.raises(errors.ProtocolError):
        messages.decode_request(payload)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"body": {"type": "detached", "hold_id": 1}, "error": {"code": "conflict", "message": "m"}},
        {"body": {"type": "attach", "name": "x"}},
        {"error": {"code": "conflict"}},
    ],
    ids=["neither", "both", "a request", "error without message"],
)
def test_a_reply_has_a_body_or_an_error(fields: dict[str, object]) -> None:
    with pytest.raises(errors.ProtocolError):
        messages.decode_reply(packed(id=1, epoch=EPOCH, **fields))


@given(payload=st.binary(max_size=200))
def test_random_bytes_are_a_request_a_faulty_request_or_a_protocol_error(payload: bytes) -> None:
    try:
        decoded = messages.decode_request(payload)
    except errors.ProtocolError:
        return
    assert isinstance(decoded, RequestFrame | messages.InvalidRequest)


@given(position=st.integers(0, 200), byte=st.integers(0, 255), body=st.sampled_from(REQUESTS))
def test_a_changed_byte_never_raises_anything_else(position: int, byte: int, body: messages.RequestBody) -> None:
    payload = bytearray(messages.encode(RequestFrame(id=5, body=body)))
    payload[position % len(payload)] = byte
    try:
        decoded = messages.decode_request(bytes(payload))
    except errors.ProtocolError:
        return
    assert isinstance(decoded, RequestFrame | messages.InvalidRequest)
