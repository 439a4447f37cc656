"""MiMo V2: windows and full layers with heads of their own, V narrower than K. vLLM 0.24.0, mimo_v2.py.

`attention_chunk_size` stands in published configs but is not used by the model; vLLM drops it too.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvpage.models.config import MAX_TOKENS, Config
from kvpage.models.families.dense import SELF_ATTENTION
from kvpage.models.mtp import named_mtp
from kvpage.models.patterns import LAYER_TYPES
from kvpage.models.reading import Family, ModelLayer, Mtp, Reading


def read(reading: Reading) -> Iterator[ModelLayer]:
    for index, has_window in enumerate(_windowed(reading.config, reading.num_layers())):
        yield _layer(reading, index, "swa_" if has_window else "", _window(reading.config) if has_window else None)


def read_mtp(reading: Reading, count: int) -> Iterator[ModelLayer]:
    """The sizes of a layer with a window; the window itself only by its older name."""
    config = reading.config
    window = config.size("sliding_window_size", limit=MAX_TOKENS) if config.has("sliding_window_size") else None
    yield from (_layer(named_mtp(reading, "model.mtp.layers"), index, "swa_", window) for index in range(count))


def _layer(reading: Reading, index: int, prefix: str, window: int | None) -> ModelLayer:
    config, heads_field = reading.config, f"{prefix}num_key_value_heads"
    reading.check_query_heads(f"{prefix}num_attention_heads")
    return reading.attention(
        index,
        SELF_ATTENTION,
        num_kv_heads=reading.kv_heads(config, heads_field, config.size(heads_field)),
        head_size=config.size(f"{prefix}head_dim"),
        head_size_v=config.optional_size(f"{prefix}v_head_dim"),
        window=window,
    )


def _windowed(config: Config, num_layers: int) -> list[bool]:
    pattern = config.items("hybrid_layer_pattern", num_layers)
    if pattern is not None:
        return [config.checked_size("hybrid_layer_pattern", flag, limit=1, least=0) == 1 for flag in pattern]
    types = config.choices("layer_types", LAYER_TYPES, num_layers)
    if types is None:
        raise config.missing("hybrid_layer_pattern")
    return [kind == "sliding" for kind in types]


def _window(config: Config) -> int:
    field = "sliding_window_size" if config.has("sliding_window_size") else "sliding_window"
    return config.size(field, limit=MAX_TOKENS)


_V2 = Family(read=read, mtp=Mtp(read=read_mtp, fixed=1, inside=True))
FAMILIES: dict[str, Family] = {"mimo_v2_flash": _V2, "mimo_v2": _V2}
