"""Nemotron-H (Mamba-2 mixers, a few attention layers, MLPs) and Nemotron-NAS (layers chosen one by one).

vLLM 0.24.0, nemotron_h.py and nemotron_nas.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from kvpage.models.config import MAX_MODEL_LAYERS, Config
from kvpage.models.families.dense import RELEASE, SELF_ATTENTION
from kvpage.models.mtp import named_mtp
from kvpage.models.patterns import window
from kvpage.models.reading import Family, ModelLayer, Mtp, Reading, head_width, published_dtype, refuse
from kvpage.models.states import Mamba2, mamba2

Block = Literal["state", "attention", "nothing"]
_LETTERS: dict[str, Block] = {"M": "state", "*": "attention", "-": "nothing", "E": "nothing"}
_BLOCKS: dict[str, Block] = {
    "mamba": "state",
    "linear_attention": "state",
    "attention": "attention",
    "full_attention": "attention",
    "mlp": "nothing",
    "moe": "nothing",
}


_MTP_BLOCKS = {word: block for word, block in _BLOCKS.items() if block != "state" and word != "mlp"}


def read_h(reading: Reading) -> Iterator[ModelLayer]:
    config = reading.config
    reading.check_query_heads()
    dtypes = (reading.dtype, reading.ssm_dtype(published_dtype(config, "mamba_ssm_cache_dtype")))
    for index, block in enumerate(_blocks(config)):
        if block == "state":
            yield reading.state(index, "mixer", _state_shapes(reading), dtypes)
        elif block == "attention":
            yield _attention(reading, index)


def read_h_mtp(reading: Reading, count: int) -> Iterator[ModelLayer]:
    """A pattern of attention and experts. vLLM 0.24.0 runs one predictor."""
    config, named = reading.config, named_mtp(reading)
    if count != 1:
        raise refuse(config, "num_nextn_predict_layers", f"one is known, not {count}")
    yield from (_attention(named, index) for index, block in enumerate(_mtp_blocks(config)) if block == "attention")


def _mtp_blocks(config: Config) -> tuple[Block, ...]:
    """A letter for each layer, or a word."""
    items = config.items("mtp_layers_block_type") or ()
    if items and len(items) <= MAX_MODEL_LAYERS:
        return config.choices("mtp_layers_block_type", _MTP_BLOCKS, len(items)) or ()
    pattern = config.text("mtp_hybrid_override_pattern") or ""
    if not 1 <= len(pattern) <= MAX_MODEL_LAYERS or set(pattern) - {"*", "E"}:
        raise config.fault("mtp_hybrid_override_pattern", "this must be letters * and E, one for each layer")
    return tuple(_LETTERS[letter] for letter in pattern)


def _attention(reading: Reading, index: int) -> ModelLayer:
    config, heads = reading.config, reading.check_query_heads()
    kv_heads = reading.kv_heads(config, "num_key_value_heads", config.size("num_key_value_heads"))
    head_field = "attention_head_dim" if config.has("attention_head_dim") and not config.has("head_dim") else "head_dim"
    width = config.optional_size(head_field) or head_width(reading, heads)
    return reading.attention(index, "mixer.attn", num_kv_heads=kv_heads, head_size=width, window=window(config))


def _state_shapes(reading: Reading) -> tuple[tuple[int, ...], tuple[int, ...]]:
    config = reading.config
    groups_field = "mamba_n_groups" if config.has("mamba_n_groups") else "n_groups"
    kernel_field = "mamba_d_conv" if config.has("mamba_d_conv") else "conv_kernel"
    sizes = Mamba2(
        num_heads=config.size("mamba_num_heads"),
        head_size=config.size("mamba_head_dim"),
        num_groups=config.size(groups_field),
        state_size=config.size("ssm_state_size"),
        kernel=config.size(kernel_field),
    )
    return mamba2(reading, sizes, heads_field="mamba_num_heads", groups_field=groups_field, kernel_field=kernel_field)


def _blocks(config: Config) -> tuple[Block, ...]:
    """A letter for each layer, or a word. The number of layers may be left out: the pattern gives it."""
    num_layers = config.optional_size("num_hidden_layers", limit=MAX_MODEL_LAYERS)
    pattern = config.text("hybrid_override_pattern")
    if pattern is None:
        return _written_blocks(config, num_layers)
    if not pattern or set(pattern) - set(_LETTERS):
        raise config.fault("hybrid_override_pattern", "this must be letters M, *, - and E, one for each layer")
    if len(pattern) != (num_layers or len(pattern)) or len(pattern) > MAX_MODEL_LAYERS:
        raise config.fault(
            "hybrid_override_pattern",
            f"this has {len(pattern)} letters; num_hidden_layers is {num_layers}, at most {MAX_MODEL_LAYERS} are read",
        )
    return tuple(_LETTERS[letter] for letter in pattern)


def _written_blocks(config: Config, num_layers: int | None) -> tuple[Block, ...]:
    field = "layers_block_type" if config.has("layers_block_type") else "layer_types"
    items = config.items(field)
    if items is None:
        raise config.missing("hybrid_override_pattern")
    if len(items) > MAX_MODEL_LAYERS:
        raise config.fault(field, f"this has {len(items)} entries; at most {MAX_MODEL_LAYERS} layers are read")
    return config.choices(field, _BLOCKS, num_layers or len(items)) or ()


def read_nas(reading: Reading) -> Iterator[ModelLayer]:
    """`block_configs` says of each layer whether it has attention, and how many query heads share a KV head."""
    config = reading.config
    heads = reading.check_query_heads()
    width = head_width(reading, heads)
    blocks = config.items("block_configs", reading.num_layers())
    if blocks is None:
        raise config.missing("block_configs")
    for index, block in enumerate(blocks):
        attention = config.as_child(f"/block_configs/{index}", block).required_child("attention")
        if attention.flag("no_op") or attention.flag("replace_with_linear"):
            continue
        sharing = attention.size("n_heads_in_group")
        if heads % sharing:
            raise attention.fault("n_heads_in_group", f"{sharing} does not divide the {heads} query heads")
        kv_heads = reading.kv_heads(attention, "n_heads_in_group", heads // sharing)
        yield reading.attention(index, SELF_ATTENTION, num_kv_heads=kv_heads, head_size=width)


_H = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "ssm_state_size": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "conv_kernel": 4,
    "mamba_ssm_cache_dtype": "float32",
    "mtp_hybrid_override_pattern": "*E",
}

_H_MTP = Mtp(read=read_h_mtp, inside=True)

FAMILIES: dict[str, Family] = {
    "nemotron_h": Family(read=read_h, defaults=_H, defaults_of=f"NemotronHConfig, {RELEASE}", mtp=_H_MTP),
    "nemotron_h_puzzle": Family(read=read_h, mtp=_H_MTP),  # differs in its experts
    "nemotron-nas": Family(read=read_nas),
}
