"""Replaces a worker again and again while clients attach all the time, and measures what they notice."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from kvpage.wire import messages
from kvpage.wire.client import WorkerClient
from support.api_service import ApiService, is_alive
from support.eventually import until
from support.plan_requests import small_request
from support.pools import attach_pool, contents

NUM_LOADERS = 2
REPLACE = [sys.executable, "-m", "kvpage_server", "worker", "replace"]


@dataclass(slots=True, kw_only=True)
class Load:
    """Attaches of one client; any fault is raised when it ends."""

    attach: Callable[[], None]
    stop: threading.Event = field(default_factory=threading.Event)
    durations_s: list[float] = field(default_factory=list)
    faults: list[BaseException] = field(default_factory=list)

    def run(self) -> None:
        try:
            while not self.stop.is_set():
                started_s = time.monotonic()
                self.attach()
                self.durations_s.append(time.monotonic() - started_s)
        except BaseException as fault:  # noqa: BLE001 - raised again by whoever waits for this thread
            self.faults.append(fault)


@dataclass(frozen=True, slots=True, kw_only=True)
class Upgrades:
    num_replaced: int
    num_attaches: int
    longest_attach_s: float
    median_attach_s: float
    pauses_s: list[float]
    """As the workers measured them: from the last request served by one to the first by the next."""


def upgrade_under_load(run_dir: Path, num_replaced: int) -> Upgrades:
    """Raises AssertionError when a byte differs, an attach fails, a hold is lost, or anything is left behind."""
    with ApiService(run_dir) as service, ExitStack() as stack:
        with service.client() as client:
            pool = client.create_pool(small_request(), name="mimo")
        socket_path = service.run_directory.worker_socket("host")
        steady = stack.enter_context(WorkerClient(socket_path, client_name="steady", timeout_s=60))
        _, mapping = attach_pool(steady)
        pattern = bytes(range(256)) * (pool.buffer_size_bytes // 256)
        contents(mapping)[: len(pattern)] = pattern

        def attach(client: WorkerClient) -> None:
            attached, mapped = attach_pool(client)
            assert contents(mapped)[: len(pattern)] == pattern, "a byte differs"
            mapped.close()
            client.ask(messages.Detach(hold_id=attached.hold_id), messages.Detached)

        def connect_and_attach() -> None:
            with WorkerClient(socket_path, client_name="coming and going", timeout_s=60) as client:
                attach(client)

        kept = stack.enter_context(WorkerClient(socket_path, client_name="kept", timeout_s=60))
        loads = [Load(attach=lambda: attach(kept)), *(Load(attach=connect_and_attach) for _ in range(NUM_LOADERS))]
        _replace_under(loads, run_dir, num_replaced)
        with service.client() as client:
            assert client.find_pool("mimo").epoch == pool.epoch
            until(lambda: [holder.client_name for holder in client.find_pool("mimo").holders] == ["steady"])
        assert contents(mapping)[: len(pattern)] == pattern
        mapping.close()
        last = service.worker_pid()
        service.terminate()
        assert not is_alive(last), "the server left a worker that stands for one of its own"
    durations_s = sorted(duration for load in loads for duration in load.durations_s)
    return Upgrades(
        num_replaced=num_replaced,
        num_attaches=len(durations_s),
        longest_attach_s=durations_s[-1],
        median_attach_s=durations_s[len(durations_s) // 2],
        pauses_s=_pauses_s(service.run_directory.worker_log("host")),
    )


def _replace_under(loads: list[Load], run_dir: Path, num_replaced: int) -> None:
    threads = [threading.Thread(target=load.run) for load in loads]
    for thread in threads:
        thread.start()
    try:
        for _ in range(num_replaced):
            done = subprocess.run([*REPLACE, "--run-dir", str(run_dir)], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
    finally:
        for load in loads:
            load.stop.set()
        for thread in threads:
            thread.join()
    for load in loads:
        for fault in load.faults:
            raise fault
        assert load.durations_s, "a client attached not once"


def _pauses_s(log: Path) -> list[float]:
    events = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return [event["pause_s"] for event in events if event["event"] == "took_over"]
