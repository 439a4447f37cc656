"""The two simulations behind `kvpage simulate`: compute, then print."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvpage.cli.simulate_layouts import compare, find_stream, without_pools
from kvpage.cli.simulate_output import print_cache_rows, print_rows
from kvpage.errors import SpecInvalid
from kvpage.simulation.conversations import Conversations
from kvpage.simulation.report import (
    CONVERSATION_STEPS,
    CONVERSATION_WARM_UP_STEPS,
    Extent,
    replay_conversations,
    replay_layouts,
)
from kvpage.simulation.streams import CHAT


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the command line says, whatever is replayed."""

    request: dict[str, Any]
    strategies: tuple[str, ...]
    allocator: str | None
    seed: int
    runs: int
    steps: int | None
    warm_up_steps: int | None
    as_json: bool

    def extent(self, steps: int, warm_up_steps: int) -> Extent:
        """How much to replay; the arguments are for what was left out."""
        return Extent(
            steps=steps if self.steps is None else self.steps,
            warm_up_steps=warm_up_steps if self.warm_up_steps is None else self.warm_up_steps,
            runs=self.runs,
            seed=self.seed,
        )


def replay(wanted: Wanted, stream: str | None, conversations: int | None) -> None:
    """So many conversations at once, or a stream (None: chat). Raises `SpecInvalid` for both."""
    if conversations is None:
        _replay_stream(wanted, stream or CHAT.name)
    elif stream is None:
        _replay_conversations(wanted, conversations)
    else:
        raise SpecInvalid("--prefix-caching replays conversations, which are no --stream; leave one of the two out")


def _replay_stream(wanted: Wanted, name: str) -> None:
    """A stream of requests that have nothing in common."""
    stream = find_stream(name)
    extent = wanted.extent(stream.steps, 0)
    compared = compare(wanted.request, wanted.strategies, wanted.allocator, stream, wanted.seed)
    rows = list(replay_layouts(compared.layouts, stream, extent))
    print_rows(stream, extent, rows, compared.refused, as_json=wanted.as_json)


def _replay_conversations(wanted: Wanted, people: int) -> None:
    """Conversations whose turns share a prefix."""
    conversations = Conversations(people=people)
    extent = wanted.extent(CONVERSATION_STEPS, CONVERSATION_WARM_UP_STEPS)
    compared = compare(wanted.request, without_pools(wanted.strategies), wanted.allocator, None, wanted.seed)
    rows = list(replay_conversations(compared.layouts, conversations, extent))
    print_cache_rows(conversations, extent, rows, compared.refused, as_json=wanted.as_json)
