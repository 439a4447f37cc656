"""Llama 4: layers with rotary positions see their own chunk only. vLLM 0.24.0, llama4.py."""

from __future__ import annotations

from collections.abc import Iterator

from kvpage.models.config import MAX_MODEL_LAYERS, MAX_TOKENS, Config
from kvpage.models.families.dense import RELEASE, SELF_ATTENTION
from kvpage.models.patterns import LAYER_TYPES
from kvpage.models.reading import Family, ModelLayer, Reading


def read(reading: Reading) -> Iterator[ModelLayer]:
    config = reading.config
    reading.check_query_heads()
    kv_heads = reading.kv_heads(config, "num_key_value_heads", config.size("num_key_value_heads"))
    chunk = config.optional_size("attention_chunk_size", limit=MAX_TOKENS)
    for index, is_full in enumerate(_full_layers(config, reading.num_layers())):
        yield reading.attention(
            index,
            SELF_ATTENTION,
            num_kv_heads=kv_heads,
            head_size=config.size("head_dim"),
            chunk=None if is_full else chunk,
        )


def _full_layers(config: Config, num_layers: int) -> list[bool]:
    """Layers without rotary positions: 0 in `no_rope_layers`, else by `layer_types`, else every so many layers."""
    if config.values.get("no_rope_layers") not in (None, [], ()):
        rope = config.items("no_rope_layers", num_layers) or ()
        return [config.checked_size("no_rope_layers", flag, limit=1, least=0) == 0 for flag in rope]
    types = config.choices("layer_types", LAYER_TYPES, num_layers)
    if types is not None:
        return [kind == "full" for kind in types]
    interval = config.size("no_rope_layer_interval", limit=MAX_MODEL_LAYERS)
    return [(index + 1) % interval == 0 for index in range(num_layers)]


_DEFAULTS = {
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "no_rope_layer_interval": 4,
    "attention_chunk_size": 8192,
}

FAMILIES: dict[str, Family] = {
    "llama4_text": Family(read=read, defaults=_DEFAULTS, defaults_of=f"Llama4TextConfig, {RELEASE}"),
}
