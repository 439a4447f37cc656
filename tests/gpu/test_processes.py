"""Two processes and one piece of device memory: what a kernel of one writes a kernel of the other reads."""

from __future__ import annotations

import base64

import pytest

from gpu_checks.gpu import Gpu
from gpu_checks.peer import Peer, wait_until_gone
from gpu_checks.tensors import through_dlpack
from kvpage.memory.cuda import CudaIpcMemory, CudaVmmMemory

pytestmark = pytest.mark.gpu

SIZE_BYTES = 4 << 20


@pytest.mark.parametrize("kind", [CudaVmmMemory, CudaIpcMemory])
def test_kernels_of_two_processes_see_what_the_other_wrote(
    gpu: Gpu, holders: None, kind: type[CudaVmmMemory | CudaIpcMemory]
) -> None:
    with kind(gpu.uuid).create(SIZE_BYTES) as chunk, Peer(gpu.uuid) as peer, chunk.map() as mapping:
        here = through_dlpack(mapping)
        handle = base64.b64encode(chunk.handle).decode()
        peer.do("attach", fd=chunk.fd, size_bytes=SIZE_BYTES, kind=kind.handle_kind, handle=handle)
        peer.do("kernel_fill", value=3, size_bytes=SIZE_BYTES)
        assert bool((here == 3).all())
        here.fill_(4)
        gpu.synchronize()
        assert set(bytes.fromhex(peer.do("read", size_bytes=SIZE_BYTES // 64)["bytes"])) == {4}
        del here


def test_memory_outlives_the_process_that_made_it(gpu: Gpu) -> None:
    with Peer(gpu.uuid) as maker:
        made = maker.do("create", size_bytes=SIZE_BYTES)
        with CudaVmmMemory(gpu.uuid).import_chunk(made["fd"], SIZE_BYTES) as chunk, chunk.map() as mapping:
            here = through_dlpack(mapping)
            here.fill_(5)
            wait_until_gone(maker.kill())
            assert bool((here.add_(1) == 6).all())
            del here
