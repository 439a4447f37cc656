"""How a program of the server ends that does not start: its exit status, and what it says."""

from __future__ import annotations

from kvpage.errors import KvpageError, NotSupported, SpecInvalid, TooLarge

CANNOT_START, WRONG_SETTINGS = 1, 2


def exit_status(error: Exception) -> int:
    """2 for what no second try can help, so that init systems need not try (`RestartPreventExitStatus=2`); else 1."""
    is_wrong = isinstance(error, (SpecInvalid, TooLarge)) and not isinstance(error, NotSupported)
    return WRONG_SETTINGS if is_wrong else CANNOT_START


def report(program: str, error: Exception) -> str:
    """Every fault on a line of its own."""
    text = error.message if isinstance(error, KvpageError) else str(error)
    return "\n".join(f"kvpage {program}: {line}" for line in text.splitlines() or [""])
