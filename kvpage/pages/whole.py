"""What is done as a whole, or mended when anything breaks into it."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from kvpage.errors import KvpageError


class Whole:
    """`with whole:` around what changes something. A refusal, a `KvpageError`, leaves everything as it was by itself,
    unless `is_amid` says that it did not; after anything else, even an interruption, `mend` is called.

    Where mending fails too, it is tried again when `with whole:` is entered next.
    """

    def __init__(self, mend: Callable[[], None], is_amid: Callable[[], bool] = bool) -> None:
        self._mend, self._is_amid = mend, is_amid
        self.is_whole = True

    def __enter__(self) -> None:
        if not self.is_whole:
            self._mend()
            self.is_whole = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.failed(error)

    def failed(self, error: BaseException) -> None:
        """For those to whom a `with` is too slow."""
        if isinstance(error, KvpageError) and not self._is_amid():
            return
        self.is_whole = False
        self._mend()
        self.is_whole = True
