"""DeepSeek V4: a window over every token, rows that stand for 4 or 128 tokens, and the states that compress them.

vLLM 0.24.0, models/deepseek_v4. For each layer: rows of the window, always; with a ratio, rows that each stand for so
many tokens, and the compressor's partial sums, which it needs for one or two such spans; with ratio 4 also an indexer
with rows and a compressor of its own. Block sizes are vLLM's: pages of the kinds are then of like size.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvpage.models.config import MAX_MTP_LAYERS, MAX_TOKENS, Config
from kvpage.models.families.dense import RELEASE
from kvpage.models.families.latent import indexer_row_bytes
from kvpage.models.formats import KV_FORMATS, KvFormat
from kvpage.models.mtp import after_the_model
from kvpage.models.reading import Family, Fields, ModelLayer, Mtp, Reading, refuse

BLOCK = 256  # tokens of a block of compressed rows
WINDOW_BLOCK = 64  # tokens of a block of the window's rows
STATE_BLOCKS = {4: 4, 128: 8}  # tokens of a block of a compressor's state, by ratio
PAGE_ALIGNMENT_BYTES = 576  # of fp8_ds_mla pages
_RATIOS = {"sliding_attention": 1, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}

PACKED_ROWS: Fields = {
    "shape": ["num_blocks", "block_size", "row_size"],
    "stride_order": [0, 1, 2],
    "layered_stride_order": [1, 0, 2, 3],
}
"""All of this model's kernels read pages by block stride: vLLM packs them side by side in every block."""


def read(reading: Reading) -> Iterator[ModelLayer]:
    _check_options(reading)
    config = reading.config
    reading.check_query_heads()
    ratios = _ratios(config, reading.num_layers())
    for index, ratio in enumerate(ratios):
        yield _window(reading, index)
        if ratio == 1:
            continue
        yield _compressed(reading, index, "attn", config.size("head_dim"), _kv(reading), ratio)
        yield _state(reading, index, "attn.compressor.state_cache", config.size("head_dim"), ratio)
        if ratio == 4:
            row = indexer_row_bytes(config)
            yield _compressed(reading, index, "attn.indexer.k_cache", row, KvFormat("uint8"), ratio)
            module = "attn.indexer.compressor.state_cache"
            yield _state(reading, index, module, config.size("index_head_dim"), ratio)


def read_mtp(reading: Reading, count: int) -> Iterator[ModelLayer]:
    """A predictor keeps its window only: it is beyond the ratios."""
    _check_options(reading)
    yield from (_window(reading, index) for index in after_the_model(reading, count))


def _check_options(reading: Reading) -> None:
    if reading.options.block_size not in (None, BLOCK):
        raise reading.options.fault("block_size", f"DeepSeek V4's kernels take blocks of {BLOCK} tokens; leave it out")
    if reading.options.backend is not None:
        raise reading.options.fault("backend", "DeepSeek V4 has backends of its own; leave it out")


def _kv(reading: Reading) -> KvFormat:
    """FP8 rows of 584 bytes: all that vLLM's FlashMLA backend for this model stores. bfloat16 only when asked for."""
    kv = reading.kv
    if reading.options.kv_dtype == "auto" and kv.kv_quant is None:
        reading.config.note("kv_dtype auto: fp8_ds_mla, what vLLM's FlashMLA backend for DeepSeek V4 stores")
        kv = KV_FORMATS["fp8_ds_mla"]
    if kv.dtype == "float8_e4m3fn" and kv.kv_quant is None:
        kv = KV_FORMATS["fp8_ds_mla"]
    if kv not in (KV_FORMATS["fp8_ds_mla"], KV_FORMATS["bfloat16"]):
        raise reading.options.fault("kv_dtype", "rows of DeepSeek V4 are fp8 (fp8_ds_mla) or bfloat16")
    return kv


def _alignment(reading: Reading) -> int | None:
    return PAGE_ALIGNMENT_BYTES if _kv(reading).kv_quant else None


def _window(reading: Reading, index: int) -> ModelLayer:
    return reading.latent(
        index,
        "attn.swa_cache",
        kind="sliding_window_mla",
        head_size=reading.config.size("head_dim"),
        kv=_kv(reading),
        sliding_window=reading.config.size("sliding_window", limit=MAX_TOKENS),
        block_size=WINDOW_BLOCK,
        page_alignment_bytes=_alignment(reading),
        backend=PACKED_ROWS,
    )


def _compressed(reading: Reading, index: int, module: str, width: int, kv: KvFormat, ratio: int) -> ModelLayer:
    return reading.latent(
        index,
        module,
        head_size=width,
        kv=kv,
        compress_ratio=ratio,
        block_size=BLOCK,
        page_alignment_bytes=PAGE_ALIGNMENT_BYTES if kv.dtype == "uint8" else _alignment(reading),
        backend=PACKED_ROWS,
    )


def _state(reading: Reading, index: int, module: str, width: int, ratio: int) -> ModelLayer:
    """Partial sums and scores in float32, of two overlapping spans with ratio 4, else of one."""
    spans = 2 if ratio == 4 else 1
    return reading.latent(
        index,
        module,
        kind="sliding_window_mla",
        head_size=2 * spans * width,
        kv=KvFormat("float32"),
        sliding_window=spans * ratio,
        block_size=STATE_BLOCKS[ratio],
        page_alignment_bytes=_alignment(reading),
        backend=PACKED_ROWS,
    )


def _ratios(config: Config, num_layers: int) -> list[int]:
    """Tokens for which a row stands, by layer. 0 and 1 both say that only the window is kept."""
    written = config.items("compress_ratios", num_layers, extra=MAX_MTP_LAYERS)
    if written is None:
        ratios = config.choices("layer_types", _RATIOS, num_layers)
        if ratios is None:
            raise config.missing("compress_ratios")
        rates = config.child("compress_rates")
        used = [name for name, ratio in _RATIOS.items() if ratio > 1 and ratio in ratios]
        if rates is not None and any(rates.values.get(name) != _RATIOS[name] for name in used):
            raise refuse(config, "compress_rates", "only rates 4 and 128 are known")
        return list(ratios)
    for index, ratio in enumerate(written[:num_layers]):
        if isinstance(ratio, bool) or ratio not in (0, 1, *STATE_BLOCKS):
            raise config.fault_at("compress_ratios", index, "this must be 0, 1, 4 or 128")
    return [max(1, ratio) for ratio in written[:num_layers] if isinstance(ratio, int)]


_DEFAULTS = {
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "head_dim": 512,
    "sliding_window": 128,
    "index_head_dim": 128,
    "max_position_embeddings": 1048576,
}

FAMILIES: dict[str, Family] = {
    "deepseek_v4": Family(
        read=read, defaults=_DEFAULTS, defaults_of=f"DeepseekV4Config, {RELEASE}", mtp=Mtp(read=read_mtp)
    ),
}
