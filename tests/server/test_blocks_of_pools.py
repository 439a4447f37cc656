"""What is told of the blocks of a pool that stops being ready between two questions."""

from __future__ import annotations

from typing import Any, cast

import pytest

from kvpage.errors import Conflict, KvpageError, NotSupported, PoolNotFound, StaleHandle, WorkerLost
from kvpage_server.device_pools import DevicePools


class Changed:
    """Stands for the pools of a device whose worker answers with an error."""

    def __init__(self, error: KvpageError) -> None:
        self.error = error

    async def leasable_blocks(self, pool_id: str) -> None:
        raise self.error


async def blocks(error: KvpageError) -> object:
    return await DevicePools.blocks(cast(Any, Changed(error)), "pool-1")


@pytest.mark.anyio
@pytest.mark.parametrize("kind", [Conflict, NotSupported, PoolNotFound, StaleHandle])
async def test_a_pool_whose_blocks_are_gone_by_now_is_described_without_them(kind: type[KvpageError]) -> None:
    assert await blocks(kind("not any more")) is None


@pytest.mark.anyio
async def test_a_worker_that_is_lost_is_told() -> None:
    with pytest.raises(WorkerLost):
        await blocks(WorkerLost("it has gone"))
