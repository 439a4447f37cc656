"""Qwen3-Next and Qwen3.5: gated delta nets, with full attention in every fourth layer.

vLLM 0.24.0, qwen3_next.py and qwen3_5.py: the recurrent state has the model's dtype unless `mamba_ssm_dtype` says more.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvpage.models.config import MAX_MODEL_LAYERS, Config
from kvpage.models.families.dense import RELEASE, SELF_ATTENTION
from kvpage.models.mtp import named_mtp
from kvpage.models.patterns import LayerType, layer_types
from kvpage.models.reading import Family, ModelLayer, Mtp, Reading, head_width, published_dtype, refuse
from kvpage.models.states import gated_delta_net


def read(reading: Reading) -> Iterator[ModelLayer]:
    config = reading.config
    reading.check_query_heads()
    dtypes = (reading.dtype, reading.ssm_dtype(published_dtype(config, "mamba_ssm_dtype")))
    for index, kind in enumerate(layer_types(config, reading.num_layers(), _by_interval)):
        if kind == "linear":
            yield reading.state(index, "linear_attn", gated_delta_net(reading, config), dtypes)
        elif kind == "full":
            yield _attention(reading, index)
        else:
            raise refuse(config, "layer_types", f"{kind} layers are not known of this model type")


def read_mtp(reading: Reading, count: int) -> Iterator[ModelLayer]:
    yield from (_attention(named_mtp(reading), index) for index in range(count))


def _attention(reading: Reading, index: int) -> ModelLayer:
    config = reading.config
    width = head_width(reading, reading.check_query_heads())
    kv_heads = reading.kv_heads(config, "num_key_value_heads", config.size("num_key_value_heads"))
    return reading.attention(index, SELF_ATTENTION, num_kv_heads=kv_heads, head_size=width)


def _by_interval(config: Config, num_layers: int) -> tuple[LayerType, ...]:
    interval = config.optional_size("full_attention_interval", limit=MAX_MODEL_LAYERS) or 4
    return tuple("full" if (index + 1) % interval == 0 else "linear" for index in range(num_layers))


_NETS = {
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "num_attention_heads": 16,
    "max_position_embeddings": 32768,
}
_NEXT = _NETS | {"hidden_size": 2048, "num_hidden_layers": 48, "num_key_value_heads": 2}
_QWEN_3_5 = _NETS | {"hidden_size": 4096, "num_hidden_layers": 32, "num_key_value_heads": 4}
_QWEN_3_5_MOE = _NETS | {"hidden_size": 2048, "num_hidden_layers": 40, "num_key_value_heads": 2}

_NEXT_MTP = Mtp(read=read_mtp, left_out=1)
_MTP = Mtp(read=read_mtp, field="mtp_num_hidden_layers", left_out=1, inside=True)

FAMILIES: dict[str, Family] = {
    "qwen3_next": Family(read=read, defaults=_NEXT, defaults_of=f"Qwen3NextConfig, {RELEASE}", mtp=_NEXT_MTP),
    "qwen3_5_text": Family(read=read, defaults=_QWEN_3_5, defaults_of=f"Qwen3_5TextConfig, {RELEASE}", mtp=_MTP),
    "qwen3_5_moe_text": Family(
        read=read, defaults=_QWEN_3_5_MOE, defaults_of=f"Qwen3_5MoeTextConfig, {RELEASE}", mtp=_MTP
    ),
}
