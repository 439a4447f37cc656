"""The layers of a plan request, by kind: what may be written there, and what it means.

Scalars are strict (`true`, `"8"` and `8.0` are not the integer 8), containers are lax, unknown keys are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    field_validator,
    model_validator,
)

from kvpage.backends import (
    NAMED_LAYOUTS,
    Backend,
    KernelBlockSizes,
    KVCacheLayout,
    backend_named,
    default_backend,
    named_layout,
)
from kvpage.dtypes import item_size_bytes
from kvpage.errors import FieldError, LayoutUnsupported, SpecInvalid, shorten
from kvpage.layers import BackendLayout
from kvpage.request_backends import (
    AnyBackend,
    KernelBlockSize,
    KernelMultiple,
    RequestModel,
    Size,
    WrittenBackend,
    kernel_block_sizes,
)
from kvpage.rows import VALUES_PER_SCALE
from kvpage.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    LayerSpec,
    SlidingWindowSpec,
)

MAX_COUNT = 4096
MAX_NAME_BYTES = 256
DEFAULT_BLOCK_SIZE = 16  # vLLM's on CUDA


KVQuant = Literal["int8_per_token_head", "fp8_per_token_head", "int4", "nvfp4", "mxfp4", "fp8_ds_mla"]


class LayerEntry(RequestModel):
    name: StrictStr
    count: Annotated[StrictInt, Field(ge=1, le=MAX_COUNT)] = 1
    block_size: Size | None = None
    """Tokens of one block. Left out: the smallest the backend's kernels take, from 16 up."""
    page_size_padded: Size | None = None
    draft: StrictBool = False
    kv_sharing_target: StrictStr | None = None

    @field_validator("name")
    @classmethod
    def _name_is_short(cls, name: str) -> str:
        return _checked_name(name)

    @model_validator(mode="after")
    def _is_valid(self) -> Self:
        if self.count > 1 and "{i}" not in self.name:
            raise SpecInvalid(f"count is {self.count} but name {shorten(self.name)!r} has no {{i}} to tell them apart")
        self.check_fields()
        return self

    def check_fields(self) -> None:
        """Faults between fields that must be found before there can be a spec."""

    def spec(self, block_size: int) -> LayerSpec | None:
        """What the layer stores; None when it keeps no cache."""
        raise NotImplementedError

    def backend_layout(self, kv_cache_layout: KVCacheLayout | None) -> BackendLayout | None:
        return None

    def resolve(
        self, position: int, kv_cache_layout: KVCacheLayout | None
    ) -> tuple[LayerSpec | None, BackendLayout | None]:
        """Spec and layout of each layer of the entry. Raises `SpecInvalid` or `LayoutUnsupported` at the entry."""
        field = "/backend"
        try:
            backend = self.backend_layout(kv_cache_layout)
            field = ""
            spec = self.spec(self.block_size or _default_block_size(backend))
            if spec is not None:
                spec.check()
        except SpecInvalid as error:
            pointer = f"/layers/{position}{field}"
            raise type(error)(f"{pointer}: {error.message}", errors=[FieldError(pointer, error.message)]) from None
        if spec is not None and backend is not None:
            spec = replace(spec, indexes_kv_by_block_stride=backend.layout.indexes_kv_by_block_stride)
        return spec, backend

    def but_for_name(self) -> tuple[object, ...]:
        """Equal for entries that differ in name and count only."""
        return (type(self), *(value for field, value in self.__dict__.items() if field not in ("name", "count")))

    def names(self) -> Iterator[str]:
        """The names of the layers this entry stands for: `{i}` is the index, from 0."""
        if "{i}" not in self.name:
            yield self.name
            return
        for index in range(self.count):
            yield _checked_name(self.name.replace("{i}", str(index)))


def _default_block_size(backend: BackendLayout | None) -> int:
    return DEFAULT_BLOCK_SIZE if backend is None else backend.kernel_block_sizes.smallest_from(DEFAULT_BLOCK_SIZE)


def _checked_name(name: str) -> str:
    try:
        length = len(name.encode())
    except UnicodeEncodeError:
        raise SpecInvalid("name is not encodable as UTF-8 (a lone surrogate)") from None
    if not 1 <= length <= MAX_NAME_BYTES:
        raise SpecInvalid(f"name is {length} bytes long; 1 to {MAX_NAME_BYTES} are allowed")
    if not name.isprintable():
        raise SpecInvalid(f"name '{shorten(name)}' has characters that cannot be printed; leave them out")
    return name


class AttentionEntry(LayerEntry):
    num_kv_heads: Size = 1
    head_size: Size
    dtype: StrictStr
    kv_quant: KVQuant | None = None
    backend: AnyBackend | None = None
    kernel_block_sizes: (
        Annotated[tuple[KernelBlockSize, ...], Field(min_length=1, max_length=64, fail_fast=True)] | None
    ) = None
    index_bits: Literal[32, 64] = 64
    """32: the kernels compute block id times stride in 32-bit integers, so the pool must be small enough for them."""

    @field_validator("dtype")
    @classmethod
    def _dtype_is_known(cls, dtype: str) -> str:
        item_size_bytes(dtype)
        return dtype

    @field_validator("backend")
    @classmethod
    def _backend_is_known(cls, backend: str | WrittenBackend | None) -> str | WrittenBackend | None:
        if isinstance(backend, str) and backend not in NAMED_LAYOUTS:
            backend_named(backend)
        return backend

    @field_validator("kernel_block_sizes")
    @classmethod
    def _one_multiple(cls, sizes: tuple[int | KernelMultiple, ...] | None) -> tuple[int | KernelMultiple, ...] | None:
        multiples = sum(isinstance(size, KernelMultiple) for size in sizes or ())
        if multiples > 1:
            raise SpecInvalid(f"kernel_block_sizes has {multiples} entries with multiple_of; one is allowed")
        return sizes

    def check_fields(self) -> None:
        if self.kv_quant is None:
            return
        if item_size_bytes(self.dtype) != 1:
            raise SpecInvalid(
                f"kv_quant {self.kv_quant} stores bytes: dtype must be one of 1 byte (int8, uint8, float8_…), "
                f"not {self.dtype}"
            )
        values = max(2, VALUES_PER_SCALE.get(self.kv_quant, 1))  # two 4-bit values make a byte
        if self.kv_quant in VALUES_PER_SCALE and any(width % values for width in self.widths()):
            raise SpecInvalid(
                f"{self.kv_quant} stores {values} values together; head sizes {self.widths()} are no multiples"
            )

    def widths(self) -> tuple[int, ...]:
        """Elements of the K row, and of the V row where there is one."""
        return (self.head_size,)

    def backend_layout(self, kv_cache_layout: KVCacheLayout | None) -> BackendLayout:
        if isinstance(self.backend, WrittenBackend):
            found = BackendLayout(name="custom", layout=self.backend.layout(), kernel_block_sizes=KernelBlockSizes())
        elif self.backend in NAMED_LAYOUTS:
            layout = named_layout(self.backend, has_v=len(self.widths()) > 1)
            found = BackendLayout(
                name=self.backend, layout=layout, kernel_block_sizes=KernelBlockSizes(), is_named_layout=True
            )
        else:
            registered = self._default_backend() if self.backend is None else backend_named(self.backend)
            layout = registered.layout(self._data_order(kv_cache_layout), self.kv_quant)
            found = BackendLayout(name=registered.name, layout=layout, kernel_block_sizes=registered.kernel_block_sizes)
        if self.kernel_block_sizes is not None:
            found = replace(found, kernel_block_sizes=kernel_block_sizes(self.kernel_block_sizes))
        return found if self.index_bits == 64 else replace(found, index_bits=self.index_bits)

    def _data_order(self, kv_cache_layout: KVCacheLayout | None) -> KVCacheLayout:
        """NHD unless asked otherwise. nvfp4 pages can be carved into data and scales in HND only (vLLM PR 46329)."""
        if self.kv_quant != "nvfp4":
            return kv_cache_layout or "NHD"
        if kv_cache_layout == "NHD":
            raise LayoutUnsupported(
                "kv_quant nvfp4 needs kv_cache_layout HND: data and scales of a page cannot be told apart in NHD"
            )
        return "HND"

    def _default_backend(self) -> Backend:
        kind: str = self.kind  # type: ignore[attr-defined]  # each subclass has its own Literal
        return default_backend(kind, same_widths=len(set(self.widths())) == 1, kv_quant=self.kv_quant)


class _KeyValueBase(AttentionEntry):
    num_kv_heads: Size
    head_size_v: Size | None = None

    def check_fields(self) -> None:
        super().check_fields()
        if self.kv_quant == "fp8_ds_mla":
            raise SpecInvalid("fp8_ds_mla is a format of latent rows; use it with mla_attention or sliding_window_mla")

    def widths(self) -> tuple[int, ...]:
        return (self.head_size, self.head_size_v or self.head_size)

    def _sizes(self, block_size: int) -> dict[str, Any]:
        return {
            "block_size": block_size,
            "page_size_padded": self.page_size_padded,
            "num_kv_heads": self.num_kv_heads,
            "head_size": self.head_size,
            "head_size_v": self.head_size_v or self.head_size,
            "dtype": self.dtype,
            "kv_quant": self.kv_quant,
        }


class FullAttentionLayer(_KeyValueBase):
    kind: Literal["full_attention"]
    sliding_window: Size | None = None
    attention_chunk_size: Size | None = None

    def spec(self, block_size: int) -> FullAttentionSpec:
        return FullAttentionSpec(
            **self._sizes(block_size),
            sliding_window=self.sliding_window,
            attention_chunk_size=self.attention_chunk_size,
        )


class SlidingWindowLayer(_KeyValueBase):
    kind: Literal["sliding_window"]
    sliding_window: Size

    def spec(self, block_size: int) -> SlidingWindowSpec:
        return SlidingWindowSpec(**self._sizes(block_size), sliding_window=self.sliding_window)


class ChunkedLocalAttentionLayer(_KeyValueBase):
    kind: Literal["chunked_local_attention"]
    attention_chunk_size: Size

    def spec(self, block_size: int) -> ChunkedLocalAttentionSpec:
        return ChunkedLocalAttentionSpec(**self._sizes(block_size), attention_chunk_size=self.attention_chunk_size)


class CrossAttentionLayer(_KeyValueBase):
    """Keeps the encoder's output."""

    kind: Literal["cross_attention"]

    def spec(self, block_size: int) -> CrossAttentionSpec:
        return CrossAttentionSpec(**self._sizes(block_size))


class EncoderOnlyAttentionLayer(AttentionEntry):
    """Attention over the prompt only: keeps no cache."""

    kind: Literal["encoder_only_attention"]
    head_size: Size = 1
    head_size_v: Size | None = None
    dtype: StrictStr = "bfloat16"

    def spec(self, block_size: int) -> None:
        return None
