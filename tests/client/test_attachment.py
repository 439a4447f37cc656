"""Attaching: tensors over a real worker's memory, and what happens to them when things end."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kvpage
from kvpage.client.views import wrap_mapping
from kvpage.errors import (
    DeviceUnavailable,
    NotFound,
    PoolNotFound,
    ProtocolError,
    SpecInvalid,
    StaleHandle,
    WorkerLost,
)
from kvpage.memory.base import Mapping
from kvpage.plans import Plan
from kvpage.wire import messages
from support.eventually import until
from support.leaks import Holdings
from support.plan_requests import small_request
from support.worker_process import WorkerProcess

STATES = {
    "name": "state.{i}",
    "count": 4,
    "kind": "mamba",
    "shapes": [[3, 64], [4, 16, 16]],
    "dtypes": ["bfloat16", "float32"],
}


@pytest.fixture
def worker(no_leaks: None, run_dir: Path) -> Iterator[WorkerProcess]:
    with WorkerProcess(run_dir) as process:
        yield process
    gc.collect()


def make_pool(worker: WorkerProcess, plan: Plan, *, name: str = "mimo", data: bytes | None = None) -> str:
    """The id of a ready pool of `plan`; `data`: what the worker is told the plan is."""
    with worker.client() as client:
        body = messages.CreatePool(
            name=name,
            plan_id=plan.plan_id,
            plan=plan.to_json() if data is None else data,
            buffer_size_bytes=plan.buffer_size_bytes,
        )
        pool_id = client.ask(body, messages.PoolCreated).pool.pool_id
        assert client.ask(messages.WaitPool(pool_id=pool_id, timeout_s=60), messages.PoolState).state == "ready"
        return pool_id


def num_holders(worker: WorkerProcess, pool_id: str) -> int:
    with worker.client() as client:
        return client.ask(messages.GetPool(pool_id=pool_id), messages.PoolState).num_holders


def attach(worker: WorkerProcess, name: str = "mimo") -> kvpage.Attachment:
    return kvpage.attach(name, run_dir=str(worker.run_directory.path))


def test_tensors_have_the_planned_shapes_and_strides_and_share_the_buffer(worker: WorkerProcess) -> None:
    plan = kvpage.plan(small_request(layers=[*small_request()["layers"], STATES | {"page_size_padded": 12288}]))
    make_pool(worker, plan)
    with attach(worker) as kv:
        assert list(kv.tensors) == list(plan.layers)
        for name, layer in plan.layers.items():
            for view, tensor in zip(layer.tensors, kv.tensors[name], strict=True):
                item = tensor.element_size()
                assert tuple(tensor.shape) == view.shape
                assert tuple(stride * item for stride in tensor.stride()) == view.strides_bytes
                assert tensor.data_ptr() - kv.buffer.data_ptr() == view.offset_bytes
                assert str(tensor.dtype) == f"torch.{view.dtype}"


def test_regions_are_addresses_of_what_the_tensors_hold(worker: WorkerProcess) -> None:
    make_pool(worker, kvpage.plan(small_request()))
    with attach(worker) as kv:
        page, regions = kv.tensor("draft.0")[3], kv.regions()
        page.view(torch.int16).copy_(torch.arange(page.numel(), dtype=torch.int16).view(page.shape))
        (region,) = regions.layer("draft.0").of_block(3)
        assert (region.start, region.length_bytes) == (page.data_ptr(), page.numel() * 2)
        assert ctypes.string_at(*region) == page.view(torch.int16).numpy().tobytes()
        assert regions.whole == (kv.buffer.data_ptr(), kv.plan.buffer_size_bytes)
        del page
    with pytest.raises(StaleHandle):
        kv.regions()


def test_what_one_attachment_writes_another_reads(worker: WorkerProcess) -> None:
    make_pool(worker, kvpage.plan(small_request()))
    with attach(worker) as writer, attach(worker) as reader:
        assert writer.buffer.data_ptr() != reader.buffer.data_ptr(), "two mappings, in one process as in two"
        writer.tensor("draft.3")[5, 1].fill_(7)
        assert bool((reader.tensor("draft.3")[5, 1] == 7).all())
        # bfloat16 7.0 is 0x40E0, two bytes that are not 0; fresh memory is 0 everywhere else.
        assert int((reader.buffer != 0).sum()) == 2 * 16 * 128, "nothing else was touched"


def test_a_tensor_outlives_its_attachment_and_keeps_the_hold(worker: WorkerProcess) -> None:
    pool_id = make_pool(worker, kvpage.plan(small_request()))
    kv = attach(worker)
    view = kv.tensor("target.0")[1:3, 0]
    kv.close()
    kv.close()
    view.fill_(3)
    assert num_holders(worker, pool_id) == 1, "the memory is mapped, so the worker must know"
    del view
    gc.collect()
    until(lambda: num_holders(worker, pool_id) == 0)
    with pytest.raises(StaleHandle, match="closed"):
        kv.tensor("target.0")


def test_closing_a_connection_ends_no_attachment_made_through_it(worker: WorkerProcess) -> None:
    pool_id = make_pool(worker, kvpage.plan(small_request()))
    with kvpage.connect(run_dir=str(worker.run_directory.path)) as connection:
        first, second = connection.attach("mimo"), connection.attach("mimo")
    assert num_holders(worker, pool_id) == 2
    first.close()
    until(lambda: num_holders(worker, pool_id) == 1)
    second.tensor("target.0").fill_(1)
    second.close()
    until(lambda: num_holders(worker, pool_id) == 0)
    with pytest.raises(StaleHandle, match="connect again"):
        connection.attach("mimo")


def test_a_killed_worker_leaves_the_tensors_readable(worker: WorkerProcess) -> None:
    make_pool(worker, kvpage.plan(small_request()))
    with attach(worker) as kv:
        tensor = kv.tensor("target.1")
        tensor.fill_(5)
        worker.kill()
        assert bool((tensor == 5).all())
        tensor.fill_(6)
        assert bool((kv.tensor("target.1") == 6).all())
    with pytest.raises(WorkerLost):
        kvpage.attach("mimo", run_dir=str(worker.run_directory.path), timeout_s=0)


def test_another_plan_and_another_epoch_are_refused(worker: WorkerProcess) -> None:
    plan = kvpage.plan(small_request())
    make_pool(worker, plan)
    run_dir = str(worker.run_directory.path)
    other = kvpage.plan(small_request(memory_bytes=2 << 20))
    with pytest.raises(StaleHandle):
        kvpage.attach("mimo", run_dir=run_dir, plan_id=other.plan_id)
    with pytest.raises(StaleHandle):
        kvpage.attach("mimo", run_dir=run_dir, epoch="0" * 32)
    with kvpage.attach("mimo", run_dir=run_dir, plan_id=plan.plan_id) as kv:
        epoch = kv.epoch
    with kvpage.attach("mimo", run_dir=run_dir, epoch=epoch) as kv:
        assert kv.plan == plan


def test_a_pool_recreated_with_another_plan_comes_with_that_plan(worker: WorkerProcess) -> None:
    first, second = kvpage.plan(small_request()), kvpage.plan(small_request(memory_bytes=2 << 20))
    pool_id = make_pool(worker, first)
    with kvpage.connect(run_dir=str(worker.run_directory.path)) as connection:
        with connection.attach("mimo") as kv:
            assert kv.plan == first
        with worker.client() as client:
            client.ask(messages.DeletePool(pool_id=pool_id), messages.PoolDeleted)
        make_pool(worker, second)
        with connection.attach("mimo") as kv:
            assert kv.plan == second
            assert kv.buffer.numel() == second.buffer_size_bytes


def test_nothing_is_left_when_an_attach_fails_at_its_last_step(worker: WorkerProcess) -> None:
    pool_id = make_pool(worker, kvpage.plan(small_request()))

    def refuse(mapping: object) -> torch.Tensor:
        raise MemoryError("no tensor today")

    with kvpage.connect(run_dir=str(worker.run_directory.path)) as connection:
        before = Holdings.now()
        with pytest.raises(MemoryError):
            connection.attach("mimo", wrap=refuse)
        gc.collect()
        assert Holdings.now().leaks_since(before) == []
        until(lambda: num_holders(worker, pool_id) == 0)
        connection.attach("mimo").close()


@pytest.mark.parametrize(
    "wrap",
    [
        None,
        5,
        lambda mapping: 5,
        lambda mapping: None,
        lambda mapping: torch.zeros(3, dtype=torch.uint8),
        lambda mapping: wrap_mapping(mapping).view(torch.int8),
        lambda mapping: wrap_mapping(mapping).view(2, -1),
    ],
)
def test_a_wrap_that_makes_no_tensor_of_the_whole_is_refused(worker: WorkerProcess, wrap: Any) -> None:
    pool_id = make_pool(worker, kvpage.plan(small_request()))
    with pytest.raises(SpecInvalid, match="wrap"):
        kvpage.attach("mimo", run_dir=str(worker.run_directory.path), wrap=wrap)
    gc.collect()
    until(lambda: num_holders(worker, pool_id) == 0)


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda data: b"", SpecInvalid),
        (lambda data: data[:-1], SpecInvalid),
        (lambda data: data.replace(b'"offset_bytes":0', b'"offset_bytes":2', 1), SpecInvalid),
        (lambda data: kvpage.plan(small_request(memory_bytes=2 << 20)).to_json(), ProtocolError),
    ],
    ids=["empty", "cut off", "an offset changed", "another plan's"],
)
def test_a_pool_with_a_wrong_plan_is_not_attached(
    worker: WorkerProcess, damage: object, error: type[Exception]
) -> None:
    assert callable(damage)
    plan = kvpage.plan(small_request())
    pool_id = make_pool(worker, plan, data=damage(plan.to_json()) or b"{}")
    with pytest.raises(error):
        attach(worker)
    gc.collect()
    until(lambda: num_holders(worker, pool_id) == 0)


def test_names_that_do_not_exist(worker: WorkerProcess, tmp_path: Path) -> None:
    plan = kvpage.plan(small_request(layers=[*small_request()["layers"], STATES | {"page_size_padded": 12288}]))
    make_pool(worker, plan)
    with pytest.raises(PoolNotFound):
        attach(worker, "nobody")
    with pytest.raises(DeviceUnavailable, match="kvpage serve"):
        kvpage.attach("mimo", run_dir=str(tmp_path), timeout_s=0)
    with attach(worker) as kv:
        with pytest.raises(NotFound, match=r"target\.0"):
            kv.tensor("target.99")
        with pytest.raises(SpecInvalid, match="2 tensors"):
            kv.tensor("state.0")
        assert "target.99" not in kv.tensors
        assert len(kv.tensors) == 19


def test_a_forked_child_is_told_to_attach_again(worker: WorkerProcess) -> None:
    make_pool(worker, kvpage.plan(small_request()))
    with attach(worker) as kv:
        child = os.fork()
        if child == 0:
            try:
                kv.tensor("target.0")
            except StaleHandle:
                os._exit(42)
            os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 42
        kv.tensor("target.0").fill_(1)


def test_a_connection_closed_in_the_middle_of_an_attach_stays_until_the_attachment_ends(worker: WorkerProcess) -> None:
    pool_id = make_pool(worker, kvpage.plan(small_request()))
    connection = kvpage.connect(run_dir=str(worker.run_directory.path))

    def close_first(mapping: Mapping) -> torch.Tensor:
        connection.close()  # as another thread would, when the worker has answered and the attachment is not made yet
        return wrap_mapping(mapping)

    kv = connection.attach("mimo", wrap=close_first)
    assert num_holders(worker, pool_id) == 1
    kv.close()
    until(lambda: num_holders(worker, pool_id) == 0)
