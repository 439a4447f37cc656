"""Workers, API process and clients on NVIDIA devices, as real processes on the driver double."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

import kvpage
from kvpage.cli.demo_models import target_and_draft
from kvpage.cli.demo_pattern import check_pool, write_pool
from kvpage.client.attachment import Attachment
from kvpage.errors import (
    Conflict,
    DeviceUnavailable,
    KvpageError,
    NotEnoughMemory,
    NotSupported,
    ProtocolError,
    SpecInvalid,
    StaleHandle,
)
from kvpage.memory.cuda import CudaVmmMemory
from kvpage.memory.host import HostMemory
from kvpage.wire import messages
from kvpage_server.worker_device import cuda_memory
from kvpage_server.worker_import import import_pool
from support.api_service import ApiService, kill_process
from support.eventually import until
from support.fakecuda import FakeDevice, FakeDevices, fake_uuid, live
from support.fakecuda_here import wrap_double
from support.pools import PLAN, PLAN_ID, create_pool
from support.worker_process import WorkerProcess, run_refused_worker
from support.worker_thread import WorkerThread

MIB = 1 << 20


def request(size_bytes: int = 4 * MIB) -> dict[str, Any]:
    layer = {
        "name": "a.{i}",
        "count": 4,
        "kind": "full_attention",
        "num_kv_heads": 8,
        "head_size": 64,
        "dtype": "bfloat16",
    }
    return {"strategy": "unify", "memory_bytes": size_bytes, "layers": [layer]}


def attach(run_dir: Path, name: str = "mimo", **options: Any) -> Attachment:
    return kvpage.attach(name, run_dir=str(run_dir), wrap=wrap_double, **{"timeout_s": 60, **options})


def create(worker: WorkerProcess, name: str, handle_kind: str, size_bytes: int = MIB) -> messages.PoolState:
    body = messages.CreatePool(
        name=name, plan_id=PLAN_ID, plan=PLAN, buffer_size_bytes=size_bytes, handle_kind=handle_kind
    )
    with worker.client() as client:
        pool = client.ask(body, messages.PoolCreated).pool
        return client.ask(messages.WaitPool(pool_id=pool.pool_id, timeout_s=60), messages.PoolState)


def test_the_main_job_on_two_devices_and_the_host_at_once(devices: FakeDevices, run_dir: Path) -> None:
    names = ("cuda:0", devices.uuids[1], "host")
    arguments = [argument for name in names for argument in ("--device", name)]
    with ApiService(run_dir, *arguments) as service, service.client() as client:
        for number, device in enumerate(names):
            client.create_pool(request(), device=device, name=f"pool {number}")
        ours = [attach(run_dir, f"pool {number}") for number in range(3)]
        for number, attachment in enumerate(ours):
            assert not attachment.buffer.any(), "new memory is clear"
            attachment.tensor("a.1").fill_(number + 1)
        for number, device in enumerate(names):
            with attach(run_dir, f"pool {number}", device=device) as other:
                assert other.tensor("a.1").eq(number + 1).all()
                assert not other.tensor("a.0").any()
        for attachment in ours:
            attachment.close()


def test_the_death_of_a_worker_loses_no_byte(devices: FakeDevices, run_dir: Path) -> None:
    with ApiService(run_dir, "--device", "cuda:1") as service, service.client() as client:
        pool = client.create_pool(request(), device="cuda:1", name="mimo")
        before = attach(run_dir)
        before.tensor("a.2").fill_(7)
        kill_process(service.worker_pid())
        after = attach(run_dir, epoch=before.epoch)
        before.tensor("a.3").fill_(8)
        assert after.tensor("a.2").eq(7).all()
        assert after.tensor("a.3").eq(8).all()
        for attachment in (before, after):
            attachment.close()
        del before, after
        client.delete_pool(pool.id, wait_s=60)
        until(lambda: devices.used_bytes(devices.uuids[1]) == 0)


def test_the_death_of_the_api_process_and_then_the_worker_loses_no_byte(devices: FakeDevices, run_dir: Path) -> None:
    with ApiService(run_dir, "--device", "cuda:0") as first:
        with first.client() as client:
            client.create_pool(request(), device="cuda:0", name="mimo")
        before = attach(run_dir)
        before.tensor("a.0").fill_(5)
        worker = first.worker_pid()
        first.kill()
        with ApiService(run_dir, "--device", "cuda:0") as second:
            kill_process(worker)
            with attach(run_dir, epoch=before.epoch) as after:
                assert after.tensor("a.0").eq(5).all()
            before.close()
            with second.client() as client:  # engines may find the next worker before the API process has noted it
                until(lambda: client.devices()[0].worker_pid not in (None, worker))


def test_both_dying_leaves_the_clients_their_bytes_and_a_new_epoch(devices: FakeDevices, run_dir: Path) -> None:
    with ApiService(run_dir, "--device", "cuda:0") as service:
        with service.client() as client:
            client.create_pool(request(), device="cuda:0", name="mimo")
        before = attach(run_dir)
        before.tensor("a.0").fill_(5)
        worker = service.worker_pid()
        service.kill()
        kill_process(worker)
        with ApiService(run_dir, "--device", "cuda:0"):
            with pytest.raises((StaleHandle, KvpageError)):
                kvpage.attach("mimo", run_dir=str(run_dir), wrap=wrap_double, epoch=before.epoch, timeout_s=0)
            assert before.tensor("a.0").eq(5).all()
        assert devices.used_bytes(devices.uuids[0]) > 0, "a client has it mapped"
        before.close()


@pytest.mark.parametrize("kind", ["cuda_vmm", "cuda_ipc"])
def test_a_successor_of_a_running_worker_goes_on_with_its_memory(
    kind: str, devices: FakeDevices, run_dir: Path
) -> None:
    with WorkerProcess(run_dir, device="cuda:0") as worker:
        pool = create(worker, "kept", kind)
        assert pool.state == "ready"
        with WorkerProcess(run_dir, "--replace", device="cuda:0") as successor:
            assert worker.wait() == 0
            with successor.client() as client:
                again = client.ask(messages.FindPool(name="kept"), messages.PoolState)
                assert (again.pool_id, again.state, again.epoch) == (pool.pool_id, "ready", pool.epoch)


def test_memory_by_handle_is_made_on_request_only(devices: FakeDevices, run_dir: Path) -> None:
    with WorkerProcess(run_dir, device="cuda:0") as worker:
        create(worker, "by default", "")
        create(worker, "on request", "cuda_ipc")
        for name, kind in (("by default", "cuda_vmm"), ("on request", "cuda_ipc")):
            with worker.client() as client:
                reply = client.request(messages.Attach(name=name))
                assert isinstance(reply.body, messages.Attached)
                (chunk,) = reply.body.chunks
                assert (chunk.kind, chunk.device_uuid, len(chunk.handle) == 64) == (
                    kind, devices.uuids[0], kind == "cuda_ipc",
                )  # fmt: skip
                for fd in reply.fds:
                    os.close(fd)
        assert create(worker, "on request", "cuda_ipc").state == "ready"
        with pytest.raises(Conflict, match="cuda_ipc"):
            create(worker, "on request", "cuda_vmm")
        with pytest.raises(KvpageError, match="memfd"):
            create(worker, "of the host", "memfd")
        assert "handle\\\\" not in worker.log()


def test_a_device_without_vmm_names_the_other_kind_and_never_takes_it_silently(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeDevices([FakeDevice(uuid=fake_uuid(5), vmm=False)]) as poor:
        for name, value in poor.env().items():
            monkeypatch.setenv(name, value)
        with WorkerProcess(run_dir, device="cuda:0") as worker:
            with pytest.raises(NotSupported, match="ask for handle kind cuda_ipc"):
                create(worker, "mimo", "")
            assert create(worker, "mimo", "cuda_ipc").state == "ready"


def test_the_driver_is_never_loaded_by_worker_or_api(devices: FakeDevices, run_dir: Path) -> None:
    with ApiService(run_dir, "--device", "cuda:0") as service, service.client() as client:
        client.create_pool(request(), device="cuda:0", name="mimo")
        for pid in (service.pid, service.worker_pid()):
            assert "libcuda" not in Path(f"/proc/{pid}/maps").read_text()
        with attach(run_dir):
            assert "libcuda" in Path("/proc/self/maps").read_text(), "the check sees it where it is"


def test_what_others_have_of_the_device_is_told_by_the_pool_that_lacks_it(devices: FakeDevices, run_dir: Path) -> None:
    with WorkerProcess(run_dir, "--memory", "200MiB", device="cuda:0") as worker:
        with CudaVmmMemory(devices.uuids[0]).create(40 * MIB):
            pool = create(worker, "mimo", "", 30 * MIB)
        assert pool.state == "failed"
        assert pool.error is not None
        assert pool.error.code == NotEnoughMemory.code
        assert pool.error.details["needed_bytes"] == 30 * MIB
        assert pool.error.details["available_bytes"] <= 24 * MIB
        assert create(worker, "mimo", "", 30 * MIB).state == "ready"
        with pytest.raises(NotEnoughMemory, match="available on the device"):
            create(worker, "more than the device has", "", 65 * MIB)


def test_a_small_pool_counts_as_what_it_takes_of_the_device(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device gives whole units of 2 MiB: two pools of a page each take 4 MiB of it."""
    with FakeDevices(1, granularity_bytes=2 * MIB) as coarse:
        for name, value in coarse.env().items():
            monkeypatch.setenv(name, value)
        with WorkerProcess(run_dir, "--memory", "4MiB", device="cuda:0") as worker, worker.client() as client:
            for name, kind in (("one", "cuda_vmm"), ("two", "cuda_ipc")):
                assert create(worker, name, kind, 4096).state == "ready"
            state = client.ask(messages.DescribeDevice(), messages.DeviceState)
            assert state.reserved_bytes == coarse.used_bytes(coarse.uuids[0]) == 4 * MIB
            with pytest.raises(NotEnoughMemory, match=f"a pool of 4096 bytes takes {2 * MIB}") as caught:
                create(worker, "three", "", 4096)
            assert caught.value.details["needed_bytes"] == 2 * MIB
            assert caught.value.details["buffer_size_bytes"] == 4096
            held = client.request(messages.Attach(name="one"))
            assert isinstance(held.body, messages.Attached)
            forced = client.ask(messages.DeletePool(pool_id=held.body.pool.pool_id, force=True), messages.PoolDeleted)
            assert forced.pinned_bytes == 2 * MIB
            os.close(held.fds[0])


def test_a_share_of_memory_is_a_share_of_what_is_free_on_the_device(devices: FakeDevices, run_dir: Path) -> None:
    with WorkerProcess(run_dir, "--memory", "0.5", device="cuda:0") as worker, worker.client() as client:
        state = client.ask(messages.DescribeDevice(), messages.DeviceState)
        assert 16 * MIB < state.memory_limit_bytes <= 32 * MIB


@pytest.mark.sampled(3)
@pytest.mark.parametrize("action", ["999", "kill"])
@pytest.mark.parametrize("function", ["cuMemCreate", "cuMemExportToShareableHandle", "cuMemsetD8", "cuMemUnmap"])
def test_a_driver_that_fails_fails_one_pool_and_harms_nothing_else(
    function: str, action: str, devices: FakeDevices, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with WorkerThread(run_dir, device=cuda_memory("cuda:0")) as worker, worker.client() as client:
        assert create_pool(client, "before").state == "ready"
        monkeypatch.setenv("KVPAGE_FAKECUDA_FAULTS", f"{function}:1:{action}")
        failed = create_pool(client, "failed")
        assert (failed.state, failed.committed_bytes) == ("failed", 0)
        assert failed.error is not None
        expected = "status -9" if action == "kill" else f"{function} failed with CUDA_ERROR_UNKNOWN"
        assert expected in failed.error.message
        monkeypatch.setenv("KVPAGE_FAKECUDA_FAULTS", "")
        assert create_pool(client, "failed").state == "ready"
        assert devices.used_bytes(devices.uuids[0]) == 2 * MIB


@pytest.mark.parametrize(
    ("device", "status", "message"),
    [("cuda:9", 1, "not visible"), ("GPU-12345678", 2, "no name of a device"), ("tpu", 2, "no name of a device")],
)
def test_a_device_that_is_not_there_is_refused_at_once(
    device: str, status: int, message: str, devices: FakeDevices, run_dir: Path
) -> None:
    refused = run_refused_worker(run_dir, "--device", device)
    assert refused.returncode == status
    assert message in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.sampled(1)
@pytest.mark.parametrize("is_served_by_uuid", [False, True], ids=["as cuda:1", "by its UUID"])
def test_a_device_is_found_by_either_of_its_names(is_served_by_uuid: bool, devices: FakeDevices, run_dir: Path) -> None:
    uuid = devices.uuids[1]
    served, other = (uuid, "cuda:1") if is_served_by_uuid else ("cuda:1", uuid)
    names = [served, other, *([] if is_served_by_uuid else [uuid.lower()])]
    with ApiService(run_dir, "--device", "cuda:0", "--device", served) as service, service.client() as client:
        for name in names:
            pool = client.create_pool(request(), device=name, name=name)
            assert pool.device == served
            listed = httpx.Client(transport=httpx.HTTPTransport(uds=str(service.run_directory.api_socket)))
            with listed:
                found = listed.get("http://kvpage/v1/pools", params={"device": name}).json()
            assert pool.id in [one["id"] for one in found["pools"]]
            attach(run_dir, name, device=name).close()
            with kvpage.connect(name, run_dir=str(run_dir)) as connection:
                assert connection.device == served
        for unknown in ("cuda:7", fake_uuid(9)):
            with pytest.raises(SpecInvalid, match="not served here"):
                client.create_pool(request(), device=unknown, name="nowhere")
            with pytest.raises(DeviceUnavailable, match="no worker for device"):
                attach(run_dir, "nowhere", device=unknown, timeout_s=0)


def test_a_device_named_twice_is_refused(devices: FakeDevices, run_dir: Path) -> None:
    with pytest.raises(AssertionError, match="are the same"):
        ApiService(run_dir, "--device", "cuda:0", "--device", devices.uuids[0])


def test_without_a_driver_a_device_is_refused_with_what_to_do(run_dir: Path) -> None:
    refused = run_refused_worker(run_dir, "--device", "cuda:0")
    assert refused.returncode == 1
    assert "install the driver" in refused.stderr


def test_a_plan_gives_the_same_bytes_on_a_device_as_on_the_host(devices: FakeDevices, run_dir: Path) -> None:
    wanted = target_and_draft(8 * MIB)
    with ApiService(run_dir, "--device", "cuda:0", "--device", "host") as service, service.client() as client:
        for device in ("host", "cuda:0"):
            client.create_pool(wanted, device=device, name=device)
            with attach(run_dir, device) as writer:
                write_pool(writer)
            with attach(run_dir, device) as reader:
                assert check_pool(reader).values > 0
        with attach(run_dir, "host") as host, attach(run_dir, "cuda:0") as cuda:
            assert torch.equal(host.buffer, cuda.buffer)


def test_a_torch_without_cuda_is_told_and_nothing_is_left(devices: FakeDevices, run_dir: Path) -> None:
    """The production wrap up to torch: cuda.core takes the memory for that of the device, this torch cannot use it."""
    with ApiService(run_dir, "--device", "cuda:1") as service, service.client() as client:
        pool = client.create_pool(request(), device="cuda:1", name="mimo")
        before = live()
        with pytest.raises(NotSupported, match="a build without CUDA"):
            kvpage.attach("mimo", run_dir=str(run_dir), timeout_s=60)
        until(lambda: client.get_pool(pool.id).num_holders == 0)
        until(lambda: live() == before | {"contexts": live()["contexts"]})


ATTACHING = ("cuInit", "cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("function", ATTACHING)
def test_a_client_that_dies_while_it_maps_leaves_nothing(function: str, devices: FakeDevices, run_dir: Path) -> None:
    with WorkerProcess(run_dir, device="cuda:0") as worker, worker.client() as operator:
        plan = kvpage.plan(request())
        body = messages.CreatePool(
            name="mimo", plan_id=plan.plan_id, plan=plan.to_json(), buffer_size_bytes=plan.buffer_size_bytes
        )
        pool = operator.ask(body, messages.PoolCreated).pool
        operator.ask(messages.WaitPool(pool_id=pool.pool_id, timeout_s=60), messages.PoolState)
        environment = os.environ | {"KVPAGE_FAKECUDA_FAULTS": f"{function}:1:kill"}
        program = "import kvpage, sys; kvpage.attach('mimo', run_dir=sys.argv[1], wrap=lambda mapping: None)"
        done = subprocess.run([sys.executable, "-c", program, str(run_dir)], env=environment, check=False)
        assert done.returncode == -signal.SIGKILL
        until(lambda: operator.ask(messages.FindPool(name="mimo"), messages.PoolState).num_holders == 0)
        operator.request(messages.DeletePool(pool_id=pool.pool_id))
        assert devices.used_bytes(devices.uuids[0]) == 0


@pytest.mark.parametrize(
    ("sizes", "message"),
    [([65 * MIB], "on a device of"), ([64 * MIB - 1] * 2, "2 chunks"), ([2**62], "device")],
)
def test_what_is_handed_over_cannot_be_larger_than_the_device(
    sizes: list[int], message: str, devices: FakeDevices, no_leaks: None
) -> None:
    memory = cuda_memory("cuda:0")
    infos = [messages.ChunkInfo(kind="cuda_vmm", size_bytes=size, device_uuid=memory.uuid) for size in sizes]
    fds = [os.open("/dev/null", os.O_RDWR) for _ in range(len(sizes) + 1)]
    with pytest.raises(ProtocolError, match=message):
        import_pool(infos, fds, device="cuda:0", memory=memory, control_memory=HostMemory())


def test_a_worker_adopts_nothing_that_cannot_be_device_memory(devices: FakeDevices, no_leaks: None) -> None:
    memory = cuda_memory("cuda:0")
    info = messages.ChunkInfo(kind="cuda_vmm", size_bytes=MIB, device_uuid=memory.uuid)
    fds = [os.open("/dev/null", os.O_RDWR) for _ in range(2)]
    with pytest.raises(ProtocolError, match="not one of NVIDIA's"):
        import_pool([info], fds, device="cuda:0", memory=memory, control_memory=HostMemory())
