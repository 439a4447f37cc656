"""Conversations of several turns: each turn's prompt is all that was said before, and something new."""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from random import Random

from kvpage.errors import SpecInvalid
from kvpage.simulation.streams import LogNormal, RequestLengths, Uniform

MAX_CONVERSATIONS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """A fixed number of people, each in a conversation; when it ends they begin another. Lengths are in tokens.

    Medians and the mean pause are those of the measurements that docs/planning.md compares with. Sigmas, turns and the
    length of a step were not given: they are assumed.
    """

    people: int
    first_prompt: LogNormal = LogNormal(1_340, 0.8)  # noqa: RUF009  # frozen
    later_prompt: LogNormal = LogNormal(330, 0.8)  # noqa: RUF009
    answer: LogNormal = LogNormal(180, 0.8)  # noqa: RUF009
    turns: Uniform = Uniform(3, 10)  # noqa: RUF009
    mean_pause_steps: int = 1_000
    """Between an answer and the next prompt, exponential: 40 s at 40 ms a step."""

    def __post_init__(self) -> None:
        if not 1 <= self.people <= MAX_CONVERSATIONS:
            raise SpecInvalid(f"conversations is {self.people}; choose from 1 to {MAX_CONVERSATIONS:,}")


class Talk:
    """What one person asks, turn by turn. The same for the same random generator, whatever the pool does."""

    def __init__(self, conversations: Conversations, random: Random) -> None:
        self._conversations = conversations
        self._random = random
        self._left = 0
        self._said_tokens = 0

    def pause_steps(self) -> int:
        """Steps before the next turn."""
        return round(-self._conversations.mean_pause_steps * log(1 - self._random.random()))

    def next_turn(self) -> tuple[int, RequestLengths]:
        """(tokens of the prompt that were said before, lengths with those in the prompt)."""
        shape = self._conversations
        if not self._left:
            self._left = shape.turns.draw(self._random)
            self._said_tokens = 0
        self._left -= 1
        new = (shape.later_prompt if self._said_tokens else shape.first_prompt).draw(self._random)
        before = self._said_tokens
        lengths = RequestLengths(before + new, shape.answer.draw(self._random))
        self._said_tokens = lengths.prompt_tokens + lengths.output_tokens
        return before, lengths
