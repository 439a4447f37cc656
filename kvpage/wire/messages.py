"""Every message between a device worker and its clients, as msgpack structs. docs/protocol.md says what each does.

A struct is frozen, refuses fields it does not know, and is named on the wire by its class name in snake case.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from kvpage.errors import KvpageError, ProtocolError, error_from_code, shorten
from kvpage.wire import leasing, succession
from kvpage.wire.device import DescribeDevice as DescribeDevice
from kvpage.wire.device import DeviceState as DeviceState
from kvpage.wire.device import DeviceStateName as DeviceStateName
from kvpage.wire.values import MAX_NAME_BYTES as MAX_NAME_BYTES
from kvpage.wire.values import MAX_WAIT_S as MAX_WAIT_S
from kvpage.wire.values import Body as Body
from kvpage.wire.values import Epoch, Id, Name, PlanId, PoolId, SizeBytes, WaitS
from kvpage.wire.values import Role as Role
from kvpage.wire.values import Value as Value
from kvpage.wire.values import check_name as check_name

_T = TypeVar("_T")

PROTOCOL_VERSION = 1
MAX_PLAN_BYTES = 6 << 20  # leaves room for the rest of a reply inside the frame limit of 8 MiB
MAX_HOLDERS_NAMED = 64  # a PoolState names this many holders and counts all of them
MAX_HOLDERS_LISTED = 16  # the same in a PoolList, which must fit into a frame with all pools a worker may have

PoolStateName: TypeAlias = Literal["creating", "ready", "failed", "deleting"]


# --- parts -----------------------------------------------------------------------------------------------------------


class WireError(Value, frozen=True, kw_only=True):
    """A `KvpageError` on the wire."""

    code: str
    message: str
    details: dict[str, Any] = msgspec.field(default_factory=dict)

    @classmethod
    def from_error(cls, error: KvpageError) -> WireError:
        return cls(code=error.code, message=error.message, details=error.details)

    def to_error(self) -> KvpageError:
        return error_from_code(self.code, self.message, details=self.details)


class ChunkInfo(Value, frozen=True, kw_only=True):
    """One physical allocation of a pool; its descriptor travels beside the message, in the same order."""

    kind: Annotated[str, Meta(max_length=32)]
    """Handle kind: `memfd`, `cuda_vmm` or `cuda_ipc`."""
    size_bytes: SizeBytes
    device_uuid: Annotated[str, Meta(max_length=64)] = ""
    """Of the GPU or MIG instance on which the memory lies; empty for host memory."""
    handle: Annotated[bytes, Meta(max_length=64)] = b""
    """64 bytes beside the descriptor, where the kind has them. A secret: never logged, never in JSON of a listing."""


class Holder(Value, frozen=True, kw_only=True):
    """One connection's claim on a pool."""

    hold_id: Id
    pid: int
    """0 when the holder lives in another PID namespace: for people to read, never an identity."""
    uid: int
    client_name: str


class PoolState(Body, frozen=True, kw_only=True):
    """What a worker says about one of its pools."""

    pool_id: PoolId
    name: Name
    device: str
    epoch: Epoch
    plan_id: PlanId
    state: PoolStateName
    buffer_size_bytes: SizeBytes
    committed_bytes: Id
    """Memory that is really there; grows from 0 to `buffer_size_bytes` while the pool is creating."""
    num_holders: Id
    holders: list[Holder]
    """The first `MAX_HOLDERS_NAMED` of them, in a list of pools the first `MAX_HOLDERS_LISTED`."""
    error: WireError | None = None
    """Why the pool failed."""


# --- requests --------------------------------------------------------------------------------------------------------


class Hello(Body, frozen=True, kw_only=True):
    """Must be the first request of a connection."""

    version: int
    role: Role
    client_name: Annotated[str, Meta(max_length=MAX_NAME_BYTES)] = ""


class CreatePool(Body, frozen=True, kw_only=True):
    """Reserve memory and begin to commit it. Same name and plan: the pool that is there."""

    name: Name
    plan_id: PlanId
    plan: bytes
    """Canonical plan, at most `MAX_PLAN_BYTES`; the worker keeps it and does not read it."""
    buffer_size_bytes: SizeBytes
    handle_kind: Annotated[str, Meta(max_length=32)] = ""
    """Empty for the device's default."""


class ListPools(Body, frozen=True, kw_only=True):
    pass


class GetPool(Body, frozen=True, kw_only=True):
    pool_id: PoolId


class FindPool(Body, frozen=True, kw_only=True):
    name: Name


class WaitPool(Body, frozen=True, kw_only=True):
    """Answered when the pool is neither `creating` nor `deleting`, or when `timeout_s` has passed."""

    pool_id: PoolId
    timeout_s: WaitS


class DeletePool(Body, frozen=True, kw_only=True):
    """Answered when the worker has given the memory back, or refused when the pool is held for longer."""

    pool_id: PoolId
    timeout_s: WaitS = 0.0
    """How long holders may take to let go."""
    force: bool = False
    """Forget a pool that is still held then. Its memory stays in use until its holders have let go."""


class Attach(Body, frozen=True, kw_only=True):
    """Take a hold on a pool and receive its descriptors. Exactly one of `pool_id` and `name` is given."""

    pool_id: PoolId | None = None
    name: Name | None = None
    plan_id: PlanId | None = None
    """Refuse a pool of another plan."""
    epoch: Epoch | None = None
    """Refuse a worker that has lost the pools of this epoch."""
    known_plan_id: PlanId | None = None
    """The plan is left out of the reply if it is this one."""


class Detach(Body, frozen=True, kw_only=True):
    hold_id: Id


class ExportPool(Body, frozen=True, kw_only=True):
    """Role `api`: receive the descriptors of a pool and of its control block, to keep them for a successor."""

    pool_id: PoolId


class AdoptPool(Body, frozen=True, kw_only=True):
    """Role `api`: hand over a pool of a worker that died. Descriptors: one for each chunk, then the control block."""

    chunks: Annotated[list[ChunkInfo], Meta(min_length=1, max_length=15)]


# --- replies ---------------------------------------------------------------------------------------------------------


class Welcome(Body, frozen=True, kw_only=True):
    version: int
    epoch: Epoch
    device: str
    worker_pid: int
    handle_kinds: list[str]
    max_frame_bytes: int


class PoolCreated(Body, frozen=True, kw_only=True):
    pool: PoolState
    created: bool
    """False when a pool of this name and plan was already there."""


class PoolList(Body, frozen=True, kw_only=True):
    pools: list[PoolState]


class PoolDeleted(Body, frozen=True, kw_only=True):
    pool_id: PoolId
    pinned_bytes: SizeBytes | None = None
    """What the holders of a pool that was forgotten keep in use; None when the memory has been given back."""
    num_holders: Id = 0
    holders: list[Holder] = msgspec.field(default_factory=list)
    """The first `MAX_HOLDERS_NAMED` of those."""


class Attached(Body, frozen=True, kw_only=True):
    hold_id: Id
    pool: PoolState
    plan: bytes | None
    """Canonical plan; None when `known_plan_id` named it."""
    chunks: list[ChunkInfo]


class Detached(Body, frozen=True, kw_only=True):
    hold_id: Id


class Exported(Body, frozen=True, kw_only=True):
    pool: PoolState
    chunks: list[ChunkInfo]


RequestBody: TypeAlias = (
    Hello
    | DescribeDevice
    | CreatePool
    | ListPools
    | GetPool
    | FindPool
    | WaitPool
    | DeletePool
    | Attach
    | Detach
    | ExportPool
    | AdoptPool
    | succession.FinishAdoption
    | succession.TakeOver
    | succession.TakeConnection
    | succession.FinishTakeOver
    | succession.DrainWorker
    | leasing.RequestBody
)
ReplyBody: TypeAlias = (
    Welcome
    | DeviceState
    | PoolState
    | PoolCreated
    | PoolList
    | PoolDeleted
    | Attached
    | Detached
    | Exported
    | succession.AdoptionFinished
    | succession.TakenOver
    | succession.ConnectionTaken
    | succession.TakeOverFinished
    | succession.WorkerDrained
    | leasing.ReplyBody
)


# --- envelopes -------------------------------------------------------------------------------------------------------


class RequestFrame(Value, frozen=True, kw_only=True, omit_defaults=True):
    id: Id
    """Chosen by the client; 0 means that no reply is wanted."""
    ack: Id | None = None
    """Id of the last reply with descriptors that the client has read."""
    body: RequestBody


class ReplyFrame(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Carries a body or an error, never both."""

    id: Id
    """That of the request; 0 when the error is about the connection, which then ends."""
    epoch: Epoch
    body: ReplyBody | None = None
    error: WireError | None = None


class InvalidRequest(NamedTuple):
    """A request with an id, so that it can be answered, and with a fault in the rest."""

    id: int
    reason: str


class _AnyRequest(msgspec.Struct):
    id: Id


_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(RequestFrame)
_id_decoder = msgspec.msgpack.Decoder(_AnyRequest)
_reply_decoder = msgspec.msgpack.Decoder(ReplyFrame)


def encode(frame: RequestFrame | ReplyFrame) -> bytes:
    return _encoder.encode(frame)


def decode_request(payload: bytes | memoryview) -> RequestFrame | InvalidRequest:
    """The request in `payload`; raises `ProtocolError` for what is no msgpack or has no id."""
    try:
        return _decode(_request_decoder, payload)
    except msgspec.ValidationError as error:
        reason = shorten(str(error))
    try:
        return InvalidRequest(_decode(_id_decoder, payload).id, reason)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"a request without a readable id: {shorten(str(error))}") from error


def decode_reply(payload: bytes | memoryview) -> ReplyFrame:
    """The reply in `payload`; raises `ProtocolError` for anything else."""
    try:
        frame = _decode(_reply_decoder, payload)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"not a reply of protocol version {PROTOCOL_VERSION}: {shorten(str(error))}") from error
    if (frame.body is None) == (frame.error is None):
        raise ProtocolError(f"reply {frame.id} must have either a body or an error")
    return frame


def _decode(decoder: msgspec.msgpack.Decoder[_T], payload: bytes | memoryview) -> _T:
    try:
        return decoder.decode(payload)
    except msgspec.ValidationError:  # well-formed msgpack of another shape: the caller's to judge
        raise
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"not msgpack: {shorten(str(error))}") from error
