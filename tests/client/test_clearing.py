"""Blocks that are cleared by their holder are zeros, and no byte beside them is another one than before."""

from __future__ import annotations

import gc
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import kvpage
from kvpage.client.attachment import Tensors
from kvpage.client.views import BufferViews, PlannedViews
from kvpage.dtypes import item_size_bytes
from kvpage.errors import SpecInvalid, StaleHandle
from kvpage.pages.allocator import BlockPool
from kvpage.wire import messages
from support.plan_requests import small_request
from support.worker_process import WorkerProcess

ATTENTION = {
    "name": "attention.{i}", "count": 3, "kind": "full_attention", "block_size": 16, "num_kv_heads": 2,
    "head_size": 64, "dtype": "bfloat16", "backend": "flash_attn",
}  # fmt: skip
NARROW = ATTENTION | {"count": 1, "num_kv_heads": 1, "head_size": 32}
WINDOW = ATTENTION | {"name": "window.{i}", "kind": "sliding_window", "sliding_window": 64, "head_size": 96}
STATE = {
    "name": "state.{i}", "count": 2, "kind": "mamba", "shapes": [[3, 64], [4, 16, 16]],
    "dtypes": ["bfloat16", "float32"],
}  # fmt: skip
SLABS = {"strategy": "nested", "allocator": "slabs", "memory_bytes": 16 << 20, "max_groups": 2, "max_model_len": 256}
UNIFY = {"strategy": "unify", "memory_bytes": 1 << 20, "max_model_len": 256}

REQUESTS: dict[str, dict[str, Any]] = {
    "pages 3:2, padded": small_request(memory_bytes=1 << 20),
    "heads before tokens": {**UNIFY, "layers": [ATTENTION, WINDOW], "kv_cache_layout": "HND"},
    "nested slabs": {**SLABS, "layers": [ATTENTION, WINDOW]},
    "states beside attention": {**SLABS, "layers": [NARROW, STATE]},
    "kernel blocks": {**UNIFY, "layers": [ATTENTION | {"backend": "flashinfer", "block_size": 128}]},
    "K before V": {**UNIFY, "layers": [ATTENTION | {"backend": "rocm_attn"}]},
    "interleaved among heads": {**UNIFY, "layers": [ATTENTION | {"backend": "BHLNC"}]},
    "a region for each, heads outermost": {**UNIFY, "layers": [ATTENTION | {"backend": "LHBNC"}]},
    "one buffer over all layers": {**UNIFY, "layers": [ATTENTION], "layered": True},
    "scales within rows": {
        **SLABS,
        "layers": [
            ATTENTION | {"dtype": "int8", "kv_quant": "int8_per_token_head", "backend": "triton_attn"},
            WINDOW | {"dtype": "float8_e4m3fn", "backend": "flash_attn"},
        ],
    },
    "a cache that two layers read": {
        **UNIFY,
        "layers": [ATTENTION, ATTENTION | {"name": "reader", "count": 1, "kv_sharing_target": "attention.0"}],
    },
}  # fmt: skip


def tensors_of(plan: kvpage.Plan, buffer: npt.NDArray[np.uint8]) -> Tensors:
    return Tensors(PlannedViews(plan), BufferViews(torch.from_numpy(buffer)))


def bytes_of(plan: kvpage.Plan, group: int, block: int) -> npt.NDArray[np.intp]:
    """Where all that a block keeps lies in the buffer: from nothing but shapes and strides."""
    places = []
    for name in plan.groups[group].layers:
        for view in plan.layers[name].tensors:
            parts = view.kernel_blocks_per_block
            extents = [range(extent) for extent in view.shape]
            extents[view.block_axis] = range(block * parts, (block + 1) * parts)
            steps = [np.array(extent) * step for extent, step in zip(extents, view.strides_bytes, strict=True)]
            at = np.array([view.offset_bytes])
            for step in steps:
                at = (at[:, None] + step).ravel()
            places.append((at[:, None] + np.arange(item_size_bytes(view.dtype))).ravel())
    return np.unique(np.concatenate(places))


def filled(plan: kvpage.Plan) -> npt.NDArray[np.uint8]:
    """No byte is 0."""
    return np.random.default_rng(1).integers(1, 256, plan.buffer_size_bytes, dtype=np.uint8)


@pytest.mark.parametrize("name", REQUESTS)
def test_every_byte_that_a_block_keeps_is_cleared_and_no_other(name: str) -> None:
    plan = kvpage.plan(REQUESTS[name])
    for group, of_plan in enumerate(plan.groups):
        buffer = filled(plan)
        expected = buffer.copy()
        last = plan.num_blocks * of_plan.blocks_per_slab - 1
        ids = [of_plan.blocks_per_slab, last, last]
        for block in ids:
            expected[bytes_of(plan, group, block)] = 0
        tensors_of(plan, buffer).clear(plan, group, ids)
        assert np.array_equal(buffer, expected)
        payload = sum(
            plan.layers[layer].real_page_size_bytes
            for layer in of_plan.layers
            if plan.layers[layer].kv_sharing_target is None
        )
        assert int(np.count_nonzero(buffer == 0)) == 2 * payload


@pytest.mark.parametrize("name", REQUESTS)
def test_every_byte_that_a_block_keeps_is_copied_and_no_other(name: str) -> None:
    plan = kvpage.plan(REQUESTS[name])
    for group, of_plan in enumerate(plan.groups):
        buffer = filled(plan)
        expected = buffer.copy()
        first, last = of_plan.blocks_per_slab, plan.num_blocks * of_plan.blocks_per_slab - 1
        expected[bytes_of(plan, group, last)] = expected[bytes_of(plan, group, first)]
        tensors_of(plan, buffer).copy(plan, group, first, last)
        assert np.array_equal(buffer, expected)
        for wrong in ((len(plan.groups), first, last), (group, -1, last), (group, first, last + 1)):
            with pytest.raises(SpecInvalid):
                tensors_of(plan, buffer).copy(plan, *wrong)


def test_the_layouts_are_what_they_are_here_for() -> None:
    plans = {name: kvpage.plan(request) for name, request in REQUESTS.items()}
    views = {name: [view for layer in plan.layers.values() for view in layer.tensors] for name, plan in plans.items()}
    assert any(layer.page_size_padded for layer in plans["pages 3:2, padded"].layers.values())
    for name in ("nested slabs", "states beside attention", "scales within rows"):
        assert max(group.blocks_per_slab for group in plans[name].groups) > 1
        assert len(plans[name].groups) > 1
    assert views["kernel blocks"][0].kernel_blocks_per_block == 2
    assert views["K before V"][0].block_axis == 1
    for name in ("K before V", "a region for each, heads outermost"):
        [view] = views[name][:1]
        assert max(view.strides_bytes) > view.strides_bytes[view.block_axis], "other blocks lie within each"
    [view] = views["interleaved among heads"][:1]
    assert view.strides_bytes[1] > view.shape[2] * view.strides_bytes[2], "other layers lie within each block"
    assert plans["a cache that two layers read"].layers["reader"].kv_sharing_target == "attention.0"


def test_r15_attention_in_a_slab_of_states_reads_zeros_once_it_cleared_its_blocks() -> None:
    plan = kvpage.plan(REQUESTS["states beside attention"])
    kinds = [group.kind for group in plan.groups]
    states, attention = kinds.index("mamba"), kinds.index("full_attention")
    assert plan.groups[attention].blocks_per_slab > 5
    buffer = np.zeros(plan.buffer_size_bytes, np.uint8)
    tensors, pool = tensors_of(plan, buffer), BlockPool.of(plan)
    taken = pool.allocate(states, pool.available(states))
    assert pool.to_clear(states, taken).tolist() == []
    for layer in plan.groups[states].layers:
        for tensor in tensors[layer]:
            tensor[taken.tolist()] = float("nan")
    pool.free(states, taken)

    first, second = pool.allocate(attention, 3), pool.allocate(attention, 2)
    keys = tensors[plan.groups[attention].layers[0]][0]
    assert bool(torch.isnan(keys[[*first.tolist(), *second.tolist()]].float()).any()), "what the states left hurts"
    for ids in (first, second):  # two holders, of one slab
        expected = buffer.copy()
        stale = pool.to_clear(attention, ids)
        assert stale.tolist() == ids.tolist()
        for block in stale.tolist():
            expected[bytes_of(plan, attention, block)] = 0
        tensors.clear(plan, attention, stale)
        assert np.array_equal(buffer, expected)
        for layer in plan.groups[attention].layers:
            tensors[layer][0][ids.tolist()] = 1.0
    assert float(keys[first.tolist()].float().min()) == 1, "the second holder left the first one's alone"

    pool.free(attention, first)
    again = pool.allocate(attention, 3)
    assert sorted(again.tolist()) == sorted(first.tolist())
    assert pool.to_clear(attention, again).tolist() == []
    pool.free(attention, [*again, *second])
    state = pool.allocate(states, 1)
    assert pool.to_clear(states, state).tolist() == state.tolist()
    tensors.clear(plan, states, state)
    assert not buffer[bytes_of(plan, states, int(state[0]))].any()


@pytest.mark.parametrize(
    "dtype", ["uint8", "float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64"]
)
def test_blocks_of_every_width_are_cleared(dtype: str) -> None:
    plan = kvpage.plan({**UNIFY, "layers": [STATE | {"dtypes": [dtype, dtype]}]})
    buffer = filled(plan)
    tensors_of(plan, buffer).clear(plan, 0, [1])
    assert not buffer[bytes_of(plan, 0, 1)].any()
    assert buffer[bytes_of(plan, 0, 2)].all()


@pytest.mark.parametrize(
    ("group", "ids"), [(1, [1]), (-1, [1]), (0, [-1]), (0, [10**6]), (0, [1.5]), (0, 1), (0, [[1]])]
)
def test_what_is_no_block_is_refused_and_nothing_cleared(group: int, ids: Any) -> None:
    plan = kvpage.plan({**UNIFY, "layers": [ATTENTION]})
    buffer = filled(plan)
    with pytest.raises(SpecInvalid):
        tensors_of(plan, buffer).clear(plan, group, ids)
    assert buffer.all()
    tensors_of(plan, buffer).clear(plan, 0, [])
    assert buffer.all()


def test_an_attachment_clears_what_another_process_reads(no_leaks: None, run_dir: Path) -> None:
    plan = kvpage.plan(REQUESTS["states beside attention"])
    with WorkerProcess(run_dir) as worker:
        with worker.client() as client:
            body = messages.CreatePool(
                name="mimo", plan_id=plan.plan_id, plan=plan.to_json(), buffer_size_bytes=plan.buffer_size_bytes
            )
            pool_id = client.ask(body, messages.PoolCreated).pool.pool_id
            client.ask(messages.WaitPool(pool_id=pool_id, timeout_s=60), messages.PoolState)
        with (
            kvpage.attach("mimo", run_dir=str(run_dir)) as kv,
            kvpage.attach("mimo", run_dir=str(run_dir)) as other,
        ):
            before = filled(plan)
            other.buffer.copy_(torch.from_numpy(before))
            for group, block in itertools.product(range(len(plan.groups)), (3, 5)):
                kv.clear(group, np.array([block]))
                before[bytes_of(plan, group, block)] = 0
            assert np.array_equal(other.buffer.numpy(), before)
        with pytest.raises(StaleHandle):
            kv.clear(0, [1])
        del kv, other
        gc.collect()
