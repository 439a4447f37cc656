"""DeepSeek V2, V3 and V3.2, Kimi K2, GLM 4 lite and GLM 5: one latent row for each token, the same on every rank.

Sparse attention (`index_topk`) adds rows of FP8 keys with float32 scales, by which an indexer finds the tokens that
matter. vLLM 0.24.0, deepseek_v2.py: FP8 caches of sparse attention are `fp8_ds_mla` rows of 656 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvpage.models.config import MAX_MODEL_LAYERS, Config
from kvpage.models.families.dense import RELEASE, SELF_ATTENTION
from kvpage.models.formats import KV_FORMATS, KvFormat
from kvpage.models.mtp import after_the_model
from kvpage.models.reading import Family, Fields, ModelLayer, Mtp, Reading, refuse

SPARSE_BACKEND = "flashmla_sparse"
INDEXER_VALUES_PER_SCALE = 128
INDEXER_BLOCK = 64  # tokens: what its kernels take (vLLM 0.24.0, DeepseekV32IndexerBackend)
SCALE_BYTES = 4
UNPADDED_ROWS: Fields = {
    "shape": ["num_blocks", "block_size", "head_size"],
    "stride_order": [0, 1, 2],
    "layered_stride_order": [0, 1, 2, 3],
}
"""Rows of bytes whose kernels do not read pages by block stride."""


def read(reading: Reading) -> Iterator[ModelLayer]:
    config = reading.config
    reading.check_query_heads()
    if config.optional_size("index_topk") is None:
        yield from (_dense(reading, index) for index in range(reading.num_layers()))
        return
    for index, has_indexer in enumerate(_indexers(config, reading.num_layers())):
        yield _sparse(reading, index)
        if has_indexer:
            yield _indexer_rows(reading, index)


def read_mtp(reading: Reading, count: int) -> Iterator[ModelLayer]:
    """Each predictor looks for itself where attention is sparse."""
    is_sparse = reading.config.optional_size("index_topk") is not None
    for index in after_the_model(reading, count):
        yield _sparse(reading, index) if is_sparse else _dense(reading, index)
        if is_sparse:
            yield _indexer_rows(reading, index)


def _dense(reading: Reading, index: int) -> ModelLayer:
    return reading.latent(index, SELF_ATTENTION, head_size=latent_width(reading.config), kv=plain_rows(reading))


def _sparse(reading: Reading, index: int) -> ModelLayer:
    kv, backend = reading.kv, reading.options.backend or SPARSE_BACKEND
    if backend == SPARSE_BACKEND and kv.dtype.startswith("float8"):
        kv = KV_FORMATS["fp8_ds_mla"]
    elif kv.kv_quant != "fp8_ds_mla":
        kv = plain_rows(reading)
    return reading.latent(index, SELF_ATTENTION, head_size=latent_width(reading.config), kv=kv, backend=backend)


def _indexer_rows(reading: Reading, index: int) -> ModelLayer:
    return reading.latent(
        index,
        "self_attn.indexer.k_cache",
        head_size=indexer_row_bytes(reading.config),
        kv=KvFormat("uint8"),
        backend=UNPADDED_ROWS,
        kernel_block_sizes=[INDEXER_BLOCK],
    )


def plain_rows(reading: Reading) -> KvFormat:
    """The cache's format. Raises `SpecInvalid` for one with scales inside the row."""
    kv = reading.kv
    if kv.kv_quant is not None:
        raise reading.options.fault(
            "kv_dtype", f"{kv.kv_quant} is no format of these latent rows; use auto, bfloat16 or fp8"
        )
    return kv


def latent_width(config: Config) -> int:
    """Values of a row: the compressed part, and the part with rotary positions."""
    if config.optional_size("kv_lora_rank") is None:
        raise refuse(config, "kv_lora_rank", "without it this is attention over K and V of different width")
    return config.size("kv_lora_rank") + config.size("qk_rope_head_dim")


def indexer_row_bytes(config: Config) -> int:
    """FP8 values and a float32 scale for each 128 of them."""
    width = config.size("index_head_dim")
    if width % INDEXER_VALUES_PER_SCALE:
        raise config.fault("index_head_dim", f"{width} is no multiple of the 128 values that share a scale")
    return width + width // INDEXER_VALUES_PER_SCALE * SCALE_BYTES


def _indexers(config: Config, num_layers: int) -> list[bool]:
    """Layers that look for themselves; the others use what the last such layer found and keep no indexer rows."""
    types = config.choices("indexer_types", {"full": True, "shared": False}, num_layers)
    if types is not None:
        return list(types)
    pattern = config.values.get("index_topk_pattern")
    if pattern is None:
        step = config.optional_size("index_topk_freq", limit=MAX_MODEL_LAYERS) or 1
        offset = config.optional_size("index_skip_topk_offset", limit=MAX_MODEL_LAYERS, least=0)
        offset = 2 if offset is None else offset
        return [max(index - offset + 1, 0) % step == 0 for index in range(num_layers)]
    if not isinstance(pattern, str) or len(pattern) != num_layers or set(pattern) - {"F", "S"}:
        raise config.fault("index_topk_pattern", f"this must be a string of {num_layers} letters F and S")
    return [letter == "F" for letter in pattern]


def _published(name: str, layers: int, heads: int, longest: int, *, mtp: Mtp | None = None, **more: object) -> Family:
    sizes: Fields = {"num_hidden_layers": layers, "num_attention_heads": heads, "max_position_embeddings": longest}
    defaults = {"kv_lora_rank": 512, "qk_rope_head_dim": 64} | sizes | more
    return Family(read=read, defaults=defaults, defaults_of=f"{name}, {RELEASE}", mtp=mtp)


_MTP = Mtp(read=read_mtp)


FAMILIES: dict[str, Family] = {
    "deepseek_v2": _published("DeepseekV2Config", 32, 32, 2048),
    "deepseek_v3": _published("DeepseekV3Config", 61, 128, 4096, mtp=_MTP),
    "deepseek_v32": _published("DeepseekV32Config", 61, 128, 163840, mtp=_MTP, index_topk=2048, index_head_dim=128),
    "kimi_k2": Family(read=read),
    "glm4_moe_lite": _published("Glm4MoeLiteConfig", 47, 20, 202752, mtp=_MTP),
    "glm_moe_dsa": _published("GlmMoeDsaConfig", 78, 64, 202752, mtp=_MTP, index_topk=2048, index_head_dim=128),
}
