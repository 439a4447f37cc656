"""How a coordinator reaches the nodes: the contract. Ray is one way, nodes in memory are another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from kvpage.errors import KvpageError
from kvpage.fleet.messages import Answer, Message
from kvpage.fleet.records import ServiceOptions


class Transport(Protocol):
    """Messages may be lost, answers too: an error says only that no answer came, not that nothing was done."""

    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes that have an allocator and are believed to live, sorted."""
        ...

    def bare(self) -> tuple[str, ...]:
        """Names of the nodes that are believed to live and have none, sorted."""
        ...

    def start(self, nodes: Iterable[str], options: ServiceOptions) -> None:
        """Start an allocator on each of these nodes that has none."""
        ...

    def ask(self, questions: Mapping[str, Message], *, timeout_s: float) -> dict[str, Answer | KvpageError]:
        """All at once; an answer or an error for each, whatever befalls a node."""
        ...

    def admitted(self, nodes: Iterable[str], *, timeout_s: float) -> AbstractContextManager[None]:
        """A gate: entered once all these nodes take work at the same time. Raises `DeviceUnavailable` else."""
        ...

    def end(self, nodes: Iterable[str]) -> dict[str, KvpageError]:
        """End the services that allocators started, then the allocators; the errors of nodes where that failed."""
        ...
