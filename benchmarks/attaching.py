"""Attaching a 64 MiB pool of 64 padded layers, beside a bare exchange of a descriptor over the same kind of socket."""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kvpage
from kvpage.run_directory import RunDirectory
from kvpage.wire import messages
from kvpage.wire.client import WorkerClient
from measure import print_table, take_turns

ROUNDS = 1000
MEMORY_BYTES = 64 << 20


def request() -> dict[str, Any]:
    """One wide layer, and 64 narrower ones whose pages are padded to its page."""
    attention = {"kind": "full_attention", "num_kv_heads": 8, "dtype": "bfloat16", "backend": "flash_attn"}
    window = attention | {"kind": "sliding_window", "sliding_window": 1024, "head_size": 128}
    layers = [{"name": "target", "head_size": 192} | attention, {"name": "draft.{i}", "count": 64} | window]
    return {"strategy": "unify", "memory_bytes": MEMORY_BYTES, "layers": layers}


def main() -> None:
    plan = kvpage.plan(request())
    padded = [layer.name for layer in plan.layers.values() if layer.decision == "pad"]
    assert len(padded) == 64, len(padded)
    with tempfile.TemporaryDirectory(prefix="kvpage-bench-") as folder, worker(folder):
        create(folder, plan)
        with kvpage.connect(run_dir=folder) as connection, _bare_exchange() as exchange:

            def attach() -> None:
                connection.attach("bench").close()

            def attach_and_make_all_tensors() -> None:
                with connection.attach("bench") as kv:
                    for name in padded:
                        kv.tensor(name)

            timings = take_turns(
                {
                    "one descriptor over a socket, mapped": exchange,
                    "attach, live connection": attach,
                    "attach, live connection, 64 tensors": attach_and_make_all_tensors,
                    "connect and attach": lambda: kvpage.attach("bench", run_dir=folder).close(),
                },
                rounds=ROUNDS,
            )
    print_table("attaching 64 MiB, 64 padded layers", timings, floor="one descriptor over a socket, mapped")


@contextmanager
def worker(folder: str) -> Iterator[None]:
    ready, told = os.pipe()
    command = [sys.executable, "-m", "kvpage_server", "worker", "--device", "host", "--run-dir", folder]
    process = subprocess.Popen([*command, "--ready-fd", str(told)], pass_fds=[told], stderr=subprocess.DEVNULL)
    os.close(told)
    try:
        os.read(ready, 1)
        yield
    finally:
        os.close(ready)
        process.terminate()
        process.wait()


def create(folder: str, plan: kvpage.Plan) -> None:
    with WorkerClient(RunDirectory(Path(folder)).worker_socket("host")) as client:
        body = messages.CreatePool(
            name="bench", plan_id=plan.plan_id, plan=plan.to_json(), buffer_size_bytes=plan.buffer_size_bytes
        )
        created = client.ask(body, messages.PoolCreated)
        client.ask(messages.WaitPool(pool_id=created.pool.pool_id, timeout_s=60), messages.PoolState)


@contextmanager
def _bare_exchange() -> Iterator[Callable[[], None]]:
    """The floor: a byte goes, a descriptor comes back and is mapped; a thread of this process answers."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    fd = os.memfd_create("floor")
    os.ftruncate(fd, MEMORY_BYTES)

    def answer() -> None:
        while theirs.recv(1):
            socket.send_fds(theirs, [b"x"], [fd])

    def exchange() -> None:
        ours.send(b"x")
        _, [received], _, _ = socket.recv_fds(ours, 1, 1)
        mmap.mmap(received, MEMORY_BYTES).close()
        os.close(received)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield exchange
    finally:
        ours.close()
        thread.join()
        theirs.close()
        os.close(fd)


if __name__ == "__main__":
    main()
