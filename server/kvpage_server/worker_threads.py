"""Where blocking requests to workers run."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

NUM_ASKING_THREADS, NUM_WAITING_THREADS = 8, 32


class WorkerThreads:
    """Those that are answered late have threads of their own, so that however many of them wait, the others find a
    thread at once.
    """

    def __init__(self) -> None:
        self.asking = ThreadPoolExecutor(NUM_ASKING_THREADS, thread_name_prefix="kvpage-worker-call")
        self.waiting = ThreadPoolExecutor(NUM_WAITING_THREADS, thread_name_prefix="kvpage-worker-wait")

    def shutdown(self) -> None:
        """Waits until every request is answered."""
        self.asking.shutdown()
        self.waiting.shutdown()
