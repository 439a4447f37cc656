"""Both kinds of device memory keep the contract on a real GPU, with tensors as torch's kernels see them."""

from __future__ import annotations

import pytest
import torch

from gpu_checks.gpu import Gpu
from gpu_checks.tensors import through_dlpack
from kvpage.memory.base import Mapping, MemoryKind
from kvpage.memory.cuda import CudaIpcMemory, CudaVmmMemory
from kvpage.memory.cuda_mapping import CudaMapping
from support.memory_contract import MemoryContract

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

TOO_LARGE = (2 << 20) + 1  # the driver gives 2 MiB at least


class _OnTheGpu(MemoryContract):
    num_cycles = 5  # each starts a process; gpu_check.py does many without
    wrong_sizes = (TOO_LARGE,)

    def bytes_of(self, mapping: Mapping) -> torch.Tensor:
        assert isinstance(mapping, CudaMapping)
        tensor = through_dlpack(mapping)
        assert tensor.is_cuda
        assert tensor.data_ptr() == mapping.address
        return tensor


class TestCudaVmm(_OnTheGpu):
    @pytest.fixture
    def memory(self, gpu: Gpu) -> MemoryKind:
        return CudaVmmMemory(gpu.uuid)


class TestCudaIpc(_OnTheGpu):
    @pytest.fixture
    def memory(self, gpu: Gpu, holders: None) -> MemoryKind:
        return CudaIpcMemory(gpu.uuid)
