"""Tokens generated on a CPU with keys in kvpage blocks, beside the same with the stock cache of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

from kvpage.integrations.transformers import KvpageCache, ModelPool
from measure import print_table, take_turns

HIDDEN, LAYERS, NEW_TOKENS, ROUNDS = 256, 4, 16, 7
STOCK = "stock cache"


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "vocab_size": 1000,
    }
    heads: dict[str, Any] = {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
        "vocab_size": 1000,
    }
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **heads)).eval()
    for batch, prompt_tokens in ((1, 128), (1, 1024), (4, 256)):
        compare(model, batch, prompt_tokens)


def compare(model: Any, batch: int, prompt_tokens: int) -> None:
    prompt = torch.randint(1, 1000, (batch, prompt_tokens))
    with torch.no_grad(), in_blocks(model, batch * (prompt_tokens + NEW_TOKENS)) as cache:
        sides = {STOCK: decoding(model, prompt, lambda: DynamicCache(config=model.config))}

        def emptied() -> KvpageCache:
            cache.reset()
            return cache

        sides["kvpage, a pool of this process"] = decoding(model, prompt, emptied)
        title = f"{batch} × {prompt_tokens} tokens read and {NEW_TOKENS} generated, {LAYERS} layers, float32"
        print_table(title, take_turns(sides, rounds=ROUNDS, warm_up=1), floor=STOCK)


@contextmanager
def in_blocks(model: Any, num_tokens: int) -> Iterator[KvpageCache]:
    with ModelPool.of(model, num_blocks=2 * num_tokens // 16, block_size=16) as pool:
        with KvpageCache.local(model, pool) as cache:
            yield cache


def decoding(
    model: Any, prompt: torch.Tensor, new_cache: Callable[[], DynamicCache | KvpageCache]
) -> Callable[[], object]:
    mask = torch.ones_like(prompt)

    def generate() -> object:
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        return model.generate(prompt, attention_mask=mask, cache=new_cache(), **options)

    return generate


if __name__ == "__main__":
    main()
