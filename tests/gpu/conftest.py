"""What the tests on a real GPU share. `make test-gpu` runs them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpu_checks.gpu import Gpu
from gpu_checks.tensors import bytes_of, torch_on
from gpu_checks.trial import DOUBLE, Skip
from kvpage.memory import cuda_maker
from kvpage.memory.cuda import CudaIpcMemory, CudaVmmMemory
from kvpage.memory.cuda_device import visible_devices
from kvpage.memory.cuda_driver import CudaDriver


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A process has one libcuda.so.1: once other tests have loaded the driver double, there is no GPU in it."""
    if "gpu" not in config.option.markexpr:
        reason = "needs an NVIDIA GPU, and a process without the driver double: make test-gpu"
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def gpu() -> Gpu:
    """The first device. What driver and torch set up once has been set up, so that it is nobody's leak."""
    first = Gpu(visible_devices(CudaDriver())[0].uuid)  # a driver that is there and cannot be used is an error
    try:
        torch = torch_on(first.uuid)
    except Skip as reason:
        pytest.skip(str(reason))
    assert DOUBLE not in first.device.name, "the driver double is loaded: nothing here would be about a GPU"
    for kind in (CudaVmmMemory, CudaIpcMemory):
        with kind(first.uuid).create(1 << 20) as chunk, chunk.map() as mapping:
            assert not bytes_of(mapping).any()
            torch.cuda.synchronize()
    await_holders()
    return first


@pytest.fixture
def holders() -> Iterator[None]:
    """Processes that hold memory end when nobody uses it any more; the test waits for them."""
    yield
    await_holders()


def await_holders() -> None:
    while cuda_maker.HOLDERS:
        cuda_maker.HOLDERS.pop().wait(60)
