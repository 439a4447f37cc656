"""Tiny models at random, on disk: what a vLLM engine loads in a second."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

transformers.utils.logging.disable_progress_bar()

Fields = dict[str, Any]

VOCABULARY = 97
BLOCK_SIZE = 32  # the least that vLLM's kernels on a CPU take
HEAD_SIZE = 32
_COMMON: Fields = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HEAD_SIZE,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.3,  # wide: else every token follows itself
    "tie_word_embeddings": False,
}
_KINDS = ["sliding_attention", "sliding_attention", "full_attention"] * 2
_WINDOWS: Fields = {"num_hidden_layers": 6, "sliding_window": 20, "layer_types": _KINDS}


def _llama() -> Any:
    return transformers.LlamaConfig(**_COMMON, num_hidden_layers=2)


def _gemma3() -> Any:
    """Three groups, of which two forget what leaves the window."""
    return transformers.Gemma3TextConfig(**_COMMON, **_WINDOWS, query_pre_attn_scalar=HEAD_SIZE)


def _gemma4() -> Any:
    """Full layers with pages twice as wide, which take blocks half as long; the last layers read others' caches."""
    more: Fields = {"global_head_dim": 2 * HEAD_SIZE, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8}
    return transformers.Gemma4TextConfig(**_COMMON, **_WINDOWS, **more, vocab_size_per_layer_input=VOCABULARY)


def _falcon_h1() -> Any:
    """Attention and recurrent states in every layer, in pages of one size."""
    widths: Fields = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1}
    config: Any = transformers.FalconH1Config  # its types leave head_dim out
    return config(**_COMMON, **widths, num_hidden_layers=2, mamba_d_state=16, mamba_d_conv=4, mamba_chunk_size=64)


CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "falcon_h1": _falcon_h1,
}
ONLY_STARTED = ("falcon_h1",)
"""vLLM 0.32.0 makes its caches on a CPU; what computes its states there fails with an IndexError, kvpage or not."""


def save(name: str, folder: Path) -> Path:
    """The model's folder, made in `folder`. The same weights each time."""
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32)
    path = folder / name
    model.save_pretrained(path)
    return path


if __name__ == "__main__":
    import sys

    for each in CONFIGS:
        save(each, Path(sys.argv[1]))
