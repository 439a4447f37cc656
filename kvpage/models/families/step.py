"""Step 3 (one KV head, kept by every rank) and Step 3.5 and 3.7 (windows, with heads of their own).

vLLM 0.24.0, step3_text.py and step3p5.py with their config classes.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvpage.models.config import MAX_MTP_LAYERS, Config
from kvpage.models.families.dense import SELF_ATTENTION, window_of
from kvpage.models.mtp import after_the_model
from kvpage.models.patterns import LAYER_TYPES, LayerType
from kvpage.models.reading import Family, ModelLayer, Mtp, Reading, head_width, refuse


def read_3(reading: Reading) -> Iterator[ModelLayer]:
    config = reading.config
    reading.check_query_heads()
    if config.size("num_attention_groups") != 1:
        raise refuse(config, "num_attention_groups", "Step 3 has one KV head")
    heads = reading.kv_heads(config, "num_attention_groups", 1)
    for index in range(reading.num_layers()):
        yield reading.attention(index, SELF_ATTENTION, num_kv_heads=heads, head_size=config.size("head_dim"))


def read_3p5(reading: Reading) -> Iterator[ModelLayer]:
    config = reading.config
    if config.text("att_impl_type") not in (None, "GQA"):
        raise refuse(config, "att_impl_type", "only GQA is known")
    for index, kind in enumerate(_types(config, reading.num_layers())):
        yield _layer(reading, index, SELF_ATTENTION, kind)


def read_3p5_mtp(reading: Reading, count: int) -> Iterator[ModelLayer]:
    """Of the types that follow those of the model's own layers."""
    types = _types(reading.config, reading.num_layers() + count)
    for index in after_the_model(reading, count):
        yield _layer(reading, index, f"mtp_block.{SELF_ATTENTION}", types[index])


def _layer(reading: Reading, index: int, module: str, kind: LayerType) -> ModelLayer:
    config, heads = reading.config, reading.check_query_heads()
    window, other = window_of(reading, kind), config.child("attention_other_setting")
    if other is not None and kind == _other_type(other):
        groups = reading.kv_heads(other, "num_attention_groups", other.size("num_attention_groups"))
        return reading.attention(index, module, num_kv_heads=groups, head_size=other.size("head_dim"), window=window)
    is_renamed = config.has("num_key_value_heads") and not config.has("num_attention_groups")
    field = "num_key_value_heads" if is_renamed else "num_attention_groups"
    kv_heads, width = reading.kv_heads(config, field, config.size(field)), head_width(reading, heads)
    return reading.attention(index, module, num_kv_heads=kv_heads, head_size=width, window=window)


def _types(config: Config, num_layers: int) -> tuple[LayerType, ...]:
    """`layer_types` of published checkpoints go on with the layers that predict further tokens."""
    if config.items("layer_types") is None:
        windowed = config.has("sliding_window")  # then every second layer, from the first
        return tuple("sliding" if windowed and index % 2 == 0 else "full" for index in range(num_layers))
    return config.choices("layer_types", LAYER_TYPES, num_layers, extra=MAX_MTP_LAYERS) or ()


def _other_type(other: Config) -> LayerType:
    name = other.text("attention_type")
    if name not in LAYER_TYPES:
        raise other.fault("attention_type", f"this must be one of {', '.join(LAYER_TYPES)}, not {name!r}")
    return LAYER_TYPES[name]


_STEP_3 = {
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "num_attention_groups": 1,
    "head_dim": 256,
    "max_seq_len": 65536,
}
_STEP_3 |= {"max_position_embedding": 65536}
_STEP_3P5 = {"hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40, "num_attention_groups": 8}

_MTP = Mtp(read=read_3p5_mtp, left_out=1, inside=True)

FAMILIES: dict[str, Family] = {
    "step3_text": Family(read=read_3, defaults=_STEP_3, defaults_of="Step3TextConfig, vLLM 0.24.0"),
    "step3p5": Family(read=read_3p5, defaults=_STEP_3P5, defaults_of="Step3p5Config, vLLM 0.24.0", mtp=_MTP),
}
