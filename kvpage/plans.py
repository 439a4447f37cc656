"""A plan: one page layout for all layers of a model. Immutable, self-checking, named by the hash of its content."""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal, Self

import msgspec

from kvpage.errors import InternalError, SpecInvalid, shorten
from kvpage.plan_check import check_plan

PLAN_VERSION = 1
Amount = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
"""No size, offset or count is larger; checked where a plan is read, as it may come from anybody."""
Name = Annotated[str, msgspec.Meta(max_length=256)]
Decision = Literal["keep", "scale", "pad", "scale_pad", "co_group", "share", "no_cache"]


class TensorView(msgspec.Struct, frozen=True, kw_only=True):
    """One strided tensor in the pool's buffer, axes in the backend's logical order."""

    name: Name
    """"kv" for attention, "state.0" … for recurrent states."""
    dtype: str
    shape: tuple[Amount, ...]
    strides_bytes: tuple[Amount, ...]
    offset_bytes: Amount
    """From the start of the buffer to the first element."""
    block_axis: Amount
    """The axis that block ids index."""
    kernel_blocks_per_block: Amount
    """More than 1 when the backend's kernels take smaller blocks than the layer's `block_size`: block i is the entries
    i × kernel_blocks_per_block … of the block axis."""


class LayerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one layer."""

    name: Name
    kind: str
    decision: Decision
    reason: str
    """A sentence with the numbers behind the decision."""
    backend: str | None
    """Registered name, "custom" when written out, None for states and layers without a cache."""
    block_size: Amount
    """Tokens of one block."""
    real_page_size_bytes: Amount
    """Bytes that the data of one block needs in this layer."""
    page_size_bytes: Amount
    """Bytes from one page to the next, padding included."""
    page_size_padded: Amount | None
    """Equal to `page_size_bytes` when the page is padded; None when it is dense."""
    kv_sharing_target: str | None
    """The layer whose tensors these are (decision `share`); else None."""
    group: Amount | None
    """Index into `Plan.groups`; None for a layer without a cache."""
    tensors: tuple[TensorView, ...]


class GroupPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that share one block table."""

    layers: tuple[Name, ...]
    kind: str
    sliding_window: Amount | None
    attention_chunk_size: Amount | None
    block_size: Amount
    blocks_per_slab: Amount
    page_size_bytes: Amount
    """Page of one layer; of all layers together when they have a buffer each and differ (vLLM's uniform type)."""
    block_stride_bytes: Amount
    """Bytes from one block to the next in each layer's tensor; 0 when the layers differ in it."""


class Waste(msgspec.Struct, frozen=True, kw_only=True):
    """Where the bytes of one request of `max_model_len` tokens go (without it: of one block of every group).

    live + padding + group rounding + tail = total.
    """

    total_bytes: Amount
    live_bytes: Amount
    padding_bytes: Amount
    """Page less real page, over all blocks held."""
    group_rounding_bytes: Amount
    """Slots of the widest group's width that narrower groups leave empty."""
    tail_bytes: Amount
    """Tokens of held blocks that the request does not fill."""
    unallocated_bytes: Amount
    """Bytes of `memory_bytes` that are too few for one more block."""


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """What fits. Fields about one request of `max_model_len` tokens are None where the request named no length."""

    max_model_len: Amount | None
    max_num_batched_tokens: Amount
    blocks_per_request: tuple[Amount, ...] | None
    """Most blocks that one request holds, group by group."""
    request_bytes: Amount | None
    """Bytes that one request is charged, as vLLM 0.24.0 counts them."""
    max_concurrency: float | None
    """num_blocks over the blocks of one request, as vLLM prints it (the null block counted)."""
    longest_request_tokens: Amount | None
    """Longest single request that fits beside the null block; None when length does not matter."""
    bytes_per_token: float
    """What a request grows by with each token, on average: of the groups that keep every token."""
    fixed_request_bytes: Amount
    """What a long request holds of the other groups: windows and chunks with the tokens in flight, states, encoder
    output. A request of n tokens is charged about this and n times `bytes_per_token`."""


class RejectedStrategy(msgspec.Struct, frozen=True, kw_only=True):
    """A strategy that was weighed and not taken."""

    strategy: str
    cost: float | None
    """Its `held_over_live`; None where it has no layout for these layers."""
    reason: str


class WorkloadShare(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of `min_tokens` to `max_tokens` tokens, each length as likely, with a share of `weight`."""

    min_tokens: Amount
    max_tokens: Amount
    weight: float


class Efficiency(msgspec.Struct, frozen=True, kw_only=True):
    """What requests of a workload hold of the pool beside what they need, each in its steady state.

    All ratios are means over requests of (bytes held / bytes whose content the request needs), 1 at best.
    """

    workload: tuple[WorkloadShare, ...]
    held_over_live: float
    """Of this plan. Where a slab is more than 1/256 of the pool, its null slab and what is too little for a slab count
    as held; of groups that cut slabs into blocks, half a slab each."""
    floor_over_live: float
    """Of pools without padding and groups without rounding, in the blocks that hold least of those the kernels take:
    what is left is the last block's tail and the block that a window straddles."""
    one_token_bytes: Amount
    """What a request of one token holds: a slab of every group."""
    block_lcm_tokens: Amount
    """Least common multiple of the block sizes of attention layers: what prefix hits step by."""


class FrontPoint(msgspec.Struct, frozen=True, kw_only=True):
    """A layout that was found and is better than all others in something: cost, stride, common multiple or groups."""

    strategy: str
    held_over_live: float
    slab_bytes: Amount
    max_block_stride_bytes: Amount
    block_lcm_tokens: Amount
    num_groups: Amount
    one_token_bytes: Amount


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One page layout in one buffer. `layers` is in the order of the request."""

    version: int = PLAN_VERSION
    plan_id: str
    strategy: str
    num_blocks: Amount
    """Slabs of the pool, which all groups share: blocks, where `blocks_per_slab` is 1 everywhere. Slab 0 holds the null
    block and is never handed out."""
    bytes_per_block: Amount
    """Bytes of one block over all buffers."""
    slab_bytes: Amount
    """Bytes that one group owns at a time; equal to `bytes_per_block` when a slab is one block."""
    buffer_size_bytes: Amount
    groups: tuple[GroupPlan, ...]
    layers: dict[Name, LayerPlan]
    waste: Waste
    capacity: Capacity
    efficiency: Efficiency | None = None
    """None for strategy unify, unless the request names a workload."""
    front: tuple[FrontPoint, ...] = ()
    """This layout first, then others that a search found; none for strategy unify."""
    rejected: tuple[RejectedStrategy, ...] = ()
    """What strategy auto weighed and did not take."""
    notes: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    """What was assumed of the request's `model` because its config leaves it out. Not there where nothing was."""

    def to_json(self) -> bytes:
        """The whole plan as JSON."""
        return _ENCODER.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Read a plan and prove it: the id fits the content and `check()` passes. Raises `SpecInvalid`."""
        try:
            plan = msgspec.json.decode(data, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise SpecInvalid(f"not a plan: {shorten(str(error))}") from error
        if plan.version != PLAN_VERSION:
            raise SpecInvalid(f"a plan of version {shorten(str(plan.version))}; this kvpage reads {PLAN_VERSION}")
        expected = plan.computed_id()
        if plan.plan_id != expected:
            raise SpecInvalid(
                f"plan_id {shorten(plan.plan_id)!r} does not fit the content, which hashes to {expected!r}"
            )
        try:
            plan.check()
        except InternalError as error:
            raise SpecInvalid(f"the plan's layout is not sound: {error.message}") from error
        return plan

    def check(self) -> None:
        """Prove that the layout is sound, for any number of blocks. Raises `InternalError` naming what is not."""
        check_plan(self)

    def computed_id(self) -> str:
        """sha256 of the canonical plan: its JSON with sorted keys, `plan_id` and reasons empty, without what the search
        says of itself: `efficiency`, `front`, `rejected`; and without `notes`."""
        layers = {name: msgspec.structs.replace(layer, reason="") for name, layer in self.layers.items()}
        return canonical_id(msgspec.structs.replace(self.bare(), layers=layers, plan_id=""))

    def bare(self) -> Self:
        """Without what its search says of itself, and notes of a model: one plan may answer several requests."""
        if self.efficiency is None and not (self.front or self.rejected or self.notes):
            return self
        return msgspec.structs.replace(self, efficiency=None, front=(), rejected=(), notes=msgspec.UNSET)


_ENCODER = msgspec.json.Encoder()
_CANONICAL_ENCODER = msgspec.json.Encoder(order="sorted")


def canonical_id(plan_without_prose: Plan) -> str:
    """The id of a plan that has no reasons, no rejected strategies and no id yet."""
    return "sha256:" + hashlib.sha256(_CANONICAL_ENCODER.encode(plan_without_prose)).hexdigest()
