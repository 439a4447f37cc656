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


class RejectedStrategy(msgspec.Struct, frozen=True, kw_only=True):
    """A strategy that was weighed and not taken."""

    strategy: str
    cost: float
    reason: str


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One page layout in one buffer. `layers` is in the order of the request."""

    version: int = PLAN_VERSION
    plan_id: str
    strategy: str
    num_blocks: Amount
    """Blocks of the shared pool; block 0 is the null block and is never handed out."""
    bytes_per_block: Amount
    """Bytes of one block over all buffers."""
    slab_bytes: Amount
    """Bytes that one group owns at a time; equal to `bytes_per_block` when a slab is one block."""
    buffer_size_bytes: Amount
    groups: tuple[GroupPlan, ...]
    layers: dict[Name, LayerPlan]
    waste: Waste
    capacity: Capacity
    rejected: tuple[RejectedStrategy, ...] = ()

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
        """sha256 of the canonical plan: its JSON with sorted keys, `plan_id` and reasons empty, nothing rejected."""
        layers = {name: msgspec.structs.replace(layer, reason="") for name, layer in self.layers.items()}
        return canonical_id(msgspec.structs.replace(self, layers=layers, plan_id="", rejected=()))


_ENCODER = msgspec.json.Encoder()
_CANONICAL_ENCODER = msgspec.json.Encoder(order="sorted")


def canonical_id(plan_without_prose: Plan) -> str:
    """The id of a plan that has no reasons, no rejected strategies and no id yet."""
    return "sha256:" + hashlib.sha256(_CANONICAL_ENCODER.encode(plan_without_prose)).hexdigest()
