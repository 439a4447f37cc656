"""How a coordinator reaches the nodes: the contract. Ray is one way, nodes in memory are another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from kvpage.errors import KvpageError
from kvpage.fleet.messages import Answer, Message


class Transport(Protocol):
    """Messages may be lost, answers too: an error says only that no answer came, not that nothing was done."""

    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes that have an allocator and are believed to live, sorted."""
        ...

    def ask(self, questions: Mapping[str, Message], *, timeout_s: float) -> dict[str, Answer | KvpageError]:
        """All at once; an answer or an error for each, whatever befalls a node."""
        ...

    def admitted(self, nodes: Iterable[str], *, timeout_s: float) -> AbstractContextManager[None]:
        """A gate: entered once all these nodes take work at the same time. Raises `DeviceUnavailable` else."""
        ...
