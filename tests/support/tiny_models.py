"""Models of a few thousand parameters, made at random from configs, and what they generate with and without kvpage."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import transformers
from transformers.utils import logging

from kvpage.integrations.transformers import ModelPool

logging.set_verbosity_error()  # of kernels that a CPU does without

Fields = dict[str, Any]

VOCABULARY = 97
NEW_TOKENS = 20
BLOCK_SIZE = 16
_COMMON: Fields = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_WINDOW = 20  # no multiple of a block, and shorter than a prompt
_EXPERTS: Fields = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def _llama() -> Any:
    return transformers.LlamaConfig(**_COMMON, head_dim=16, num_hidden_layers=3)


def _gemma3() -> Any:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    return transformers.Gemma3TextConfig(
        **_COMMON, head_dim=16, num_hidden_layers=3, sliding_window=_WINDOW, layer_types=kinds
    )


def _gemma4() -> Any:
    """Pages of layers with windows and without in a ratio of 2:3; the last layer reads the keys of another."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    widths: Fields = {
        "head_dim": 16,
        "global_head_dim": 24,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 1,
    }
    rest: Fields = {"num_hidden_layers": 4, "sliding_window": _WINDOW, "layer_types": kinds}
    return transformers.Gemma4TextConfig(**_COMMON | widths | rest, vocab_size_per_layer_input=VOCABULARY)


def _mimo() -> Any:
    """Keys wider than values; layers with windows have twice the heads."""
    heads: Fields = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4}
    widths: Fields = {"head_dim": 24, "v_head_dim": 16, "swa_head_dim": 24, "swa_v_head_dim": 16}
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    rest: Fields = {
        "num_hidden_layers": 3,
        "sliding_window": _WINDOW,
        "layer_types": kinds,
        "mlp_layer_types": ["dense"] * 3,
    }
    return transformers.MiMoV2FlashConfig(**_COMMON | heads | widths | rest | _EXPERTS)


def _deepseek() -> Any:
    """Latent rows: what transformers calls keys is 24 wide, what it calls values 8."""
    latent: Fields = {
        "kv_lora_rank": 24,
        "q_lora_rank": None,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
    }
    rest: Fields = {
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    }
    return transformers.DeepseekV3Config(**_COMMON | latent | rest | _EXPERTS)


def _llama4() -> Any:
    """Chunks."""
    kinds = ["chunked_attention", "chunked_attention", "full_attention"]
    experts: Fields = {
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "moe_layers": [],
        "intermediate_size_mlp": 64,
    }
    rest: Fields = {
        "num_hidden_layers": 3,
        "attention_chunk_size": 24,
        "no_rope_layers": [1, 1, 0],
        "layer_types": kinds,
    }
    return transformers.Llama4TextConfig(**_COMMON, head_dim=16, **experts, **rest)


def _qwen3_next() -> Any:
    """Gated delta nets beside attention."""
    net: Fields = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
    more: Fields = {
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "num_experts": 0,
        "mlp_only_layers": [0, 1, 2],
    }
    kinds = ["linear_attention", "linear_attention", "full_attention"]
    return transformers.Qwen3NextConfig(**_COMMON, head_dim=16, **net, **more, num_hidden_layers=3, layer_types=kinds)


def _falcon_h1() -> Any:
    """Attention and a Mamba-2 mixer in every layer."""
    mixer: Fields = {
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
        "mamba_d_state": 8,
    }
    config: Any = transformers.FalconH1Config  # its types leave head_dim out
    return config(**_COMMON, head_dim=16, num_hidden_layers=2, **mixer, mamba_d_conv=4, mamba_chunk_size=16)


def _lfm2() -> Any:
    """Short convolutions beside attention, and no recurrent state."""
    return transformers.Lfm2Config(
        **_COMMON, num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"], conv_L_cache=3
    )


CONFIGS = {
    "llama": _llama,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "mimo": _mimo,
    "deepseek": _deepseek,
    "llama4": _llama4,
    "qwen3_next": _qwen3_next,
    "falcon_h1": _falcon_h1,
    "lfm2": _lfm2,
}
STATEFUL = ("qwen3_next", "falcon_h1", "lfm2")


@cache
def tiny_model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.set_num_threads(1)  # the same sums in the same order in every process
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=dtype).eval()


def prompts(*lengths: int, seed: int = 1) -> dict[str, torch.Tensor]:
    """Random prompts, padded at the left to the longest."""
    tokens = torch.randint(1, VOCABULARY, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(seed))
    mask = torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]
    return {"input_ids": tokens * mask, "attention_mask": mask.long()}


def generate(model: Any, inputs: dict[str, torch.Tensor], seed: int = 7, **options: Any) -> Any:
    """With logits; greedy unless `options` say otherwise."""
    torch.manual_seed(seed)
    fixed = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    return model.generate(**inputs, **fixed | options)


def same(ours: Any, stock: Any) -> bool:
    """Token by token, and every logit to the last bit."""
    logits = zip(ours.logits, stock.logits, strict=True)
    return torch.equal(ours.sequences, stock.sequences) and all(torch.equal(one, other) for one, other in logits)


@contextmanager
def poisoned_pool(model: Any, *, strategy: str = "nested", seed: int = 0, **fields: Any) -> Iterator[ModelPool]:
    """Nothing of it is a number before it is written, and its blocks are handed out in a random order. Blocks and
    leases are proven when it ends."""
    sizes = {"block_size": BLOCK_SIZE, "num_blocks": 200, "max_model_len": 256} | fields
    with ModelPool.of(model, strategy=strategy, **sizes) as pool:
        pool.tensors.buffer.fill_(255)
        shuffle(pool, seed)
        yield pool
        pool.blocks.check()


def shuffle(pool: ModelPool, seed: int, count: int = 24) -> None:
    """Blocks come back in an order of their own, and so are handed out next."""
    with pool.lease("shuffle") as lease:
        taken = {group: lease.allocate(group, count).tolist() for group in range(len(pool.plan.groups))}
        order = [(group, block) for group, blocks in taken.items() for block in blocks]
        random.Random(seed).shuffle(order)
        for group, block in order:
            lease.free(group, [block])


@contextmanager
def counted_tokens(model: Any) -> Iterator[list[int]]:
    """How many tokens each forward pass was given."""
    counts: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda _model, _args, kwargs: counts.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        yield counts
    finally:
        hook.remove()


def held_blocks(pool: ModelPool) -> int:
    """Of all leases and groups."""
    return sum(pool.blocks.blocks.counts(group).used for group in range(len(pool.plan.groups)))
