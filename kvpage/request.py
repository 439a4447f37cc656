"""The plan request: the one validator for HTTP, library and command line.

Scalars are strict (`true`, `"8"` and `8.0` are not the integer 8), containers are lax, unknown keys are refused.
Every fault becomes a `SpecInvalid` with JSON pointers into the request as it was sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from kvpage.backends import (
    AttentionLayout,
    Backend,
    KernelBlockSizes,
    KVCacheLayout,
    backend_named,
    default_backend,
    parse_extent,
)
from kvpage.dtypes import item_size_bytes
from kvpage.errors import FieldError, NotSupported, SpecInvalid, shorten
from kvpage.layers import BackendLayout, Layer, check_page_fits_layout
from kvpage.pointers import located
from kvpage.specs import (
    MAX_BYTES,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    LayerSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

MAX_LAYERS = 4096
MAX_NAME_BYTES = 256
MAX_RANK = 8  # axes of a written-out layout or a state tensor
DEFAULT_BLOCK_SIZE = 16  # vLLM's on CUDA
DEFAULT_NUM_BATCHED_TOKENS = 8192  # vLLM's on large GPUs

Size = Annotated[StrictInt, Field(ge=1, le=MAX_BYTES)]
Count = Annotated[StrictInt, Field(ge=0, le=MAX_BYTES)]


def _json_type(value: object) -> str:
    if isinstance(value, Mapping | BaseModel):
        return "object"
    return "string" if isinstance(value, str) else "number"


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


Axis = Annotated[
    Annotated[Size, Tag("number")] | Annotated[StrictStr, Field(max_length=MAX_NAME_BYTES), Tag("string")],
    Discriminator(_json_type),
]


class WrittenBackend(_Model):
    """A backend written out: logical shape by axis names, and its stride orders."""

    shape: Annotated[tuple[Axis, ...], Field(min_length=2, max_length=MAX_RANK)]
    stride_order: tuple[Count, ...] | None = None
    layered_stride_order: tuple[Count, ...] | None = None

    @model_validator(mode="after")
    def _layout_is_valid(self) -> Self:
        self.layout()
        return self

    def layout(self) -> AttentionLayout:
        extents = tuple(parse_extent(axis) for axis in self.shape)
        return AttentionLayout(extents, self.stride_order, self.layered_stride_order)


class KernelMultiple(_Model):
    """Every multiple of so many tokens is a block that the kernels accept."""

    multiple_of: Size


KernelBlockSize = Annotated[
    Annotated[Size, Tag("number")] | Annotated[KernelMultiple, Tag("object")], Discriminator(_json_type)
]
AnyBackend = Annotated[
    Annotated[StrictStr, Tag("string")] | Annotated[WrittenBackend, Tag("object")], Discriminator(_json_type)
]


class _LayerBase(_Model):
    name: StrictStr
    count: Annotated[StrictInt, Field(ge=1, le=MAX_LAYERS)] = 1
    block_size: Size = DEFAULT_BLOCK_SIZE
    page_size_padded: Size | None = None
    draft: StrictBool = False

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

    def spec(self) -> LayerSpec | None:
        raise NotImplementedError

    def backend_layout(self, kv_cache_layout: KVCacheLayout) -> BackendLayout | None:
        return None

    def resolve(self, position: int, kv_cache_layout: KVCacheLayout) -> tuple[LayerSpec | None, BackendLayout | None]:
        """Spec and layout that fit each other. Raises `SpecInvalid` or `LayoutUnsupported` at the entry."""
        spec, field = self.spec(), ""
        try:
            if spec is not None:
                spec.check()
            field = "/backend"
            backend = self.backend_layout(kv_cache_layout)
            if spec is not None and backend is not None:
                check_page_fits_layout(spec, backend)
                spec = replace(spec, indexes_kv_by_block_stride=backend.layout.indexes_kv_by_block_stride)
        except SpecInvalid as error:
            pointer = f"/layers/{position}{field}"
            raise type(error)(f"{pointer}: {error.message}", errors=[FieldError(pointer, error.message)]) from None
        return spec, backend

    def but_for_name(self) -> tuple[object, ...]:
        """Equal for entries that differ in name and count only."""
        return (type(self), *(value for field, value in self.__dict__.items() if field not in ("name", "count")))

    def names(self) -> Iterator[str]:
        """The names of the layers this entry stands for."""
        if self.count == 1:
            yield self.name
            return
        for index in range(self.count):
            yield _checked_name(self.name.replace("{i}", str(index)))


def _checked_name(name: str) -> str:
    try:
        length = len(name.encode())
    except UnicodeEncodeError:
        raise SpecInvalid("name is not encodable as UTF-8 (a lone surrogate)") from None
    if not 1 <= length <= MAX_NAME_BYTES:
        raise SpecInvalid(f"name is {length} bytes long; 1 to {MAX_NAME_BYTES} are allowed")
    return name


class _AttentionBase(_LayerBase):
    num_kv_heads: Size = 1
    head_size: Size
    dtype: StrictStr
    kv_quant: Literal["int8_per_token_head", "fp8_per_token_head", "nvfp4"] | None = None
    backend: AnyBackend | None = None
    kernel_block_sizes: Annotated[tuple[KernelBlockSize, ...], Field(min_length=1, max_length=64)] | None = None
    kv_sharing_target: StrictStr | None = None

    @field_validator("dtype")
    @classmethod
    def _dtype_is_known(cls, dtype: str) -> str:
        item_size_bytes(dtype)
        return dtype

    @field_validator("backend")
    @classmethod
    def _backend_is_known(cls, backend: str | WrittenBackend | None) -> str | WrittenBackend | None:
        if isinstance(backend, str):
            backend_named(backend)
        return backend

    @field_validator("kernel_block_sizes")
    @classmethod
    def _one_multiple(cls, sizes: tuple[int | KernelMultiple, ...] | None) -> tuple[int | KernelMultiple, ...] | None:
        multiples = sum(isinstance(size, KernelMultiple) for size in sizes or ())
        if multiples > 1:
            raise SpecInvalid(f"kernel_block_sizes has {multiples} entries with multiple_of; one is allowed")
        return sizes

    @field_validator("kv_sharing_target")
    @classmethod
    def _sharing_is_not_built(cls, target: str | None) -> str | None:
        if target is not None:
            raise NotSupported(
                "kv_sharing_target is not supported yet; leave the layer out, its owner's cache is planned"
            )
        return target

    def check_fields(self) -> None:
        if self.kv_quant is not None and item_size_bytes(self.dtype) != 1:
            raise SpecInvalid(
                f"kv_quant {self.kv_quant} stores bytes; dtype must be of 1 byte (int8, uint8, float8_…), not {self.dtype}"
            )
        if self.kv_quant == "nvfp4" and any(width % 16 for width in self.widths()):
            raise SpecInvalid(
                f"nvfp4 keeps one scale for 16 values; head sizes {self.widths()} are not multiples of 16"
            )

    def widths(self) -> tuple[int, ...]:
        """Elements of the K row, and of the V row where there is one."""
        return (self.head_size,)

    def backend_layout(self, kv_cache_layout: KVCacheLayout) -> BackendLayout:
        if isinstance(self.backend, WrittenBackend):
            name, layout, kernel = "custom", self.backend.layout(), KernelBlockSizes()
        else:
            registered = self._default_backend() if self.backend is None else backend_named(self.backend)
            name, kernel = registered.name, registered.kernel_block_sizes
            layout = registered.layout(kv_cache_layout, self.kv_quant)
        if self.kernel_block_sizes is not None:
            kernel = _kernel_block_sizes(self.kernel_block_sizes)
        return BackendLayout(name=name, layout=layout, kernel_block_sizes=kernel)

    def _default_backend(self) -> Backend:
        kind: str = self.kind  # type: ignore[attr-defined]  # each subclass has its own Literal
        return default_backend(kind, same_widths=len(set(self.widths())) == 1, kv_quant=self.kv_quant)


def _kernel_block_sizes(sizes: tuple[int | KernelMultiple, ...]) -> KernelBlockSizes:
    return KernelBlockSizes(
        listed=tuple(size for size in sizes if isinstance(size, int)),
        multiple_of=next((size.multiple_of for size in sizes if isinstance(size, KernelMultiple)), None),
    )


class _KeyValueBase(_AttentionBase):
    num_kv_heads: Size
    head_size_v: Size | None = None

    def widths(self) -> tuple[int, ...]:
        return (self.head_size, self.head_size_v or self.head_size)

    def _sizes(self) -> dict[str, Any]:
        return {
            "block_size": self.block_size,
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

    def spec(self) -> FullAttentionSpec:
        return FullAttentionSpec(
            **self._sizes(), sliding_window=self.sliding_window, attention_chunk_size=self.attention_chunk_size
        )


class SlidingWindowLayer(_KeyValueBase):
    kind: Literal["sliding_window"]
    sliding_window: Size

    def spec(self) -> SlidingWindowSpec:
        return SlidingWindowSpec(**self._sizes(), sliding_window=self.sliding_window)


class ChunkedLocalAttentionLayer(_KeyValueBase):
    kind: Literal["chunked_local_attention"]
    attention_chunk_size: Size

    def spec(self) -> ChunkedLocalAttentionSpec:
        return ChunkedLocalAttentionSpec(**self._sizes(), attention_chunk_size=self.attention_chunk_size)


class MLAAttentionLayer(_AttentionBase):
    kind: Literal["mla_attention"]
    page_alignment_bytes: Size | None = None

    def spec(self) -> MLAAttentionSpec:
        return MLAAttentionSpec(
            block_size=self.block_size,
            page_size_padded=self.page_size_padded,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            dtype=self.dtype,
            kv_quant=self.kv_quant,
            page_alignment_bytes=self.page_alignment_bytes,
        )


StateShape = Annotated[tuple[Size, ...], Field(max_length=MAX_RANK)]


class MambaLayer(_LayerBase):
    """Any recurrent state: its tensors lie one after the other in a page."""

    kind: Literal["mamba"]
    shapes: Annotated[tuple[StateShape, ...], Field(min_length=1, max_length=64)]
    dtypes: Annotated[tuple[StrictStr, ...], Field(min_length=1, max_length=64)]
    num_speculative_blocks: Annotated[StrictInt, Field(ge=0, le=1024)] = 0

    @field_validator("dtypes")
    @classmethod
    def _dtypes_are_known(cls, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        for dtype in dtypes:
            item_size_bytes(dtype)
        return dtypes

    def check_fields(self) -> None:
        if len(self.shapes) != len(self.dtypes):
            raise SpecInvalid(
                f"shapes has {len(self.shapes)} entries, dtypes {len(self.dtypes)}; give one dtype per state"
            )

    def spec(self) -> MambaSpec:
        return MambaSpec(
            block_size=self.block_size,
            page_size_padded=self.page_size_padded,
            shapes=self.shapes,
            dtypes=self.dtypes,
            num_speculative_blocks=self.num_speculative_blocks,
        )


class EncoderOnlyAttentionLayer(_AttentionBase):
    """Attention over the prompt only: keeps no cache."""

    kind: Literal["encoder_only_attention"]
    head_size: Size = 1
    head_size_v: Size | None = None
    dtype: StrictStr = "bfloat16"

    def spec(self) -> None:
        return None

    def backend_layout(self, kv_cache_layout: KVCacheLayout) -> None:
        return None


AnyLayer = Annotated[
    FullAttentionLayer
    | SlidingWindowLayer
    | ChunkedLocalAttentionLayer
    | MLAAttentionLayer
    | MambaLayer
    | EncoderOnlyAttentionLayer,
    Discriminator("kind"),
]
_UNBUILT_KINDS = ("cross_attention", "sliding_window_mla")
_UNBUILT_FIELDS = (
    "ranks",
    "workload",
    "max_groups",
    "max_block_size",
    "max_block_lcm",
    "max_block_stride_bytes",
)


class PlanRequest(_Model):
    """Body of `POST /v1/plans`, argument of `kvpage.plan()`, file of `kvpage plan`."""

    layers: tuple[AnyLayer, ...]
    strategy: Literal["unify", "scale_then_pad", "slab", "nested", "auto"]
    kv_cache_layout: KVCacheLayout = "NHD"
    align_hybrid: StrictBool = False
    allocator: Literal["flat", "slabs"] = "flat"
    layered: StrictBool = False
    memory_bytes: Size | None = None
    num_blocks: Size | None = None
    max_model_len: Size | None = None
    max_num_batched_tokens: Size = DEFAULT_NUM_BATCHED_TOKENS
    ranks: Any = None
    workload: Any = None
    max_groups: Any = None
    max_block_size: Any = None
    max_block_lcm: Any = None
    max_block_stride_bytes: Any = None

    @classmethod
    def parse(cls, request: object) -> Self:
        """Validate `request`. Raises `SpecInvalid` (or a child) whose `errors` point into it."""
        if isinstance(request, cls):
            return request
        try:
            return cls.model_validate(request)
        except ValidationError as error:
            raise located(error, request) from None

    @field_validator("layers", mode="before")
    @classmethod
    def _kinds_are_built(cls, layers: object) -> object:
        for index, layer in enumerate(layers if isinstance(layers, list | tuple) else ()):
            kind = layer.get("kind") if isinstance(layer, Mapping) else None
            if kind in _UNBUILT_KINDS:
                message = f"kind {kind!r} is not supported yet"
                raise NotSupported(message, errors=[FieldError(f"/layers/{index}/kind", message)])
        return layers

    @field_validator("layers")
    @classmethod
    def _layers_are_few(cls, layers: tuple[_LayerBase, ...]) -> tuple[_LayerBase, ...]:
        total = sum(layer.count for layer in layers)  # before anything is expanded
        if total > MAX_LAYERS:
            raise SpecInvalid(f"the counts of all layers add up to {total}; at most {MAX_LAYERS} layers are planned")
        return layers

    @field_validator(*_UNBUILT_FIELDS)
    @classmethod
    def _field_is_built(cls, value: object) -> object:
        if value is not None:
            raise NotSupported("this field is not supported yet; leave it out")
        return value

    @field_validator("strategy", "allocator", "layered")
    @classmethod
    def _value_is_built(cls, value: object) -> object:
        if value not in ("unify", "flat", False):
            raise NotSupported(f"{value!r} is not supported yet; use strategy unify, allocator flat, layered false")
        return value

    @model_validator(mode="after")
    def _memory_is_given_once(self) -> Self:
        if (self.memory_bytes is None) == (self.num_blocks is None):
            given = "neither" if self.memory_bytes is None else "both"
            raise SpecInvalid(f"give memory_bytes or num_blocks, one of the two; the request has {given}")
        return self

    def expand(self) -> tuple[Layer, ...]:
        """Every layer by name, in order. Raises `SpecInvalid` for a name used twice."""
        layers: dict[str, Layer] = {}
        resolved: dict[tuple[object, ...], tuple[LayerSpec | None, BackendLayout | None]] = {}
        for position, entry in enumerate(self.layers):
            # Models repeat a few layers many times: each distinct one is resolved, and later judged, once.
            alike = entry.but_for_name()
            if alike not in resolved:
                resolved[alike] = entry.resolve(position, self.kv_cache_layout)
            spec, backend = resolved[alike]
            kind: str = entry.kind
            for name in entry.names():
                layer = Layer(name=name, kind=kind, spec=spec, backend=backend, draft=entry.draft, position=position)
                if layers.setdefault(name, layer) is not layer:
                    detail = f"layer name {shorten(name)!r} is used twice; names must differ"
                    raise SpecInvalid(detail, errors=[layer.fault(detail, "name")])
        return tuple(layers.values())
