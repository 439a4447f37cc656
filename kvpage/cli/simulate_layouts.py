"""From a plan request to the layouts that `kvpage simulate` compares, and the stream it replays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpage.cli.sizes import parse_bytes
from kvpage.errors import KvpageError, SpecInvalid, TooLarge, shorten
from kvpage.planner.planner import plan
from kvpage.simulation.baseline import POOLS, pools_layout
from kvpage.simulation.layout import SimulatedLayout, layout_of
from kvpage.simulation.streams import BUILT_IN, Stream, stream_of_lengths

COMPARED = ("unify", "scale_then_pad", "slab", "nested", POOLS)
POSSIBLE = (*COMPARED, "auto")
MAX_LENGTHS_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Compared:
    """The layouts there are, and for each strategy without one why."""

    layouts: tuple[SimulatedLayout, ...]
    refused: dict[str, str]


def parse_strategies(text: str) -> tuple[str, ...]:
    """`"unify,nested"` → the two names. Raises `SpecInvalid` naming those that are possible."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in POSSIBLE:
            raise SpecInvalid(f"strategy {shorten(name)!r} in --strategies is none of {', '.join(POSSIBLE)}")
    return names


def without_pools(names: tuple[str, ...]) -> tuple[str, ...]:
    """The split of the pools is known for streams only."""
    return tuple(name for name in names if name != POOLS)


def find_stream(name: str) -> Stream:
    """The built-in stream `name`, or the file of that name. Raises `TooLarge` and `SpecInvalid`."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    shown = f"'{shorten(name)}'"
    try:
        with Path(name).open("rb") as file:
            data = file.read(MAX_LENGTHS_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        reason = error.strerror if isinstance(error, OSError) else error
        raise SpecInvalid(
            f"--stream {shown} is none of {', '.join(BUILT_IN)}, and no file that can be read: {reason}"
        ) from error
    if len(data) > MAX_LENGTHS_BYTES:
        raise TooLarge(f"{shown} has more than {MAX_LENGTHS_BYTES} bytes; take a sample of its requests")
    return stream_of_lengths(data.decode(errors="replace"), shown)


def in_memory(request: Any, memory: str | None) -> dict[str, Any]:
    """The request with the memory of the option, where one is given. Raises `SpecInvalid` where neither names any."""
    if not isinstance(request, dict):
        raise SpecInvalid("a plan request is an object with `layers` or `model`; docs/layout.md has the format")
    if memory is not None:
        named: dict[str, Any] = {name: value for name, value in request.items() if name != "num_blocks"}
        return named | {"memory_bytes": parse_bytes(memory)}
    if request.get("memory_bytes") is None:
        raise SpecInvalid("layouts are compared in equal memory: give --memory, such as --memory 20GiB")
    return dict(request)


def compare(
    request: dict[str, Any], names: Sequence[str], allocator: str | None, stream: Stream | None, seed: int
) -> Compared:
    """A layout for each strategy of `names` that can plan the request; `pools` needs a `stream`.

    Raises the first strategy's error when none can, or the request itself is at fault.
    """
    layouts: dict[str, SimulatedLayout] = {}
    errors: dict[str, KvpageError] = {}
    for name in names:
        if name == POOLS:
            continue
        try:
            layouts[name] = _layout(request, name, allocator)
        except KvpageError as error:
            errors[name] = error
    if not layouts:
        raise next(iter(errors.values()), SpecInvalid("--strategies names only pools; name one that is planned"))
    if POOLS in names and stream is not None:
        layouts[POOLS] = pools_layout(next(iter(layouts.values())), stream, seed)
    return Compared(tuple(layouts.values()), {name: error.message for name, error in errors.items()})


def _layout(request: dict[str, Any], strategy: str, allocator: str | None) -> SimulatedLayout:
    asked = request | {"strategy": strategy}
    if allocator is not None:
        asked["allocator"] = allocator
    return layout_of(plan(asked), memory_bytes=request["memory_bytes"], name=strategy)
