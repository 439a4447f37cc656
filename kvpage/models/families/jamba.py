"""Jamba: Mamba-1 mixers, with attention in every eighth layer. vLLM 0.24.0, jamba.py."""

from __future__ import annotations

from collections.abc import Iterator

from kvpage.models.config import MAX_MODEL_LAYERS
from kvpage.models.families.dense import RELEASE
from kvpage.models.reading import Family, ModelLayer, Reading, head_width
from kvpage.models.states import mamba1


def read(reading: Reading) -> Iterator[ModelLayer]:
    config = reading.config
    heads = reading.check_query_heads()
    kv_heads = reading.kv_heads(config, "num_key_value_heads", config.size("num_key_value_heads"))
    period = config.size("attn_layer_period", limit=MAX_MODEL_LAYERS)
    offset = config.optional_size("attn_layer_offset", limit=period - 1, least=0) or 0
    channels = config.size("mamba_expand") * config.size("hidden_size")
    kernel, state_size = config.size("mamba_d_conv"), config.size("mamba_d_state")
    if kernel < 2:
        raise config.fault("mamba_d_conv", "a convolution of 1 step keeps no state; at least 2 are expected")
    shapes = mamba1(reading, channels=channels, state_size=state_size, kernel=kernel, field="hidden_size")
    for index in range(reading.num_layers()):
        if index % period == offset:
            width = head_width(reading, heads)
            yield reading.attention(index, "attn", num_kv_heads=kv_heads, head_size=width)
        else:
            yield reading.state(index, "mixer", shapes, (reading.dtype, reading.ssm_dtype(None)))


_DEFAULTS = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 262144,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}

FAMILIES: dict[str, Family] = {"jamba": Family(read=read, defaults=_DEFAULTS, defaults_of=f"JambaConfig, {RELEASE}")}
