"""A real server with the example's pool."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.api_service import ApiService
from support.checkout import ROOT
from support.leaks import leak_guard


@pytest.fixture(scope="module")
def mimo() -> Iterator[ApiService]:
    """Whose pool mimo is that of examples/mimo.json, in little memory."""
    request = json.loads((ROOT / "examples/mimo.json").read_text()) | {"memory_bytes": 8 << 20}
    with leak_guard(), tempfile.TemporaryDirectory(prefix="kvp-") as folder:
        with ApiService(Path(folder), "--memory", "64MiB") as service:
            with service.client() as client:
                client.create_pool(request, name="mimo")
            yield service
