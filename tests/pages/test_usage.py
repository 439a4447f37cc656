"""What a block takes of its pool: all layers' pages of it, not the stride of one."""

from __future__ import annotations

import json

import pytest

import kvpage
from kvpage.pages.leased_pool import LeasedPool
from kvpage.pages.leases import QuotaExceeded
from kvpage.pages.steps import Step
from kvpage.pages.tenants import Tenant
from support.checkout import ROOT


@pytest.mark.parametrize("strategy", ["unify", "scale_then_pad", "slab", "nested"])
@pytest.mark.parametrize("name", ["mimo", "qwen3-next"])
def test_the_blocks_of_a_slab_take_the_slab(name: str, strategy: str) -> None:
    request = json.loads((ROOT / f"examples/{name}.json").read_text()) | {
        "strategy": strategy,
        "max_model_len": 16,
        "max_num_batched_tokens": 16,
    }
    if strategy == "nested":
        request["allocator"] = "slabs"
    request.pop("memory_bytes", None)
    plan = kvpage.plan(request | {"num_blocks": 200})
    with LeasedPool(plan) as pool:
        for group, block_bytes in enumerate(pool.block_bytes):
            cut = plan.groups[group].blocks_per_slab
            assert plan.slab_bytes - cut < block_bytes * cut <= plan.slab_bytes
        lease, _ = pool.open("engine", tenant="a")
        pool.book.set_tenants([Tenant(name="a", quota_bytes=2 * pool.block_bytes[0])])
        pool.do(lease, Step(allocate={0: 2}))
        assert pool.usage.used_bytes("a") == 2 * pool.block_bytes[0]
        with pytest.raises(QuotaExceeded):
            pool.do(lease, Step(allocate={0: 1}))
