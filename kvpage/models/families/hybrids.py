"""Granite 4 (Mamba-2 mixers) and LFM2 (short convolutions), each with a few attention layers; Falcon H1, with both in
every layer.

vLLM 0.24.0, granitemoehybrid.py, lfm2.py, lfm2_moe.py and falcon_h1.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvpage.models.config import Config
from kvpage.models.families.dense import RELEASE, SELF_ATTENTION, SIZES
from kvpage.models.reading import Family, ModelLayer, Reader, Reading, head_width
from kvpage.models.states import Mamba2, mamba2, short_convolution

_GRANITE_TYPES = {"mamba": False, "linear_attention": False, "attention": True, "full_attention": True}
_LFM2_TYPES = {"conv": False, "full_attention": True}


def read_granite(reading: Reading) -> Iterator[ModelLayer]:
    config = reading.config
    field = "layers_block_type" if config.has("layers_block_type") else "layer_types"
    types = config.choices(field, _GRANITE_TYPES, reading.num_layers())
    if types is None:
        raise config.missing("layer_types")
    sizes = Mamba2(
        num_heads=config.size("mamba_n_heads"),
        head_size=_granite_head(config),
        num_groups=config.size("mamba_n_groups"),
        state_size=config.size("mamba_d_state"),
        kernel=config.size("mamba_d_conv"),
    )
    fields = {"heads_field": "mamba_n_heads", "groups_field": "mamba_n_groups", "kernel_field": "mamba_d_conv"}
    shapes = mamba2(reading, sizes, **fields)
    for index, has_attention in enumerate(types):
        if has_attention:
            yield _attention(reading, index)
        else:
            yield reading.state(index, "mixer", shapes, (reading.dtype, reading.ssm_dtype(None)))


def _granite_head(config: Config) -> int:
    """`auto` is the width that lets the heads fill the expanded hidden size; another must do so too."""
    heads, width = config.size("mamba_n_heads"), config.size("mamba_expand") * config.size("hidden_size")
    written = config.values.get("mamba_d_head", "auto")
    size = width // heads if written == "auto" else config.size("mamba_d_head")
    if size * heads != width:
        raise config.fault("mamba_d_head", f"{heads} heads of {size} do not make mamba_expand × hidden_size, {width}")
    return size


def read_falcon(reading: Reading) -> Iterator[ModelLayer]:
    """Attention and a mixer side by side. vLLM counts the mixers on after the last layer, and names them so."""
    config, num_layers = reading.config, reading.num_layers()
    heads, width = config.size("mamba_n_heads"), _falcon_width(config)
    if width % heads or config.values.get("mamba_d_head", "auto") not in ("auto", width // heads):
        raise config.fault("mamba_d_head", f"{heads} heads of this width do not make the mixer's {width} channels")
    sizes = Mamba2(
        num_heads=heads,
        head_size=width // heads,
        num_groups=config.size("mamba_n_groups"),
        state_size=config.size("mamba_d_state"),
        kernel=config.size("mamba_d_conv"),
    )
    fields = {"heads_field": "mamba_n_heads", "groups_field": "mamba_n_groups", "kernel_field": "mamba_d_conv"}
    shapes = mamba2(reading, sizes, **fields)
    mixers = replace(reading, layers_at="model")
    for index in range(num_layers):
        attention = _attention(reading, index, "attn")
        state = mixers.state(num_layers + index, "mixer", shapes, (reading.dtype, reading.ssm_dtype(None)))
        yield attention
        yield ModelLayer(index, state.fields)


def _falcon_width(config: Config) -> int:
    """`mamba_d_ssm`, or with null the expanded hidden size."""
    return config.optional_size("mamba_d_ssm") or config.size("mamba_expand") * config.size("hidden_size")


def read_lfm2(reading: Reading) -> Iterator[ModelLayer]:
    config, num_layers = reading.config, reading.num_layers()
    types = config.choices("layer_types", _LFM2_TYPES, num_layers)
    if types is None:
        types = _by_indices(config, num_layers)
    channels = "conv_dim" if config.has("conv_dim") else "hidden_size"
    shapes = short_convolution(reading, channels, "conv_L_cache")
    for index, has_attention in enumerate(types):
        if has_attention:
            yield _attention(reading, index)
        else:
            yield reading.state(index, "conv", shapes, (reading.dtype,))


def _by_indices(config: Config, num_layers: int) -> tuple[bool, ...]:
    indices = config.items("full_attn_idxs")
    if indices is None:
        raise config.missing("layer_types")
    full = {config.checked_size("full_attn_idxs", index, limit=num_layers - 1, least=0) for index in indices}
    return tuple(index in full for index in range(num_layers))


def _attention(reading: Reading, index: int, module: str = SELF_ATTENTION) -> ModelLayer:
    config = reading.config
    heads = reading.check_query_heads()
    kv_heads = config.optional_size("num_key_value_heads") or heads
    mine = reading.kv_heads(config, "num_key_value_heads", kv_heads)
    return reading.attention(index, module, num_kv_heads=mine, head_size=head_width(reading, heads))


def _family(read: Reader, name: str, *sizes: int | None, **more: object) -> Family:
    defaults: dict[str, object] = dict(zip(SIZES, sizes, strict=True))
    return Family(read=read, defaults=defaults | more, defaults_of=f"{name}, {RELEASE}")


_MIXER = {"mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2}

_FALCON_MIXER = _MIXER | {"mamba_d_ssm": 1024}

FAMILIES: dict[str, Family] = {
    "falcon_h1": _family(read_falcon, "FalconH1Config", 4096, 32, 32, 8, 8192, **_FALCON_MIXER),
    "granitemoehybrid": _family(read_granite, "GraniteMoeHybridConfig", 4096, 32, 32, None, 2048, **_MIXER),
    "lfm2": _family(read_lfm2, "Lfm2Config", 2560, 32, 32, 8, 128000, conv_L_cache=3),
    "lfm2_moe": _family(read_lfm2, "Lfm2MoeConfig", 2048, 32, 32, 8, 128000, conv_L_cache=3),
}
