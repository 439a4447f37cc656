"""Clients that lease blocks of one pool at random, while they, their worker and the API process are killed at random.

    print(soak(folder, seed=1, duration_s=60))

The pool has groups that cut their slabs, and recurrent states. When it is over, everybody stops: the block state is
proved, every block has the tag of who holds it, what each client believes is what is written and what the service says;
then everything is closed, and every block is free.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import IO, Any

import kvpage
from kvpage.client.http import Client
from kvpage.errors import KvpageError
from kvpage.plans import Plan
from kvpage.run_directory import RunDirectory
from kvpage.wire.client import WorkerClient
from support.api_service import ApiService, is_alive, kill_process, worker_pids
from support.eventually import until
from support.lease_proof import Book, ControlView, numbers_fault, prove
from support.leased_pools import attention, state, window
from support.upgrade import REPLACE
from support.worker_process import readable

PROGRAM = Path(__file__).with_name("lease_soak_program.py")
POOL = "soak"
NUM_CLIENTS = 8
KEEP_S = 600.0
NUM_SLABS = 49
_LAST_ENTRIES = 12
_BLOWS = {
    "client": 12, "two clients": 3, "client stopped": 2, "worker": 3, "worker and a client": 2, "API": 2, "replaced": 3,
    "proved": 4,
}  # fmt: skip


def request() -> dict[str, Any]:
    return {
        "layers": [attention("full_attention", 4), window(1), state(8192)],
        "strategy": "nested",
        "allocator": "slabs",
        "num_blocks": NUM_SLABS,
        "max_model_len": 64,
        "max_num_batched_tokens": 64,
    }


@dataclass(slots=True)
class Outcome:
    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    """Of what clients did, those too that were killed, as far as they had told."""
    blows: Counter[str] = field(default_factory=Counter)


class SoakClient:
    """A `lease_soak_program` and its successors."""

    def __init__(self, folder: Path, run_dir: Path, number: int) -> None:
        self._folder, self._run_dir = folder, run_dir
        self.number, self.keep_s = number, KEEP_S if number % 2 else 0.0
        self.num_started = 0
        self.counts = Counter[str]()
        """Of those before it."""
        self._now = Counter[str]()
        self.report: dict[str, Any] | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._unread = b""

    @property
    def name(self) -> str:
        """Of its lease. Who is not kept opens another."""
        return f"client {self.number}" if self.keep_s else f"client {self.number}, {self.num_started}"

    @property
    def journal(self) -> Path:
        return self._folder / f"{self.name}.journal"

    @property
    def log(self) -> Path:
        return self._folder / f"client {self.number}.log"

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    @property
    def stdout(self) -> IO[bytes]:
        assert self._child is not None
        assert self._child.stdout is not None
        return self._child.stdout

    def start(self, seed: int) -> None:
        self.num_started += 1
        self.counts += self._now
        self._now, self._unread = Counter(), b""
        arguments = [str(self._run_dir), POOL, self.name, str(seed), str(self.keep_s), str(self.journal)]
        with self.log.open("ab") as log:
            self._child = subprocess.Popen(
                [sys.executable, str(PROGRAM), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
            )

    def read(self) -> bool:
        """What it has told; whether it is still there."""
        data = os.read(self.stdout.fileno(), 1 << 16)
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            told = json.loads(line)
            self._now = Counter(told["counts"])
            if "held" in told:
                self.report = told
        return bool(data)

    def say(self) -> None:
        """Stop working; said again, end."""
        assert self._child is not None
        assert self._child.stdin is not None
        self._child.stdin.write(b"\n")
        self._child.stdin.flush()

    def kill(self) -> None:
        if self._child is not None and not self.stdout.closed:
            self._child.kill()
            self.wait()

    def wait(self) -> int:
        assert self._child is not None
        status = self._child.wait(60)
        while self.read():
            pass
        with contextlib.suppress(BrokenPipeError), self._child:
            pass
        return status

    def total(self) -> Counter[str]:
        return self.counts + self._now

    def last_words(self) -> str:
        entries = self.journal.read_text().splitlines()[-_LAST_ENTRIES:] if self.journal.exists() else []
        shown = "\n".join(entry[:400] for entry in entries)
        return f"{self.name}, started {self.num_started} times:\n{self.log.read_text()[-4000:]}\nlast did:\n{shown}"


class Soak:
    def __init__(self, folder: Path, seed: int, num_clients: int) -> None:
        self._folder, self.chance = folder, Random(seed)
        self.outcome = Outcome(seed)
        self.run_dir = folder / "run"
        self.run_dir.mkdir(mode=0o700)
        self.service = ApiService(self.run_dir)
        with self.service.client() as client:
            self.pool = client.create_pool(request(), name=POOL)
        self.plan: Plan = kvpage.plan(request())
        with WorkerClient(RunDirectory(self.run_dir).worker_socket("host"), role="api", timeout_s=60) as keeper:
            self.view = ControlView(keeper, self.pool.id)
        self.clients = [SoakClient(folder, self.run_dir, number) for number in range(num_clients)]

    def close(self) -> None:
        for client in self.clients:
            client.kill()
        self.view.close()
        self.service.__exit__()

    # --- while it runs ------------------------------------------------------------------------------------------------

    def run(self, duration_s: float) -> None:
        self.begin()
        deadline_s = time.monotonic() + duration_s
        while time.monotonic() < deadline_s:
            self.listen(self.chance.uniform(0.02, 0.2))
            blow = self.chance.choices([*_BLOWS], [*_BLOWS.values()])[0]
            self._strike(blow)
            self.outcome.blows[blow] += 1

    def begin(self) -> None:
        for client in self.clients:
            self._start(client)

    def _start(self, client: SoakClient) -> None:
        client.start(self.chance.getrandbits(32))

    def listen(self, pause_s: float) -> None:
        """For so long. Raises AssertionError when a client ends by itself."""
        deadline_s = time.monotonic() + pause_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            poll = select.poll()
            for client in self.clients:
                poll.register(client.stdout, select.POLLIN)
            ready = {fd for fd, _ in poll.poll(left_s * 1000)}
            for client in self.clients:
                if client.stdout.fileno() in ready and not client.read():
                    raise AssertionError(f"client {client.number} ended by itself")

    def _strike(self, blow: str) -> None:
        if blow in ("client", "two clients"):
            self._kill_clients(1 if blow == "client" else 2)
        elif blow == "client stopped":
            self._stop_a_client()
        elif blow in ("worker", "worker and a client"):
            kill_process(self.service.worker_pid())
            if blow != "worker":
                self._kill_clients(1)
        elif blow == "API":
            self.service.kill()
            self.service = ApiService(self.run_dir)
        elif blow == "replaced":
            done = subprocess.run(
                [*REPLACE, "--run-dir", str(self.run_dir)], capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr
        else:
            self._prove_stopped()
        if blow in ("worker", "worker and a client", "API", "replaced"):
            self._await_service()

    def _kill_clients(self, count: int) -> None:
        for client in self.chance.sample(self.clients, count):
            client.kill()
            self._start(client)

    def _stop_a_client(self) -> None:
        """It does not die, and is slow to ask and to hear."""
        client = self.chance.choice(self.clients)
        os.kill(client.pid, signal.SIGSTOP)
        self._kill_clients(1)
        with contextlib.suppress(ProcessLookupError):
            os.kill(client.pid, signal.SIGCONT)

    def _prove_stopped(self) -> None:
        """The worker, stopped at some instruction, would leave to its successor what is sound."""
        worker = self.service.worker_pid()
        os.kill(worker, signal.SIGSTOP)
        try:
            state = self.view.copy()
        finally:
            os.kill(worker, signal.SIGCONT)
        prove(self.plan, state, is_quiet=False)

    def _await_service(self) -> None:
        """Until the API process has handed a worker everything; were both dead at once, the pool would be lost."""

        def is_ready() -> bool:
            with self.service.client() as client:
                try:
                    [device] = client.devices()
                    found = client.get_pool(self.pool.id)
                except KvpageError as error:
                    if error.retryable:
                        return False
                    raise
                alive = device.worker_pid is not None and is_alive(device.worker_pid)
                return alive and found.state == "ready" and client.health().status == "ready"

        until(is_ready)

    # --- when it is over ----------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Raises AssertionError when anything does not hold."""
        self.stop()
        with self.service.client() as http:
            until(lambda: _blocks(http, self.pool.id).num_leases == len(self.clients))
            books = {client.name: self._book(client) for client in self.clients}
            written = prove(self.plan, self.view.copy())
            assert written == books, f"{written} is written, and clients have {books}"
            fault = numbers_fault(_blocks(http, self.pool.id), books)
            assert fault is None, fault
            self._verify_tensors()
            for client in self.clients:
                client.say()
            for client in self.clients:
                assert client.wait() == 0, client.last_words()
                self.outcome.counts += client.total()
            self._all_free(http)
        worker = self.service.worker_pid()
        assert self.service.terminate() == -signal.SIGTERM
        assert not is_alive(worker)
        assert not worker_pids(RunDirectory(self.run_dir))
        assert not [path.name for path in self.run_dir.iterdir() if path.is_socket()], "a socket file is left"

    def stop(self) -> None:
        """Have everybody stop and tell what they hold. May be called twice."""
        if all(client.report is not None for client in self.clients):
            return
        for client in self.clients:
            client.say()
        for client in self.clients:
            while client.report is None:
                assert readable(client.stdout.fileno()), "a client does not stop"
                assert client.read(), f"client {client.number} ended by itself"

    def _book(self, client: SoakClient) -> Book:
        assert client.report is not None
        book: Book = {}
        for group, block, times, _ in client.report["held"]:
            book.setdefault(group, {})[block] = times
        return book

    def _verify_tensors(self) -> None:
        """As an engine sees them."""
        with kvpage.attach(POOL, run_dir=str(self.run_dir)) as kv:
            for client in self.clients:
                assert client.report is not None
                for group, block, _, tag in client.report["held"]:
                    tensor = kv.tensors[self.plan.groups[group].layers[0]][0]
                    found = tensor[block].contiguous().view(kv.buffer.dtype).flatten()[: len(tag) // 2]
                    assert bytes(found.tolist()).hex() == tag, f"{client.name}: block {block} of {group} is another's"
            del tensor, found  # they keep the memory mapped

    def _all_free(self, http: Client) -> None:
        until(lambda: _blocks(http, self.pool.id).num_leases == 0)
        told = _blocks(http, self.pool.id)
        assert all(group.used == group.leased == group.quarantined == 0 for group in told.groups), told
        assert told.free_slabs + told.idle_slabs + 1 == told.num_slabs, told
        assert prove(self.plan, self.view.copy()) == {}
        http.delete_pool(self.pool.id, wait_s=30)

    def last_words(self) -> str:
        return "\n\n".join([*(client.last_words() for client in self.clients), self.service.log()[-3000:]])


def _blocks(http: Client, pool_id: str) -> Any:
    found = http.get_pool(pool_id).blocks
    assert found is not None
    return found


@contextlib.contextmanager
def telling(made: Soak) -> Iterator[None]:
    """An error also tells the seed and what was done last, and everything is ended."""
    try:
        yield
    except BaseException as fault:
        seed = made.outcome.seed
        raise AssertionError(f"seed {seed}: {type(fault).__name__}: {fault}\n{made.last_words()}") from fault
    finally:
        made.close()


def soak(folder: Path, *, seed: int, duration_s: float, num_clients: int = NUM_CLIENTS) -> Outcome:
    """Raises AssertionError when anything does not hold."""
    made = Soak(folder, seed, num_clients)
    with telling(made):
        made.run(duration_s)
        made.finish()
    return made.outcome
