"""A KeyboardInterrupt at each moment of attaching to memory of a device, and of letting go of it, leaves nothing."""

from __future__ import annotations

import gc
from itertools import count
from pathlib import Path

import pytest

import kvpage
from kvpage.wire import messages
from support.eventually import until
from support.fakecuda import FakeDevices, live
from support.fakecuda_here import wrap_double
from support.interrupting import interrupted, quick_holdings
from support.plan_requests import small_request
from support.worker_process import WorkerProcess


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", ["cuda_vmm", "cuda_ipc"])
def test_attaching_and_letting_go(
    kind: str, every: int, seed: int, no_leaks: None, devices: FakeDevices, run_dir: Path
) -> None:
    plan = kvpage.plan(small_request())
    body = messages.CreatePool(
        name="mimo",
        plan_id=plan.plan_id,
        plan=plan.to_json(),
        buffer_size_bytes=plan.buffer_size_bytes,
        handle_kind=kind,
    )

    def attach() -> None:
        kvpage.attach("mimo", run_dir=str(run_dir), wrap=wrap_double).close()

    def held() -> tuple[object, ...]:
        return quick_holdings()[0], live(), num_holders()

    def num_holders() -> int:
        return observer.ask(messages.GetPool(pool_id=pool.pool_id), messages.PoolState).num_holders

    with WorkerProcess(run_dir, device="cuda:0") as worker, worker.client() as observer:
        pool = observer.ask(body, messages.PoolCreated).pool
        observer.ask(messages.WaitPool(pool_id=pool.pool_id, timeout_s=60), messages.PoolState)
        attach()
        gc.collect()
        until(lambda: num_holders() == 0)
        before = held()
        for moment in count(1 + seed % every, every):
            is_over = not interrupted(attach, moment)
            if held() != before:
                gc.collect()
            until(lambda: held() == before)
            if is_over:
                break
    assert moment > 100
