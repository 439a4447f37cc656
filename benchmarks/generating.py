"""Tokens generated on a CPU with keys in kvpage blocks, beside the same with the stock cache of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from measure import Effort, Row, beside, take_turns
from report import STOCK_CACHE, Subject, main_of

if TYPE_CHECKING:
    from transformers import DynamicCache

    from kvpage.integrations.transformers import KvpageCache

HIDDEN, LAYERS, NEW_TOKENS, ROUNDS = 256, 4, 16, 7
SHAPES = ((1, 128), (1, 1024), (4, 256))
"""Sequences, and tokens of each prompt."""
ABOUT = f"""
`benchmarks/generating.py`. A llama of {LAYERS} layers and {HIDDEN} wide, with random weights, in float32 on one thread
reads a prompt and generates {NEW_TOKENS} tokens. Beside it: the same with `DynamicCache`, which copies all keys at each
step to append to them. The larger the model, the smaller the share of either.
"""


def measure(effort: Effort) -> list[Row]:
    if find_spec("transformers") is None:
        return []
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = _model()
        return [row for batch, tokens in SHAPES for row in compare_caches(model, batch, tokens, effort.rounds(ROUNDS))]
    finally:
        torch.set_num_threads(num_threads)


def _model() -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
        "vocab_size": 1000,
    }
    return AutoModelForCausalLM.from_config(LlamaConfig(**sizes)).eval()


def compare_caches(model: Any, batch: int, prompt_tokens: int, rounds: int) -> list[Row]:
    from transformers import DynamicCache

    prompt = torch.randint(1, 1000, (batch, prompt_tokens))
    with torch.no_grad(), in_blocks(model, batch * (prompt_tokens + NEW_TOKENS)) as cache:

        def emptied() -> KvpageCache:
            cache.reset()
            return cache

        sides = {
            STOCK_CACHE: decoding(model, prompt, lambda: DynamicCache(config=model.config)),
            _row_name(batch, prompt_tokens): decoding(model, prompt, emptied),
        }
        return beside(STOCK_CACHE, take_turns(sides, rounds=rounds, warm_up=1))


def _row_name(batch: int, prompt_tokens: int) -> str:
    return f"{batch} × {prompt_tokens:,} tokens read, {NEW_TOKENS} generated"


@contextmanager
def in_blocks(model: Any, num_tokens: int) -> Iterator[KvpageCache]:
    from kvpage.integrations.transformers import KvpageCache, ModelPool

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


PAIRS = tuple((_row_name(*shape), STOCK_CACHE) for shape in SHAPES)
SUBJECT = Subject(title="Generating", about=ABOUT, pairs=PAIRS, measure=measure, in_short=PAIRS[1:2])

if __name__ == "__main__":
    main_of(SUBJECT)
