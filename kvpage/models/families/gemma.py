"""Gemma 3n and 4: the last layers read the cache of an earlier one; full layers of Gemma 4 have heads of their own.

vLLM 0.24.0, gemma3n.py and gemma4.py; transformers 5.24.0, Gemma3nTextConfig and Gemma4TextConfig.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvpage.models.config import MAX_MODEL_LAYERS, Config
from kvpage.models.families.dense import RELEASE, SELF_ATTENTION, window_of
from kvpage.models.patterns import LayerType, every, layer_types
from kvpage.models.per_layer import PER_LAYER, of_layer
from kvpage.models.reading import Family, ModelLayer, Reading, refuse


def read_3n(reading: Reading) -> Iterator[ModelLayer]:
    config = reading.config
    reading.check_query_heads()
    kv_heads = reading.kv_heads(config, "num_key_value_heads", config.size("num_key_value_heads"))
    types = layer_types(config, reading.num_layers(), every(5))
    for index, (kind, shares) in enumerate(zip(types, _shared(reading, types), strict=True)):
        yield reading.attention(
            index,
            SELF_ATTENTION,
            num_kv_heads=kv_heads,
            head_size=config.size("head_dim"),
            window=window_of(reading, kind),
            shares=shares,
        )


def read_4(reading: Reading) -> Iterator[ModelLayer]:
    config = reading.config
    if config.text("use_bidirectional_attention") == "all":
        raise refuse(config, "use_bidirectional_attention", "such a model reads a prompt at once and keeps no cache")
    reading.check_query_heads()
    types = (*layer_types(config, reading.num_layers(), every(6))[:-1], "full")  # the class makes the last one full
    for index, (kind, shares) in enumerate(zip(types, _shared(reading, types), strict=True)):
        own = of_layer(reading, index)
        heads, width = _fields(own.config, kind)
        yield own.attention(
            index,
            SELF_ATTENTION,
            num_kv_heads=own.kv_heads(own.config, heads, own.config.size(heads)),
            head_size=own.config.size(width),
            window=window_of(own, kind),
            shares=shares,
        )


def _fields(config: Config, kind: LayerType) -> tuple[str, str]:
    """What the KV heads and the width of a layer of type `kind` are called.

    transformers 5.24.0 saves them layer by layer, and then takes no notice of the fields of all full layers. Of those,
    only models that use K as V have another number of heads.
    """
    if kind != "full" or PER_LAYER in config.values:
        return "num_key_value_heads", "head_dim"
    has_heads = config.flag("attention_k_eq_v") and config.has("num_global_key_value_heads")
    return "num_global_key_value_heads" if has_heads else "num_key_value_heads", "global_head_dim"


def _shared(reading: Reading, types: Sequence[LayerType]) -> list[str | None]:
    """For each layer the name of the one whose cache it reads: the last of its type before the shared ones."""
    config = reading.config
    num_shared = config.optional_size("num_kv_shared_layers", limit=MAX_MODEL_LAYERS, least=0) or 0
    if num_shared >= len(types):
        raise config.fault("num_kv_shared_layers", f"{num_shared} of {len(types)} layers share; one must keep a cache")
    first = len(types) - num_shared
    owners = {kind: index for index, kind in enumerate(types[:first])}
    for kind in types[first:]:
        if kind not in owners:
            raise config.fault("num_kv_shared_layers", f"no {kind} layer before layer {first} keeps a cache to share")
    return [None] * first + [reading.name(owners[kind], SELF_ATTENTION) for kind in types[first:]]


_SIZES = {"num_attention_heads": 8, "head_dim": 256, "sliding_window": 512}
_GEMMA_3N = _SIZES | {
    "num_hidden_layers": 35,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "num_kv_shared_layers": 15,
}
_GEMMA_4 = _SIZES | {
    "num_hidden_layers": 30,
    "num_key_value_heads": 4,
    "global_head_dim": 512,
    "max_position_embeddings": 131072,
    "num_kv_shared_layers": 0,
}
_UNIFIED = _GEMMA_4 | {"sliding_window": 1024, "max_position_embeddings": 262144}

FAMILIES: dict[str, Family] = {
    "gemma3n_text": Family(read=read_3n, defaults=_GEMMA_3N, defaults_of=f"Gemma3nTextConfig, {RELEASE}"),
    "gemma4_text": Family(read=read_4, defaults=_GEMMA_4, defaults_of=f"Gemma4TextConfig, {RELEASE}", per_layer=True),
    "gemma4_unified_text": Family(
        read=read_4, defaults=_UNIFIED, defaults_of=f"Gemma4UnifiedTextConfig, {RELEASE}", per_layer=True
    ),
}
