"""`kvpage serve` on a real GPU: a pool, tensors on the device, and a worker that dies."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvpage
from gpu_checks.gpu import Gpu
from gpu_checks.service import REQUEST
from support.api_service import ApiService, kill_process

pytestmark = pytest.mark.gpu


def test_two_attachments_are_the_same_memory_of_the_device(gpu: Gpu, run_dir: Path) -> None:
    with ApiService(run_dir, "--device", f"cuda:{gpu.device.ordinal}") as service, service.client() as client:
        [device] = client.devices()
        client.create_pool(REQUEST, device=device.device, name="checked")
        with (
            kvpage.attach("checked", run_dir=str(run_dir)) as one,
            kvpage.attach("checked", run_dir=str(run_dir)) as two,
        ):
            assert one.buffer.is_cuda
            one.tensor("draft.0").fill_(1.5)
            gpu.synchronize()
            assert one.buffer.data_ptr() != two.buffer.data_ptr()
            assert bool((two.tensor("draft.0") == 1.5).all())
            assert not two.tensor("target.0").any()


def test_a_client_goes_on_when_the_worker_is_killed_and_finds_its_bytes_again(gpu: Gpu, run_dir: Path) -> None:
    with ApiService(run_dir, "--device", f"cuda:{gpu.device.ordinal}") as service, service.client() as client:
        [device] = client.devices()
        client.create_pool(REQUEST, device=device.device, name="checked")
        with kvpage.attach("checked", run_dir=str(run_dir)) as kv:
            page = kv.tensor("draft.0")
            page.fill_(1.5)
            kill_process(service.worker_pid())
            page.add_(1)
            gpu.synchronize()
            with kvpage.attach("checked", run_dir=str(run_dir), epoch=kv.epoch, timeout_s=60) as again:
                assert bool((again.tensor("draft.0") == 2.5).all())
