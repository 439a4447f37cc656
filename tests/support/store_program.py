"""A process with an engine of `store_engine` that answers prompts, and dies at a moment of its own choice.

    python store_program.py RUN_DIR STORE MOMENT SEED …

It prints a line once it has answered one prompt for each seed, and waits. MOMENT: before the n-th piece of work it is
killed by itself; 0: never. Pieces are what it asks of the store's worker, and copies.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from kvpage.client.socket_lease import SocketLease
from support.store_engine import StoreEngine, choice, prompt_of

LONG_TOKENS = 4096


class Moments:
    def __init__(self, fatal: int) -> None:
        self._left = fatal

    def before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **more: Any) -> Any:
            self._left -= 1
            if not self._left:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **more)

        return counted


def main(run_dir: str, store: str, moment: str, *seeds: str) -> None:
    torch.set_num_threads(1)
    engine = StoreEngine(choice(run_dir, store))
    moments = Moments(int(moment))
    for owner, name in ((SocketLease, "_ask"), (np, "copyto")):
        setattr(owner, name, moments.before(getattr(owner, name)))
    for seed in seeds:
        engine.answer(prompt_of(int(seed), LONG_TOKENS))
    print("answered", flush=True)
    signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
