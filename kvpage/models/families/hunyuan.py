"""Hunyuan, whose layers may share the keys and values of the one before them (cross-layer attention).

vLLM 0.24.0, hunyuan_v1.py. There layers that share give up their cache too, but its engine plans no such model.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvpage.models.config import MAX_MODEL_LAYERS, Config
from kvpage.models.families.dense import RELEASE, SELF_ATTENTION, SIZES
from kvpage.models.reading import Family, ModelLayer, Reading, head_width


def read(reading: Reading) -> Iterator[ModelLayer]:
    config, heads = reading.config, reading.check_query_heads()
    kv_heads = config.optional_size("num_key_value_heads") or heads
    mine, width = reading.kv_heads(config, "num_key_value_heads", kv_heads), _width(reading, heads)
    sharing = _sharing(config)
    for index in range(reading.num_layers()):
        owner = index - index % sharing
        shares = None if owner == index else reading.name(owner, SELF_ATTENTION)
        yield reading.attention(index, SELF_ATTENTION, num_kv_heads=mine, head_size=width, shares=shares)


def _width(reading: Reading, heads: int) -> int:
    older = reading.config.has("attention_head_dim") and not reading.config.has("head_dim")
    return reading.config.size("attention_head_dim") if older else head_width(reading, heads)


def _sharing(config: Config) -> int:
    """Layers that use one cache."""
    return config.size("cla_share_factor", limit=MAX_MODEL_LAYERS) if config.flag("use_cla") else 1


def _published(name: str) -> Family:
    defaults = dict(zip(SIZES, (4096, 32, 32, None, 2048), strict=True))
    return Family(read=read, defaults=defaults, defaults_of=f"{name}, {RELEASE}")


FAMILIES: dict[str, Family] = {
    "hunyuan": Family(read=read),
    "hunyuan_v1_dense": _published("HunYuanDenseV1Config"),
    "hunyuan_v1_moe": _published("HunYuanMoEV1Config"),
}
