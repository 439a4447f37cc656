"""What it costs to keep blocks and to load them, beside a copy of as many bytes between the same two memories.

    python store_cost.py RUN_DIR            while `kvpage serve` has 300 MiB to give

Blocks of 2 MiB: 16 tokens of 32 layers with 8 heads of 128 in bfloat16. The three take turns.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch

from kvpage.client.attachment import Tensors
from kvpage.client.http import Client
from kvpage.client.views import BufferViews, PlannedViews
from kvpage.integrations.vllm.engine_plan import EnginePlan
from kvpage.integrations.vllm.store_choice import StoreChoice
from kvpage.integrations.vllm.store_values import Load, Save, Transfers
from kvpage.integrations.vllm.store_worker import StoreWorker
from kvpage.planner.planner import plan

NUM_BLOCKS, BLOCK_BYTES, TURNS = 128, 2 << 20, 15
STORE = "cost"


def main(run_dir: str) -> None:
    layer = {"name": "layer.{i}", "count": 32, "kind": "full_attention", "block_size": 16, "num_kv_heads": 8}
    layer |= {"head_size": 128, "dtype": "bfloat16", "backend": "LBHNC"}
    request = {"layers": [layer], "strategy": "unify", "num_blocks": NUM_BLOCKS + 1}
    planned = EnginePlan(request, plan(request))
    buffer = torch.zeros(planned.plan.buffer_size_bytes, dtype=torch.uint8)
    tensors = Tensors(PlannedViews(planned.plan), BufferViews(buffer))
    store = StoreWorker.open(planned, StoreChoice(name=STORE, num_blocks=NUM_BLOCKS + 1, run_dir=run_dir))
    store.register({name: tensors[name][0] for name in tensors})
    other = torch.empty_like(buffer)
    blocks = tuple(range(1, NUM_BLOCKS + 1))
    took_s: dict[str, list[float]] = {"save": [], "load": [], "memcpy": []}
    for turn in range(1, TURNS + 1):
        hashes = tuple(turn.to_bytes(8, "big") + block.to_bytes(8, "big") for block in blocks)
        saves = tuple(Save(engine_blocks=blocks[at : at + 64], hashes=hashes[at : at + 64], era=None) for at in (0, 64))
        step = Transfers(
            step=turn,
            pool_id=store.pool_id,
            loads=(Load(store_blocks=blocks, engine_blocks=blocks),),
            saves=saves,
        )
        took_s["save"].append(timed(partial(store.save, step)))
        took_s["load"].append(timed(partial(store.load, step)))
        took_s["memcpy"].append(timed(partial(other.copy_, buffer)))
    store.close()
    with Client(run_dir=run_dir) as client:
        client.delete_pool(client.find_pool(STORE).id, wait_s=60)
    save_s, load_s, copy_s = (statistics.median(took_s[name]) / NUM_BLOCKS for name in ("save", "load", "memcpy"))
    print(
        f"a block of {BLOCK_BYTES >> 20} MiB: kept in {save_s * 1e3:.2f} ms, loaded in {load_s * 1e3:.2f} ms; "
        f"a copy of as many bytes {copy_s * 1e3:.2f} ms ({save_s / copy_s:.2f} and {load_s / copy_s:.2f} times it)"
    )


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


if __name__ == "__main__":
    main(sys.argv[1])
