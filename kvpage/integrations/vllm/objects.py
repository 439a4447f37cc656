"""vLLM's spec classes by name, and their fields: what is read, what no page depends on, and what is refused.

Read from `vllm/v1/kv_cache_interface.py` of vLLM 0.24.0, 0.28.0, 0.30.0, 0.31.0 and 0.33.0. A class derived from a
known one is known by it, unless it says for itself how much a request keeps; a field that is not listed must have its
default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvpage.dtypes import ITEM_SIZE_BYTES
from kvpage.errors import FieldError, NotSupported, SpecInvalid, shorten
from kvpage.strict_json import pointer

KINDS = {
    "FullAttentionSpec": "full_attention",
    "TQFullAttentionSpec": "full_attention",
    "SinkFullAttentionSpec": "full_attention",
    "SlidingWindowSpec": "sliding_window",
    "ChunkedLocalAttentionSpec": "chunked_local_attention",
    "CrossAttentionSpec": "cross_attention",
    "EncoderOnlyAttentionSpec": "encoder_only_attention",
    "MLAAttentionSpec": "mla_attention",
    "HiddenStateCacheSpec": "mla_attention",
    "SlidingWindowMLASpec": "sliding_window_mla",
    "MambaSpec": "mamba",
}
WRAPPER = "UniformTypeKVCacheSpecs"
LATENT_KINDS = ("mla_attention", "sliding_window_mla")

NO_KIND = {
    "RSWASpec": "it keeps the whole prompt and a window of what is generated",
    "CircularBufferSpec": "every request keeps one block, a ring, whatever its length",
    "KpoolTailSpec": "every request keeps one block, a ring, whatever its length",
    "HiSparseHotSpec": "every request keeps a fixed number of raw pages",
    "HiSparseResidentSpec": "its pages are raw copies of pages in host memory",
}

_READ = """
    block_size num_kv_heads head_size head_size_v dtype kv_quant_mode page_size_padded sliding_window
    attention_chunk_size tq_slot_size cache_dtype_str alignment model_version compress_ratio tokens_per_state
    num_head_slots state_content_bytes block_stride_alignment extra_retained_tokens is_draft kv_cache_specs
    shapes dtypes mamba_cache_mode num_speculative_blocks num_prefill_checkpoint_blocks
"""
# For kernels, scheduling and transfers: neither the pages of one rank nor how many a request holds depend on these.
WITHOUT_EFFECT = """
    indexes_kv_by_block_stride non_causal sink_len mamba_type dcp_sharded max_tp_shards topk_buffer_width cache_role
    is_index_group_leader non_causal_multi_token_decode bounded_replay num_heads prefill_checkpoint_alignment
    tp_replicated
"""
_KNOWN_FIELDS = frozenset((_READ + WITHOUT_EFFECT).split())
# What code of others raises where it has no answer: for these sizes, on this machine, for an object that is not whole.
NO_ANSWER = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
_HOLDINGS = ("max_memory_usage_bytes", "max_admission_blocks_per_request")  # methods: what a request keeps


@dataclass(frozen=True, slots=True)
class Spec:
    """A vLLM spec of the layer called `layer`."""

    layer: str
    value: Any

    @property
    def class_name(self) -> str:
        return type(self.value).__name__

    def fault(self, detail: str, field: str = "") -> SpecInvalid:
        """The error to raise for the layer, or for one of its fields."""
        where = pointer(self.layer, *([field] if field else []))
        return SpecInvalid(f"layer {shorten(self.layer)!r}: {detail}", errors=[FieldError(where, detail)])

    def unsupported(self, detail: str, field: str = "") -> NotSupported:
        fault = self.fault(detail, field)
        return NotSupported(fault.message, errors=fault.errors)

    def has(self, field: str) -> bool:
        return hasattr(type(self.value), field) or field in getattr(self.value, "__dict__", {})

    def get(self, field: str, default: Any = None) -> Any:
        """The field; `default` where there is none. Raises `SpecInvalid` where the object itself refuses to say."""
        try:
            return getattr(self.value, field, default)
        except NO_ANSWER as error:
            detail = f"{self.class_name}.{field} raised {type(error).__name__}: {shorten(str(error))}"
            raise self.fault(detail, field) from error

    def require(self, field: str) -> Any:
        value = self.get(field)
        if value is None:
            raise self.fault(f"{self.class_name} has no {field}, which the page depends on", field)
        return value

    def size(self, field: str, default: int | None = None) -> int:
        """A whole number from 0 up. Raises `SpecInvalid` for anything else."""
        value = self.get(field, default)
        if value is None:
            value = default if default is not None else self.require(field)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.fault(f"{field} must be a whole number, not {shorten(repr(value))}", field)
        return int(value)

    def items(self, field: str) -> Sequence[Any]:
        value = self.require(field)
        if not isinstance(value, list | tuple):
            raise self.fault(f"{field} must be a tuple, not {shorten(repr(value))}", field)
        return value

    @property
    def counts_bytes(self) -> bool:
        """True where a spec counts the bytes of its rows itself (0.28); before, pages follow from widths and modes."""
        return self.has("state_content_size_bytes")

    @property
    def has_named_layouts(self) -> bool:
        """True where the engine knows named layouts (0.30); before, each backend has a shape and stride orders."""
        return self.has("tokens_per_state")

    @property
    def quant_mode(self) -> str:
        """Name of the quantisation: the numbers behind the names differ between versions."""
        mode = self.get("kv_quant_mode")
        name = "NONE" if mode is None else mode if isinstance(mode, str) else getattr(mode, "name", None)
        if name is None:
            raise self.fault(f"kv_quant_mode {mode!r} has no name; numbers mean other modes in other versions of vLLM")
        return str(name).upper()


def fault_of(argument: str, detail: str) -> SpecInvalid:
    """The error to raise for an argument, or for what it names."""
    return SpecInvalid(f"{argument}: {detail}", errors=[FieldError(pointer(argument), detail)])


def kind_of(spec: Spec) -> str:
    """Raises `NotSupported` for a class that is not known, or that keeps more or less than the known one it is from."""
    for owner in type(spec.value).__mro__:
        name = owner.__name__
        if name in NO_KIND:
            raise spec.unsupported(f"no kind of layer stands for {name}: {NO_KIND[name]}")
        if name in KINDS:
            return KINDS[name]
        own = [method for method in _HOLDINGS if method in vars(owner)]
        if own and any(other.__name__ in KINDS for other in owner.__mro__):
            raise spec.unsupported(f"{name} has a {own[0]} of its own, so what a request keeps is not known")
    known = ", ".join((*KINDS, WRAPPER))
    raise spec.unsupported(f"spec class {spec.class_name} is not known; known are {known} and classes derived of them")


def check_fields(spec: Spec) -> None:
    """Raises `NotSupported` for a field of an unknown meaning that says anything but its default."""
    for name, value, default in _fields(spec.value):
        if name.startswith("_") or name in _KNOWN_FIELDS:
            continue
        if value is not default and value != default:
            detail = f"{spec.class_name}.{name} is {shorten(repr(value))}; what it does to the pages is not known"
            raise spec.unsupported(detail, name)


def _fields(value: Any) -> list[tuple[str, Any, Any]]:
    """Name, value and default of each field."""
    if dataclasses.is_dataclass(value):
        return [(field.name, getattr(value, field.name), _default(field)) for field in dataclasses.fields(value)]
    return [(name, held, getattr(type(value), name, ...)) for name, held in getattr(value, "__dict__", {}).items()]


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def dtype_name(spec: Spec, dtype: Any, field: str) -> str:
    """Name of a torch dtype, or of a text that names one. torch is not imported."""
    name = str(dtype).removeprefix("torch.")
    if name not in ITEM_SIZE_BYTES:
        raise spec.unsupported(f"{field} {shorten(name)!r} is no dtype that a cache is planned in", field)
    return name
