"""A process that shares a tensor as torch does it by default on Linux: by its file descriptor.

    python benchmarks/torch_sharer.py SOCKET SIZE_BYTES NUM_VIEWS < AUTHKEY

Connections of `multiprocessing` to SOCKET are answered until they end: 1 asks for the whole tensor, anything else for
NUM_VIEWS views of it. One thread answers all of them: with a thread for each, they would wait for their turns with the
interpreter. The thread that hands the descriptors out is that of `multiprocessing`. Writes a line to standard output
when it listens.
"""

from __future__ import annotations

import socket
import sys
from multiprocessing import current_process
from multiprocessing.connection import Connection, wait
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
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(sys.argv[1])
        listener.listen()
        print("ready", flush=True)
        serve(listener, whole, views)


def serve(listener: socket.socket, whole: torch.Tensor, views: list[torch.Tensor]) -> None:
    connections: list[Connection[Any, Any]] = []
    while True:
        for ready in wait([listener, *connections]):
            if ready is listener:
                connections.append(Connection(listener.accept()[0].detach()))
                continue
            assert isinstance(ready, Connection)
            try:
                ready.send(whole if ready.recv() == 1 else views)
            except EOFError:
                ready.close()
                connections.remove(ready)


if __name__ == "__main__":
    main()
