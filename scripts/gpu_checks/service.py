"""The whole of kvpage on the GPU: `kvpage serve`, a pool, a client that attached, and a worker that dies."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kvpage
from gpu_checks.fresh import compute_pids
from gpu_checks.gpu import MIB, Gpu
from gpu_checks.latency import Watch
from gpu_checks.mapping import leaves_nothing_behind
from gpu_checks.peer import wait_until_gone
from gpu_checks.tensors import wrap_for
from gpu_checks.trial import Failed, Skip, Trial, expect

READY_TIMEOUT_MS = 40_000
POOL_BYTES = 64 * MIB
REQUEST = {
    "strategy": "unify",
    "memory_bytes": POOL_BYTES,
    "max_model_len": 4096,
    "max_num_batched_tokens": 1024,
    "layers": [
        {
            "name": f"{name}.{{i}}",
            "count": 2,
            "kind": "full_attention",
            "num_kv_heads": 8,
            "head_size": head_size,
            "dtype": "bfloat16",
            "backend": "flash_attn",
        }
        for name, head_size in (("target", 192), ("draft", 128))
    ],
}
_NEEDED = ("msgspec", "pydantic", "httpx", "fastapi", "uvicorn", "httptools", "uvloop")


@contextlib.contextmanager
def serving(gpu: Gpu) -> Iterator[str]:
    """The run directory of a real `kvpage serve` of this device, which answers."""
    device = f"cuda:{gpu.device.ordinal}"
    with tempfile.TemporaryDirectory(prefix="kvp-") as folder, open(Path(folder, "log"), "w+b") as log:
        run_dir = str(Path(folder, "run"))
        ready_out, ready_in = os.pipe()
        command = [sys.executable, "-m", "kvpage_server", "serve", "--device", device, "--run-dir", run_dir]
        command += ["--config", os.devnull]  # no settings of this machine
        server = subprocess.Popen([*command, "--ready-fd", str(ready_in)], pass_fds=[ready_in], stdout=log, stderr=log)
        os.close(ready_in)
        try:
            _await_ready(ready_out, log)
            yield run_dir
        finally:
            server.terminate()
            try:
                server.wait(15)
            except subprocess.TimeoutExpired:
                server.kill()


def _await_ready(ready_out: int, log: Any) -> None:
    with open(ready_out, "rb") as ready:
        poll = select.poll()
        poll.register(ready, select.POLLIN)
        poll.poll(READY_TIMEOUT_MS)
        if poll.poll(0) and ready.readline() == b"ready\n":
            return
    log.seek(0)
    raise Failed(f"kvpage serve did not become ready: {log.read().decode(errors='replace')[-600:]}")


def worker_killed(trial: Trial) -> None:
    """The worker is killed by SIGKILL: the client goes on, the next worker has the same pool and the same bytes."""
    require_packages()
    gpu = Gpu(trial.device_uuid)
    wrap = wrap_for(gpu)
    with serving(gpu) as run_dir, kvpage.Client(run_dir=run_dir) as client:
        create_pool(client)
        with kvpage.attach("checked", run_dir=run_dir, wrap=wrap) as kv:
            page = kv.tensor("draft.0")
            page.fill_(1.5)
            gpu.synchronize()
            pid = worker_pid(client)
            trial.saw(_context_of(pid))
            kill(pid)
            expect(bool((page == 1.5).all()), "the bytes have changed")
            page.fill_(2.5)
            gpu.synchronize()
            expect(kv.detached, "the client does not know that the worker died")
            trial.saw("read and written after the worker's death")
            with kvpage.attach("checked", run_dir=run_dir, epoch=kv.epoch, wrap=wrap, timeout_s=30) as again:
                expect(again.buffer.data_ptr() != kv.buffer.data_ptr(), "attached again, it is the old mapping")
                expect(bool((again.tensor("draft.0") == 2.5).all()), "attached again, it has other bytes")
            await_worker_other_than(pid, client)
            trial.saw("attached again through the next worker, same epoch, same bytes")


def attach_cycles(trial: Trial) -> None:
    """`kvpage.attach` and close, over and over, leaves nothing behind."""
    require_packages()
    gpu = Gpu(trial.device_uuid)
    wrap = wrap_for(gpu)
    watch = Watch()

    def cycle() -> None:
        with watch.time("kvpage.attach, to the first tensor"):
            kv = kvpage.attach("checked", run_dir=run_dir, wrap=wrap)
            kv.tensor("draft.0")
        kv.close()

    with serving(gpu) as run_dir, kvpage.Client(run_dir=run_dir) as client:
        create_pool(client)
        leaves_nothing_behind(trial, gpu, "kvpage.attach, close", POOL_BYTES, cycle)
    watch.tell(trial, POOL_BYTES)


def create_pool(client: Any) -> None:
    [device] = client.devices()
    client.create_pool(REQUEST, device=device.device, name="checked")


def require_packages() -> None:
    """Raises `Skip` when this Python cannot run the server."""
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        raise Skip(f"kvpage serve needs {', '.join(missing)}, which this Python does not have")


def await_worker_other_than(pid: int, client: Any) -> None:
    """Clients may find the next worker before the server has noted it. Raises `Failed` when it never does."""
    deadline = time.monotonic() + READY_TIMEOUT_MS / 1000
    while client.devices()[0].worker_pid in (None, pid):
        expect(time.monotonic() < deadline, "no other worker has taken over")
        time.sleep(0.01)


def worker_pid(client: Any) -> int:
    [device] = client.devices()
    if device.worker_pid is None:
        raise Failed(f"there is no worker: {device}")
    return int(device.worker_pid)


def kill(pid: int) -> None:
    """Returns when the process is gone."""
    pidfd = os.pidfd_open(pid)
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    wait_until_gone(pidfd)


def _context_of(pid: int) -> str:
    pids = compute_pids()
    if os.getpid() not in pids:
        return "nvidia-smi does not list this process: whether the worker has a context is not told"
    expect(pid not in pids, f"the worker, pid {pid}, has a context on the device")
    return "the worker has no context, this process has one, as nvidia-smi lists them"
