"""MiniMax Text-01 and M1 (lightning attention, with full attention in every eighth layer) and M3 (indexer keys).

vLLM 0.24.0: `linear_attention_state_shape`, models/minimax_m3. MiniMax M2 is in the table of dense models.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvpage.models.config import Config
from kvpage.models.families.dense import RELEASE, SELF_ATTENTION
from kvpage.models.formats import KvFormat
from kvpage.models.mtp import after_the_model
from kvpage.models.patterns import LayerType, layer_types
from kvpage.models.reading import Family, Fields, ModelLayer, Mtp, Reading, head_width, refuse

M3_BLOCK = 128  # tokens: its kernels take whole blocks of the sparse attention
_M3_PAIR: Fields = {
    "shape": ["num_blocks", 2, "block_size", "num_kv_heads", "head_size"],
    "stride_order": [0, 1, 2, 3, 4],
}
_M3_KEYS: Fields = {"shape": ["num_blocks", "block_size", "head_size"], "stride_order": [0, 1, 2]}


def read_lightning(reading: Reading) -> Iterator[ModelLayer]:
    config = reading.config
    heads = reading.check_query_heads()
    kv_heads = reading.kv_heads(config, "num_key_value_heads", config.size("num_key_value_heads"))
    width, mine = head_width(reading, heads), heads // reading.tp
    for index, kind in enumerate(layer_types(config, reading.num_layers(), _by_list)):
        if kind == "linear":
            yield reading.state(index, "self_attn", ((mine, width, width),), (reading.dtype,))
        elif kind == "full":
            yield reading.attention(index, SELF_ATTENTION, num_kv_heads=kv_heads, head_size=width)
        else:
            raise refuse(config, "layer_types", f"{kind} layers are not known of this model type")


def _by_list(config: Config, num_layers: int) -> tuple[LayerType, ...]:
    """`attn_type_list`: 0 is lightning attention, 1 full attention."""
    flags = config.items("attn_type_list", num_layers)
    if flags is None:
        raise config.missing("layer_types")
    full = [config.checked_size("attn_type_list", flag, limit=1, least=0) == 1 for flag in flags]
    return tuple("full" if is_full else "linear" for is_full in full)


def read_m3(reading: Reading) -> Iterator[ModelLayer]:
    sparse, key_width = _sparse_layers(reading.config, reading.num_layers())
    for index, is_sparse in enumerate(sparse):
        yield from _m3_layer(reading, index, key_width if is_sparse else None)


def read_m3_mtp(reading: Reading, count: int) -> Iterator[ModelLayer]:
    """Sparse like most layers of the model."""
    _, key_width = _sparse_layers(reading.config, reading.num_layers())
    for index in after_the_model(reading, count):
        yield from _m3_layer(reading, index, key_width)


def _m3_layer(reading: Reading, index: int, key_width: int | None) -> Iterator[ModelLayer]:
    """Keys and values; with a `key_width` also the keys by which an indexer looks."""
    config = reading.config
    width = head_width(reading, reading.check_query_heads())
    kv_heads = reading.kv_heads(config, "num_key_value_heads", config.size("num_key_value_heads"))
    layer = reading.attention(index, SELF_ATTENTION, num_kv_heads=kv_heads, head_size=width)
    if key_width is None:
        yield layer
        return
    blocks: Fields = {"kernel_block_sizes": [M3_BLOCK]}
    yield ModelLayer(index, {"backend": _M3_PAIR} | layer.fields | blocks)
    keys = KvFormat(reading.dtype)
    yield reading.latent(index, "self_attn.attn.index_cache", head_size=key_width, kv=keys, backend=_M3_KEYS, **blocks)


def _sparse_layers(config: Config, num_layers: int) -> tuple[list[bool], int]:
    """Which layers have an indexer, and the width of its keys: as published, or as transformers writes it."""
    sparse = config.child("sparse_attention_config")
    if sparse is None:
        types = config.choices("layer_types", {"minimax_m3_sparse": True, "full_attention": False}, num_layers)
        if types is None:
            raise config.missing("sparse_attention_config")
        return list(types), config.size("index_head_dim")
    flags = sparse.items("sparse_attention_freq", num_layers)
    if flags is None:
        raise sparse.missing("sparse_attention_freq")
    has_indexer = [sparse.checked_size("sparse_attention_freq", flag, limit=1, least=0) == 1 for flag in flags]
    return has_indexer, sparse.size("sparse_index_dim")


_MINIMAX = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
_M3 = {
    "hidden_size": 6144,
    "num_hidden_layers": 60,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 524288,
}

_M3_MTP = Mtp(read=read_m3_mtp, field="num_mtp_modules", left_out=1, inside=True)

FAMILIES: dict[str, Family] = {
    "minimax": Family(read=read_lightning, defaults=_MINIMAX, defaults_of=f"MiniMaxConfig, {RELEASE}"),
    "minimax_text_01": Family(read=read_lightning),
    "minimax_m1": Family(read=read_lightning),
    "minimax_m3_vl_text": Family(
        read=read_m3,
        defaults=_M3 | {"index_head_dim": 128},
        defaults_of=f"MiniMaxM3VLTextConfig, {RELEASE}",
        mtp=_M3_MTP,
    ),
    "minimax_m3_text": Family(read=read_m3, defaults=_M3, defaults_of="MiniMaxM3TextConfig, vLLM 0.24.0", mtp=_M3_MTP),
}
