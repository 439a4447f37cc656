"""From a layer of a plan request to the spec that vLLM would have of it: the way back, for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Fields = dict[str, Any]
MODES = {"int8_per_token_head": "INT8_PER_TOKEN_HEAD", "fp8_per_token_head": "FP8_PER_TOKEN_HEAD", "nvfp4": "NVFP4"}
CLASSES = {
    "full_attention": "FullAttentionSpec",
    "sliding_window": "SlidingWindowSpec",
    "chunked_local_attention": "ChunkedLocalAttentionSpec",
    "mla_attention": "MLAAttentionSpec",
    "sliding_window_mla": "SlidingWindowMLASpec",
    "mamba": "MambaSpec",
}
SAME = ("sliding_window", "attention_chunk_size", "head_size", "head_size_v")


def spec_of(layer: Fields, classes: Any, dtype: Callable[[str], Any]) -> Any:
    """`classes` are those of vLLM 0.24, real or stand-ins; `dtype` makes a dtype of a name."""
    kind = layer["kind"]
    fields: Fields = {"block_size": layer.get("block_size", 64)}
    if kind == "mamba":
        fields |= {"shapes": tuple(map(tuple, layer["shapes"])), "dtypes": tuple(map(dtype, layer["dtypes"]))}
        fields["num_speculative_blocks"] = layer.get("num_speculative_blocks", 0)
        return classes.MambaSpec(**fields)
    fields |= {name: layer[name] for name in SAME if name in layer}
    fields |= {"num_kv_heads": layer.get("num_kv_heads", 1), "dtype": dtype(layer["dtype"])}
    if layer.get("kv_quant") in MODES:
        fields["kv_quant_mode"] = classes.KVQuantMode[MODES[layer["kv_quant"]]]
    if kind in ("mla_attention", "sliding_window_mla"):
        is_packed = layer.get("kv_quant") == "fp8_ds_mla"
        fields |= {"alignment": layer.get("page_alignment_bytes"), "compress_ratio": layer.get("compress_ratio", 1)}
        fields["cache_dtype_str"] = "fp8_ds_mla" if is_packed else None
        fields["model_version"] = "deepseek_v4" if is_packed and layer["head_size"] == 512 else None
    return getattr(classes, CLASSES[kind])(**fields)
