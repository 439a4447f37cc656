"""What a sequence is about to take, and what must be copied for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Copy(NamedTuple):
    """All bytes of block `source` go to block `target`, in every layer of the group."""

    group: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Needs:
    """By group, what the next step of a sequence takes."""

    prefix_tokens: int
    """Tokens found in the prefix cache, on the first step."""
    new_blocks: tuple[int, ...]
    """To be allocated."""
    revived_blocks: tuple[int, ...]
    """Blocks of the prefix that are cached and nobody holds: they can be had once less."""
    given_back_blocks: tuple[int, ...]
    """Given back before anything is taken, because no coming token looks back to them."""
