"""NVIDIA's own Python packages run on the double, however it is loaded."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fakecuda.driver_process import DriverProcess
from support.fakecuda import FakeDevices, library

GRAIN = 65536
NOT_FOUND = 500
PROGRAM = Path(__file__).with_name("bindings_program.py")


def installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # not even the namespace `cuda`
        return False


needs_bindings = pytest.mark.skipif(
    not (installed("cuda.bindings") and installed("cuda.core")), reason="cuda-bindings and cuda-core are not installed"
)


@pytest.fixture
def devices(no_leaks: None) -> Iterator[FakeDevices]:
    with FakeDevices(2, granularity_bytes=GRAIN) as devices:
        yield devices


def run(devices: FakeDevices, *arguments: str, without: str = "") -> dict[str, Any]:
    added = devices.env()
    added.pop(without, None)
    command = [sys.executable, str(PROGRAM), *arguments]
    done = subprocess.run(command, env={**os.environ, **added}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


@needs_bindings
@pytest.mark.parametrize("preloaded", [False, True])
def test_the_whole_path_of_a_client(devices: FakeDevices, preloaded: bool) -> None:
    facts = run(devices, str(library()), without="LD_LIBRARY_PATH") if preloaded else run(devices)
    assert facts == {
        "name": "kvpage driver double: host memory, no GPU",
        "uuid": devices.devices[1].uuid_bytes.hex(),
        "location": 1,
        "dlpack_device": [2, 1],
        "dlpack": [True, 2, 1, 1],
        "owner_lives_with_the_capsule": True,
        "owner_goes_with_the_capsule": True,
        "dlpack_device_of_a_hole": [1, 0],
        "read": "kvpage",
        "ipc_handle": "kvpagefk",
        "refused": "CUDA_ERROR_INVALID_VALUE",
    }
    assert devices.used_bytes(devices.uuids[1]) == 0


def test_functions_are_found_by_name_and_version(devices: FakeDevices) -> None:
    with DriverProcess(devices, init=False) as driver:
        assert driver.ok("address_of", "cuMemAlloc", 3020) == driver.ok("address_of", "cuMemAlloc_v2", 13000)
        assert driver.ok("address_of", "cuMemAlloc", 3020) != driver.ok("address_of", "cuMemFree", 3020)
        assert driver.code("address_of", "cuLaunchKernel", 4000) == NOT_FOUND
        # Other arguments under an old name, so better none than the wrong one.
        assert driver.ok("address_of", "cuCtxGetDevice", 2000) is not None
        assert driver.code("address_of", "cuCtxGetDevice", 13000) == NOT_FOUND
        assert driver.code("address_of", "cuGetProcAddress", 11030) == NOT_FOUND


def test_an_error_has_its_name(devices: FakeDevices) -> None:
    with DriverProcess(devices, init=False) as driver:
        assert driver.ok("error_name", 2) == "CUDA_ERROR_OUT_OF_MEMORY"
        assert driver.code("error_name", 12345) == 1
