"""A thread for work that takes long, so that the loop never waits for it."""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable
from typing import TypeVar

from kvpage.errors import InternalError, KvpageError
from kvpage_server.worker_log import log

_T = TypeVar("_T")


class Helper:
    """Runs jobs one after another in its own thread and posts each outcome to the loop."""

    def __init__(self, name: str, post: Callable[[Callable[[], None]], None]) -> None:
        self._post = post
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name)
        self._thread.start()

    def submit(self, job: Callable[[], _T], done: Callable[[_T | KvpageError], None]) -> None:
        """Run `job` here, then `done` in the loop with what it returned, or with the error it raised."""

        def work() -> None:
            outcome = _outcome(job)
            self._post(lambda: done(outcome))

        self._jobs.put(work)

    def stop(self) -> None:
        """Finish the jobs that were submitted and end the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._jobs.get()) is not None:
            work()


def _outcome(job: Callable[[], _T]) -> _T | KvpageError:
    try:
        return job()
    except KvpageError as error:
        return error
    except Exception as error:  # noqa: BLE001 - the thread must outlive any job
        log("internal_error", level="error", traceback=traceback.format_exc())
        return InternalError(f"the worker failed at this: {type(error).__name__}")
