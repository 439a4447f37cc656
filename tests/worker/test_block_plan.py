"""What a worker reads of a plan, and what it spends on the state of its blocks."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

import kvpage
from kvpage.errors import NotSupported
from kvpage.wire import leasing, messages
from kvpage_server.block_plan import FREE_STATE_BYTES, STATE_SHARE, read_block_plan
from support.leased_pools import plan_of
from support.pools import create_pool
from support.worker_process import WorkerProcess

LARGE = {
    "layers": [
        {"kind": "full_attention", "name": "tiny", "block_size": 16, "num_kv_heads": 1, "head_size": 16,
         "dtype": "float8_e4m3fn", "backend": "flash_attn"},
    ],
    "strategy": "unify",
    "num_blocks": 2_000_000,
}  # fmt: skip


def test_a_plan_says_how_large_the_state_of_its_blocks_is() -> None:
    plan = plan_of("mixed")
    known = read_block_plan(plan.to_json(), plan.buffer_size_bytes)
    assert known.plan == plan
    assert 0 < known.state_bytes < FREE_STATE_BYTES
    assert known.why_not == ""


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"\xff", b"[" * 100_000, b'{"made": "up"}', plan_of("flat").to_json()[:-1]],
    ids=["empty", "nothing", "no text", "deep", "made up", "cut"],
)
def test_what_is_no_plan_names_no_blocks(data: bytes) -> None:
    known = read_block_plan(data, 1 << 30)
    assert (known.plan, known.state_bytes) == (None, 0)
    assert "no blocks" in known.why_not


def test_the_state_may_have_a_share_of_the_pool() -> None:
    """The pool here is smaller than its plan says: that is where a made-up plan could cost much."""
    plan = kvpage.plan(LARGE)
    state_bytes = read_block_plan(plan.to_json(), 1 << 40).state_bytes
    assert state_bytes > FREE_STATE_BYTES
    just_enough = read_block_plan(plan.to_json(), state_bytes * STATE_SHARE)
    assert just_enough.plan is not None
    known = read_block_plan(plan.to_json(), (state_bytes - 1) * STATE_SHARE)
    assert (known.plan, known.state_bytes) == (None, 0)
    assert str(state_bytes) in known.why_not


def test_a_plan_with_numbers_that_cannot_be_is_none() -> None:
    plan = plan_of("mixed")
    for num_blocks in (0, 1, 2**40, -1):
        changed = msgspec.json.decode(plan.to_json()) | {"num_blocks": num_blocks}
        known = read_block_plan(msgspec.json.encode(changed), 1 << 40)
        assert known.plan is None, num_blocks


def numpy_is_loaded(worker: WorkerProcess) -> bool:
    return "numpy" in Path(f"/proc/{worker.pid}/maps").read_text()


def test_a_worker_without_leases_does_without_numpy(worker: WorkerProcess) -> None:
    """Also when one asks for a lease of a pool whose plan it cannot read."""
    with worker.client() as client:
        pool = create_pool(client)
        with pytest.raises(NotSupported):
            client.request(leasing.OpenLease(pool_id=pool.pool_id, name="engine"))
        assert not numpy_is_loaded(worker)
        plan = plan_of("flat")
        real = messages.CreatePool(
            name="real", plan_id=plan.plan_id, plan=plan.to_json(), buffer_size_bytes=plan.buffer_size_bytes
        )
        made = client.ask(real, messages.PoolCreated).pool
        client.ask(messages.WaitPool(pool_id=made.pool_id, timeout_s=60), messages.PoolState)
        client.ask(leasing.OpenLease(pool_id=made.pool_id, name="engine"), leasing.LeaseOpened)
        assert numpy_is_loaded(worker)
