"""A pool as people name it: by its id or its name."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING

from kvpage.errors import PoolNotFound

if TYPE_CHECKING:
    from kvpage.client.http import Client
    from kvpage.client.resources import Pool

_POOL_ID = re.compile(r"pool-[0-9a-f]{16}")


def find(client: Client, pool: str, device: str | None) -> Pool:
    """The pool of that id or name. Ids come first: nobody chooses them."""
    if _POOL_ID.fullmatch(pool):
        with contextlib.suppress(PoolNotFound):
            found = client.get_pool(pool)
            if device in (None, found.device):
                return found
    return client.find_pool(pool, device)
