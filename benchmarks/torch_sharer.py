"""A process that shares a tensor as torch does it by default on Linux: by its file descriptor.

    python benchmarks/torch_sharer.py SOCKET SIZE_BYTES NUM_VIEWS < AUTHKEY

Connections of `multiprocessing` to SOCKET are answered until they end: 1 asks for the whole tensor, anything else for
NUM_VIEWS views of it. Writes a line to standard output when it listens.
"""

from __future__ import annotations

import sys
import threading
from multiprocessing import current_process
from multiprocessing.connection import Connection, Listener
from typing import Any

import torch
import torch.multiprocessing as torch_multiprocessing


def main() -> None:
    current_process().authkey = sys.stdin.buffer.read()
    size_bytes, num_views = int(sys.argv[2]), int(sys.argv[3])
    assert torch_multiprocessing.get_sharing_strategy() == "file_descriptor"  # type: ignore[no-untyped-call]
    whole: torch.Tensor = torch.zeros(size_bytes, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
    each = size_bytes // num_views
    views = [whole[start * each : (start + 1) * each] for start in range(num_views)]
    with Listener(sys.argv[1], "AF_UNIX", backlog=16) as listener:
        print("ready", flush=True)
        while True:
            connection = listener.accept()
            threading.Thread(target=_answer, args=(connection, whole, views), daemon=True).start()


def _answer(connection: Connection[Any, Any], whole: torch.Tensor, views: list[torch.Tensor]) -> None:
    with connection:
        try:
            while True:
                connection.send(whole if connection.recv() == 1 else views)
        except EOFError:
            return


if __name__ == "__main__":
    main()
