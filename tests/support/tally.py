"""What an attack came to: how often it was tried, and what was lost. Nothing may be."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

MAX_TOLD = 20


@dataclass(slots=True)
class Tally:
    tried: int = 0
    losses: list[str] = field(default_factory=list)
    """One for each attack that the service did not come through as it should."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """How those ended that it did come through, for the reader."""

    @property
    def lost(self) -> int:
        return len(self.losses)

    @property
    def survived(self) -> int:
        return self.tried - self.lost

    def survive(self, outcome: str, times: int = 1) -> None:
        self.tried += times
        self.outcomes[outcome] += times

    def lose(self, loss: str) -> None:
        self.tried += 1
        self.losses.append(loss)

    def add(self, other: Tally) -> None:
        self.tried += other.tried
        self.losses += other.losses
        self.outcomes += other.outcomes

    def require_nothing_lost(self) -> None:
        """Raises AssertionError with what was lost, and where nothing was tried."""
        assert self.tried, "nothing was tried"
        assert not self.losses, f"{self.lost} of {self.tried} lost:\n" + "\n".join(self.losses[:MAX_TOLD])

    def told(self) -> str:
        """`3 planned, 1 spec-invalid`, the commonest first."""
        return ", ".join(f"{count:,} {outcome}" for outcome, count in self.outcomes.most_common())
