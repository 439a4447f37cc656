"""An engine that is none: it schedules, keeps a cache in blocks and hands both to the store's two sides as vLLM does.

What it computes of a block depends on every token up to the block's end, and is looked at before it goes on.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Self
from zlib import crc32

import torch

from kvpage.client.attachment import Tensors
from kvpage.client.views import BufferViews, PlannedViews
from kvpage.integrations.vllm.engine_plan import EnginePlan
from kvpage.integrations.vllm.store_choice import StoreChoice
from kvpage.integrations.vllm.store_scheduler import StoreScheduler
from kvpage.integrations.vllm.store_worker import StoreWorker
from kvpage.pages.hashing import token_bytes
from kvpage.planner.planner import plan

BLOCK_SIZE = 32
SALT = b"the same weights"
STEP_TOKENS = 1000
NUM_BLOCKS = 300
"""Of the engine."""
RUN = 16
"""Blocks of a request that lie one after the other."""


def engine_plan(num_blocks: int = NUM_BLOCKS, **fields: Any) -> EnginePlan:
    layer = {"kind": "full_attention", "block_size": BLOCK_SIZE, "num_kv_heads": 2, "head_size": 16}
    layer |= {"name": "layer.{i}", "count": 2, "dtype": "float32", "backend": "LBHNC"}
    request = {"layers": [layer | fields], "strategy": "unify", "num_blocks": num_blocks}
    return EnginePlan(request, plan(request))


def choice(run_dir: str, name: str, num_blocks: int = 300) -> StoreChoice:
    return StoreChoice(name=name, num_blocks=num_blocks, run_dir=run_dir)


@dataclass
class Request:
    """The fields of vLLM's that are read."""

    request_id: str
    all_token_ids: list[int]
    num_computed_tokens: int = 0
    skip_reading_prefix_cache: bool = False
    lora_request: Any = None
    prompt_embeds: Any = None
    cache_salt: str | None = None
    mm_features: list[Any] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


def prompt_of(seed: int, num_tokens: int = 1024) -> list[int]:
    chosen = random.Random(seed)
    return [chosen.randrange(1000) for _ in range(num_tokens)]


class StoreEngine:
    def __init__(self, chosen: StoreChoice, salt: bytes = SALT, seed: int = 0) -> None:
        self.planned = engine_plan()
        buffer = torch.zeros(self.planned.plan.buffer_size_bytes, dtype=torch.uint8)
        tensors = Tensors(PlannedViews(self.planned.plan), BufferViews(buffer))
        self.caches = {name: tensors[name][0] for name in tensors}
        self._random = random.Random(seed)
        with ExitStack() as undo:
            self.worker = StoreWorker.open(self.planned, chosen)
            undo.callback(self.worker.close)
            self.worker.register(self.caches)
            self.scheduler = StoreScheduler.open(chosen, salt)
            undo.callback(self.scheduler.close)
            self._owned = undo.pop_all()

    def begin(self, request: Request, num_local: int = 0) -> tuple[list[int], int]:
        """Its blocks, anywhere in the engine, and the tokens that are loaded."""
        found = self.scheduler.matched(request, num_local)
        starts = list(range(1, NUM_BLOCKS - RUN, RUN))
        self._random.shuffle(starts)
        count = -(-request.num_tokens // BLOCK_SIZE) + 4
        blocks = [block for start in starts for block in range(start, start + RUN)][:count]
        self.scheduler.allocated(request, blocks, found)
        request.num_computed_tokens = num_local + found
        return blocks, found

    def step(self, request: Request, blocks: list[int], num_tokens: int) -> None:
        block_state = SimpleNamespace(get_block_ids=lambda _name: (blocks,))
        scheduled = {request.request_id: num_tokens}
        output = SimpleNamespace(num_scheduled_tokens=scheduled, kv_connector_block_state=block_state)
        transfers = pickle.loads(pickle.dumps(self.scheduler.transfers(output)))
        self.worker.load(transfers)
        self._compute(request, blocks, num_tokens)
        self.worker.save(transfers)
        request.num_computed_tokens += num_tokens
        self.scheduler.reported(self.worker.report)

    def _compute(self, request: Request, blocks: list[int], num_tokens: int) -> None:
        end, data = request.num_computed_tokens + num_tokens, token_bytes(request.all_token_ids)
        for place in range(request.num_computed_tokens // BLOCK_SIZE, min(end, request.num_tokens) // BLOCK_SIZE):
            for number, cache in enumerate(self.caches.values()):
                cache[blocks[place]] = content(data, place, number, cache[0])

    def answer(self, prompt: Sequence[int], **fields: Any) -> int:
        """Tokens that came from the store. Raises AssertionError where a block holds what it should not."""
        request = Request(f"request-{self._random.random()}", list(prompt), **fields)
        blocks, found = self.begin(request)
        while request.num_computed_tokens < request.num_tokens:
            left = request.num_tokens - request.num_computed_tokens
            self.step(request, blocks, min(left, STEP_TOKENS))
        self.check(request, blocks)
        self.scheduler.finished(request)
        return found

    def check(self, request: Request, blocks: Sequence[int]) -> None:
        """Whether all whole blocks hold what their tokens say."""
        data = token_bytes(request.all_token_ids)
        for place in range(request.num_tokens // BLOCK_SIZE):
            for number, cache in enumerate(self.caches.values()):
                expected = content(data, place, number, cache[0])
                assert torch.equal(cache[blocks[place]], expected), f"block {place} of layer {number} is another's"

    def close(self) -> None:
        self._owned.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def content(data: bytes, place: int, layer: int, like: torch.Tensor) -> torch.Tensor:
    """What block `place` of the prompt with these `token_bytes` holds in a layer."""
    seed = crc32(data[: (place + 1) * BLOCK_SIZE * 4], layer)
    values = torch.arange(like.numel(), dtype=torch.int32) * 2_654_435_761 + seed
    return values.view(like.dtype).view(like.shape).nan_to_num()
