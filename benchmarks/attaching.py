"""Attaching a 64 MiB pool of 64 padded layers, beside torch's sharing of tensors by file descriptors, and beside a bare
exchange of a descriptor over the same kind of socket.
"""

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
from multiprocessing import current_process
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import kvpage
import torch_sharer
from kvpage.client.known_plans import KNOWN_PLANS
from kvpage.run_directory import RunDirectory
from kvpage.wire import messages
from kvpage.wire.client import WorkerClient
from measure import Effort, Row, compare, take_turns
from report import Pair, Subject, main_of

ROUNDS = 400
MEMORY_BYTES = 64 << 20
NUM_LAYERS = 64
DESCRIPTOR = "one descriptor over a socket, mapped"
TORCH, TORCH_ALL = "torch: a tensor", f"torch: {NUM_LAYERS} tensors"
TORCH_NEW, TORCH_NEW_ALL = f"{TORCH}, a new connection", f"{TORCH_ALL}, a new connection"
LIVE, LIVE_ALL = "attach, a live connection", f"attach, a live connection, {NUM_LAYERS} tensors"
NEW, NEW_ALL = "connect and attach", f"connect and attach, {NUM_LAYERS} tensors"
FIRST_ALL = f"connect and attach, an unknown plan, {NUM_LAYERS} tensors"
PAIRS: tuple[Pair, ...] = (
    (LIVE, TORCH),
    (LIVE_ALL, TORCH_ALL),
    (NEW, TORCH_NEW),
    (NEW_ALL, TORCH_NEW_ALL),
    (FIRST_ALL, TORCH_NEW_ALL),
    (LIVE, DESCRIPTOR),
)
ABOUT = f"""
`benchmarks/attaching.py`. A process maps a pool of 64 MiB that a worker holds, makes the tensors of its {NUM_LAYERS}
padded layers or only that of the whole buffer, and gives it up again. Beside it:

- torch's own sharing by file descriptors (`torch.multiprocessing`, its default on Linux): another process sends a
  tensor of 64 MiB over a connection of `multiprocessing`, or {NUM_LAYERS} views of it, and this process maps it and
  gives it up. It carries neither a layout nor who holds what; it authenticates each time.
- one byte sent, and one descriptor received over a socket and mapped, from a thread of this process: the least that it
  can cost.

A live connection attached before. *Connect and attach* is `kvpage.attach`. A plan is unknown once in a process: it is
sent, and proven here, layer by layer, of which torch's sharing has nothing.
"""


def request() -> dict[str, Any]:
    """One wide layer, and 64 narrower ones whose pages are padded to its page."""
    attention = {"kind": "full_attention", "num_kv_heads": 8, "dtype": "bfloat16", "backend": "flash_attn"}
    window = attention | {"kind": "sliding_window", "sliding_window": 1024, "head_size": 128}
    layers = [{"name": "target", "head_size": 192} | attention, {"name": "draft.{i}", "count": 64} | window]
    return {"strategy": "unify", "memory_bytes": MEMORY_BYTES, "layers": layers}


def measure(effort: Effort) -> list[Row]:
    plan = kvpage.plan(request())
    padded = [layer.name for layer in plan.layers.values() if layer.decision == "pad"]
    assert len(padded) == NUM_LAYERS, len(padded)
    with tempfile.TemporaryDirectory(prefix="kvpage-bench-") as folder, worker(folder):
        create(folder, plan)
        with kvpage.connect(run_dir=folder) as connection, _bare_exchange() as exchange, _torch(folder) as sharing:
            sides = {DESCRIPTOR: exchange} | sharing | _attaching(connection, folder, padded)
            # Peer and own in turn, so that each finds in the processor's caches what the other has left there.
            order = dict.fromkeys(side for pair in PAIRS for side in reversed(pair))
            timed = take_turns({name: sides[name] for name in order}, rounds=effort.rounds(ROUNDS))
    return [compare(timed[ours], timed[peer]) for ours, peer in PAIRS]


def _attaching(connection: kvpage.Connection, folder: str, layers: list[str]) -> dict[str, Callable[[], None]]:
    def made(kv: kvpage.Attachment) -> None:
        with kv:
            for name in layers:
                kv.tensor(name)

    def attach_first() -> kvpage.Attachment:
        KNOWN_PLANS.forget()
        return kvpage.attach("bench", run_dir=folder)

    return {
        LIVE: lambda: connection.attach("bench").close(),
        LIVE_ALL: lambda: made(connection.attach("bench")),
        FIRST_ALL: lambda: made(attach_first()),
        NEW: lambda: kvpage.attach("bench", run_dir=folder).close(),
        NEW_ALL: lambda: made(kvpage.attach("bench", run_dir=folder)),
    }


@contextmanager
def _torch(folder: str) -> Iterator[dict[str, Callable[[], None]]]:
    """What another process shares, asked for over one connection, or over a new one each time."""
    path = f"{folder}/torch.sock"
    command = [sys.executable, str(torch_sharer.__file__), path, str(MEMORY_BYTES), str(NUM_LAYERS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(bytes(current_process().authkey))
        process.stdin.close()
        process.stdout.readline()
        try:
            with Client(path, "AF_UNIX") as live:
                yield {
                    TORCH: lambda: _receive(live, 1),
                    TORCH_ALL: lambda: _receive(live, NUM_LAYERS),
                    TORCH_NEW: lambda: _connect_and_receive(path, 1),
                    TORCH_NEW_ALL: lambda: _connect_and_receive(path, NUM_LAYERS),
                }
        finally:
            process.kill()


def _receive(connection: Connection[Any, Any], what: int) -> None:
    connection.send(what)
    connection.recv()  # and dropped at once, which unmaps it


def _connect_and_receive(path: str, what: int) -> None:
    with Client(path, "AF_UNIX") as connection:
        _receive(connection, what)


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


SUBJECT = Subject(title="Attaching", about=ABOUT, pairs=PAIRS, measure=measure, in_short=PAIRS[:5])

if __name__ == "__main__":
    main_of(SUBJECT)
