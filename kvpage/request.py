"""The plan request: the one validator for HTTP, library and command line.

Every fault becomes a `SpecInvalid` with JSON pointers into the request as it was sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Self

from pydantic import StrictBool, ValidationError, field_validator, model_validator

from kvpage.backends import KVCacheLayout
from kvpage.errors import FieldError, SpecInvalid, shorten
from kvpage.layers import BackendLayout, Layer
from kvpage.pointers import located
from kvpage.request_backends import Size
from kvpage.request_kinds import AnyLayer
from kvpage.request_layers import LayerEntry
from kvpage.request_model import with_model_layers
from kvpage.request_ranks import Ranks, refuse_ranks
from kvpage.request_search import SearchFields
from kvpage.request_shape import MAX_LAYERS, check_shape
from kvpage.specs import LayerSpec, Lengths

DEFAULT_NUM_BATCHED_TOKENS = 8192  # vLLM's on large GPUs


class PlanRequest(SearchFields):
    """Body of `POST /v1/plans`, argument of `kvpage.plan()`, file of `kvpage plan`."""

    layers: tuple[AnyLayer, ...]
    strategy: Literal["unify", "scale_then_pad", "slab", "nested", "auto"]
    kv_cache_layout: KVCacheLayout | None = None
    align_hybrid: StrictBool = False
    allocator: Literal["flat", "slabs"] | None = None
    """Who hands blocks out: `flat`, an engine's own, one block a slab; `slabs`, kvpage's. Left out: flat, but for
    strategy nested, which needs slabs."""
    layered: StrictBool = False
    memory_bytes: Size | None = None
    num_blocks: Size | None = None
    max_model_len: Size | None = None
    max_num_batched_tokens: Size = DEFAULT_NUM_BATCHED_TOKENS
    max_num_encoder_input_tokens: Size | None = None
    ranks: Ranks | None = None

    @classmethod
    def parse(cls, request: object) -> Self:
        """Validate `request`. Raises `SpecInvalid` (or a child) whose `errors` point into it."""
        request = with_model_layers(request)
        check_shape(request)
        try:
            return cls.model_validate(request)
        except ValidationError as error:
            raise located(error, request) from None

    @field_validator("layers")
    @classmethod
    def _layers_are_few(cls, layers: tuple[LayerEntry, ...]) -> tuple[LayerEntry, ...]:
        total = sum(layer.count for layer in layers)  # before anything is expanded
        if total > MAX_LAYERS:
            raise SpecInvalid(f"the counts of all layers add up to {total}; at most {MAX_LAYERS} layers are planned")
        return layers

    @field_validator("ranks", mode="before")
    @classmethod
    def _is_of_one_rank(cls, ranks: object) -> None:
        refuse_ranks(ranks)

    @model_validator(mode="after")
    def _allocator_suits_the_strategy(self) -> Self:
        if self.strategy == "nested" and self.allocator == "flat":
            raise SpecInvalid(
                "strategy nested cuts a slab into several blocks, which allocator flat does not know; use allocator "
                "slabs, or strategy slab or auto"
            )
        if self.layered and self.strategy not in ("unify", "auto"):
            raise SpecInvalid(
                f"layered asks for one buffer of layers alike, where strategy {self.strategy} finds nothing to do; use "
                f"strategy unify"
            )
        return self

    @model_validator(mode="after")
    def _memory_is_given_once(self) -> Self:
        if (self.memory_bytes is None) == (self.num_blocks is None):
            given = "neither" if self.memory_bytes is None else "both"
            raise SpecInvalid(f"give memory_bytes or num_blocks, one of the two; the request has {given}")
        return self

    @model_validator(mode="after")
    def _encoder_length_is_given(self) -> Self:
        if self.max_num_encoder_input_tokens is None and any(layer.kind == "cross_attention" for layer in self.layers):
            raise SpecInvalid("cross_attention layers need max_num_encoder_input_tokens, the most an encoder puts out")
        return self

    def lengths(self) -> Lengths:
        """What decides a request's blocks; without a `max_model_len` that is 1 here."""
        return Lengths(
            max_model_len=self.max_model_len or 1,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_encoder_input_tokens=self.max_num_encoder_input_tokens or 0,
        )

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
            for name in _names(entry, position):
                layer = Layer(
                    name=name,
                    kind=kind,
                    spec=spec,
                    backend=backend,
                    draft=entry.draft,
                    position=position,
                    kv_sharing_target=entry.kv_sharing_target,
                )
                if layers.setdefault(name, layer) is not layer:
                    detail = f"layer name {shorten(name)!r} is used twice; names must differ"
                    raise SpecInvalid(detail, errors=[layer.fault(detail, "name")])
        for layer in layers.values():
            _check_sharing(layer, layers)
        return tuple(layers.values())


def _names(entry: LayerEntry, position: int) -> list[str]:
    try:
        return list(entry.names())
    except SpecInvalid as error:  # a name that is too long once the number is in it
        raise SpecInvalid(error.message, errors=[FieldError(f"/layers/{position}/name", error.message)]) from None


def _check_sharing(layer: Layer, layers: Mapping[str, Layer]) -> None:
    """Raises `SpecInvalid` unless the layer's target has a cache of its own that is just like the layer's."""
    if layer.kv_sharing_target is None:
        return
    owner = layers.get(layer.kv_sharing_target)
    if owner is None or owner.kv_sharing_target is not None or owner.spec is None:
        why = "is no layer" if owner is None else "has no cache of its own"
        detail = f"kv_sharing_target {shorten(layer.kv_sharing_target)!r} of layer {layer.name!r} {why}"
    elif owner.spec != layer.spec or owner.backend != layer.backend:
        detail = f"layer {layer.name!r} differs from its kv_sharing_target {owner.name!r}; they must be alike"
    else:
        return
    raise SpecInvalid(detail, errors=[layer.fault(detail, "kv_sharing_target")])
