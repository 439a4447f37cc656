"""What a model of transformers keeps, as the layers of a plan request, and which of its layers keeps which.

Sizes are those that `kvpage.models` reads from the model's own config. Two things differ from an engine's: the dtype is
the one that the model runs in, and recurrent states have the shapes and dtypes of transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from kvpage.errors import NotSupported, SpecInvalid
from kvpage.models import ModelLayers, read_model
from kvpage.models.options import OPTION_NAMES
from kvpage.request_model import said_by

Fields = dict[str, Any]

_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")
_STATE = ("linear_attention", "conv", "mamba")
_BOTH = ("hybrid", "hybrid_sliding")
_DUMMY = "dummy"
_DELTA_NET = "linear_attn"
"""How the layers of gated delta nets are named: their state is transposed in vLLM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedLayer:
    """What one layer of a model keeps: layers of the plan by name."""

    attention: str | None = None
    window: int | None = None
    """Tokens that attention sees, the one computed included; None: all. For chunks of so many tokens too, which
    transformers keeps in the same way."""
    state: str | None = None


def plan_request(model: PreTrainedModel, *, strategy: str = "auto", **fields: Any) -> Fields:
    """A plan request for the caches of `model`. `fields`: options of `read_model` (block_size, backend, tp, …) and
    fields of the request (memory_bytes or num_blocks, max_model_len, …).

    Raises as `read_model`, and `NotSupported` for layers that `KvpageCache` cannot keep.
    """
    options = {name: fields.pop(name) for name in list(fields) if name in OPTION_NAMES}
    config = model.config.get_text_config(decoder=True)
    layers = kept_layers(config, dtype_name(model), **options)
    cached_layers(config, layers.layers)
    rest = {"strategy": strategy, "allocator": "slabs"} | fields
    if layers.is_hybrid:  # a pool keeps prefixes of states only where it knows how many a request has
        rest.setdefault("max_model_len", layers.max_model_len)
    return rest | said_by(layers, rest)


def dtype_name(model: PreTrainedModel) -> str:
    return str(model.dtype).removeprefix("torch.")


def kept_layers(config: PretrainedConfig, dtype: str, **options: Any) -> ModelLayers:
    """As `read_model`, in the model's dtype and with the states of transformers."""
    values = config.to_dict() | {"dtype": dtype}
    read = read_model(values, **{"kv_dtype": dtype} | options)
    kept = (_as_kept_state(layer, dtype) if layer["kind"] == "mamba" else layer for layer in read.layers)
    return replace(read, layers=tuple(kept))


def _as_kept_state(layer: Fields, dtype: str) -> Fields:
    """A convolution keeps one input more than it looks back to, time innermost; a state is kept in float32."""
    (rows, channels), *rest = layer["shapes"]
    if layer["name"].endswith(_DELTA_NET):
        rest = [[heads, k_width, v_width] for heads, v_width, k_width in rest]
    dtypes = [dtype] + ["float32"] * len(rest)
    return layer | {"shapes": [[channels, rows + 1], *rest], "dtypes": dtypes}


def cached_layers(config: PretrainedConfig, layers: Sequence[Fields]) -> list[CachedLayer]:
    """For each layer of the model what it keeps: `layers` of the request are in the model's order.

    Raises `NotSupported` for a kind of layer that is not known, `SpecInvalid` where model and request disagree.
    """
    types, kwargs = get_layer_types_and_kwargs(config)
    left = iter(layers)
    found = [_cached(kind, more, left) for kind, more in zip(types, kwargs, strict=True)]
    if surplus := [layer["name"] for layer in left if "kv_sharing_target" not in layer]:
        raise SpecInvalid(f"the request has layers that the model does not: {', '.join(surplus[:4])}")
    return found


def _cached(kind: str, more: Fields, left: Iterator[Fields]) -> CachedLayer:
    if more.get("number_of_states", 1) != 1:
        raise NotSupported(
            f"a layer of kind {kind!r} keeps {more['number_of_states']} states of a kind; 1 is kept here"
        )
    if kind == _DUMMY:
        return CachedLayer()
    if kind not in (*_ATTENTION, *_STATE, *_BOTH):
        known = ", ".join((*_ATTENTION, *_STATE, *_BOTH))
        raise NotSupported(f"a layer of kind {kind!r} cannot be kept in blocks; known are {known}")
    attention = state = None
    if kind not in _STATE:
        attention = _next(kind, left, is_state=False)
    if kind not in _ATTENTION:
        state = _next(kind, left, is_state=True)
    return CachedLayer(attention=attention, window=more.get("sliding_window"), state=state)


def _next(kind: str, left: Iterator[Fields], *, is_state: bool) -> str:
    """The next layer of the request that has a cache of its own."""
    layer = next((layer for layer in left if "kv_sharing_target" not in layer), None)
    if layer is None or (layer["kind"] == "mamba") != is_state:
        what = "no layer" if layer is None else f"{layer['name']!r} of kind {layer['kind']}"
        raise SpecInvalid(f"the model has a layer of kind {kind!r} where the request has {what}")
    return str(layer["name"])
