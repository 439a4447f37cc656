"""ChatGLM and GLM-4 as first published, with names of their own for the usual sizes. vLLM 0.24.0, chatglm.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvpage.models.reading import Family, ModelLayer, Reading


def read(reading: Reading) -> Iterator[ModelLayer]:
    config = reading.config
    heads = reading.check_query_heads()
    field = "multi_query_group_num" if config.flag("multi_query_attention") else "num_attention_heads"
    kv_heads, width = reading.kv_heads(config, field, config.size(field)), config.size("kv_channels")
    if config.size("hidden_size") != heads * width:
        raise config.fault("kv_channels", f"{heads} heads of {width} do not make the hidden size")
    named = replace(reading, layers_at="transformer.encoder.layers")
    for index in range(reading.num_layers()):
        yield named.attention(index, "self_attention.attn", num_kv_heads=kv_heads, head_size=width)


FAMILIES: dict[str, Family] = {"chatglm": Family(read=read)}
