"""Devices for a test and for every process it starts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.eventually import until
from support.fakecuda import FakeDevices
from support.fakecuda_here import devices_here


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevices]:
    """Two devices, on which nothing is left when the test ends."""
    devices = devices_here()
    for name, value in devices.env().items():
        monkeypatch.setenv(name, value)
    yield devices
    until(lambda: not any(map(devices.used_bytes, devices.uuids)))
