"""Every store into a block pool's buffer, seen before it happens: to keep what a kill would leave, or to die there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvpage.pages.allocator import BlockPool
from kvpage.pages.arrays import Arrays

OnStore = Callable[[Callable[[bool], None]], None]
"""Called before a store with what does it: wholly, or (True) only the first half of a batch."""

_ARRAYS = ("owners", "stale", "refs", "stamps", "log_slots", "refs_before")
_VIEWS = ("header", "owners_at", "stale_at", "refs_at", "stamps_at")


class _WatchedArray(np.ndarray):
    on_store: OnStore | None = None

    def __array_finalize__(self, origin: Any) -> None:
        self.on_store = getattr(origin, "on_store", None)

    def __setitem__(self, key: Any, value: Any) -> None:
        plain = self.view(np.ndarray)

        def store(only_half: bool) -> None:
            places = np.arange(len(plain))[key]
            half = places[: len(places) // 2] if only_half else places
            plain[half] = value if np.ndim(value) == 0 else np.asarray(value)[: len(half)]

        assert self.on_store is not None
        self.on_store(store)


class _WatchedView:
    def __init__(self, view: Any, on_store: OnStore) -> None:
        self.view, self.on_store = view, on_store

    def __getitem__(self, key: Any) -> Any:
        found = self.view[key]
        return _WatchedView(found, self.on_store) if isinstance(key, slice) else found

    def __iter__(self) -> Any:
        return iter(self.view)

    def __len__(self) -> int:
        return len(self.view)

    def __setitem__(self, key: Any, value: Any) -> None:
        def store(only_half: bool) -> None:
            if not only_half:  # one store happens or does not
                self.view[key] = value

        self.on_store(store)


def watch(pool: BlockPool, on_store: OnStore) -> None:
    """From now on the pool's stores into its buffer go through `on_store`."""
    watch_arrays(pool._arrays, on_store)
    pool._recover()


def watch_arrays(arrays: Arrays, on_store: OnStore) -> None:
    for name in _ARRAYS:
        watched = getattr(arrays, name).view(_WatchedArray)
        watched.on_store = on_store
        setattr(arrays, name, watched)
    for name in _VIEWS:
        setattr(arrays, name, _WatchedView(getattr(arrays, name), on_store))
