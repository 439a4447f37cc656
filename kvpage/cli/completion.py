"""What shells offer after TAB. It never says an error and never takes long: then nothing is offered.

A pool's name is chosen by others, and shells put what is offered onto the command line as it stands: names with
characters that a shell obeys are not offered.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from kvpage.errors import KvpageError

TIMEOUT_S = 1.0
_PLAIN = re.compile(r"[A-Za-z0-9._:@%+=,/-]+")
Complete = Callable[[str], list[str]]


def pools(ctx: Any, incomplete: str) -> list[str]:
    """Names, and ids where an id was begun."""
    found = _asked(ctx, lambda client: client.pools())
    return _matching((one.id if incomplete.startswith("pool-") else one.name for one in found), incomplete)


def devices(ctx: Any, incomplete: str) -> list[str]:
    """Those that the service has; without one, the device that every machine has."""
    found = _asked(ctx, lambda client: client.devices())
    return _matching([one.device for one in found] or ["host"], incomplete)


def tenants(ctx: Any, incomplete: str) -> list[str]:
    """Of the pool that is named already."""
    found = _asked(ctx, lambda client: client.tenants(client.find_pool(ctx.params["pool"]).id))
    return _matching((one.name for one in found), incomplete)


def among(values: Callable[[], Iterable[str]]) -> Complete:
    """Of a list in the code, which is looked up when it is needed."""

    def complete(incomplete: str) -> list[str]:
        return _matching(values(), incomplete)

    return complete


def listed(values: Callable[[], Iterable[str]]) -> Complete:
    """As `among`, for values with commas between."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        taken = set(before.split(","))
        return [f"{before}{comma}{value}" for value in _matching(values(), last) if value not in taken]

    return complete


def _matching(values: Iterable[str], begun: str) -> list[str]:
    return sorted({value for value in values if value.startswith(begun) and _PLAIN.fullmatch(value)})


def _asked(context: Any, ask: Callable[[Any], list[Any]]) -> list[Any]:
    """What the service that is named so far says."""
    from kvpage.cli.options import connect

    typed = {name: context.params.get(name) for name in ("url", "token_file", "ca_file", "run_dir")}
    try:
        with connect(typed, timeout_s=TIMEOUT_S) as client:
            return ask(client)
    except (KvpageError, OSError, KeyError):
        return []
