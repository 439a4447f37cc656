"""Uses up what a worker has: each function raises AssertionError unless that ends in a clear error, or in none, and a
service unharmed. What it returns is said in docs/reliability.md.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvpage.errors import NotEnoughMemory, SpecInvalid, TooManyClients
from kvpage.plans import Plan
from kvpage.wire import messages
from kvpage.wire.client import WorkerClient
from support.api_service import ApiService
from support.eventually import TIMEOUT_S, until
from support.leaks import Holdings
from support.pools import OVERHEAD_BYTES, PLAN, PLAN_ID, attach_pool, create_pool
from support.raw_client import RawClient
from support.worker_process import WORKER_COMMAND, WorkerProcess

FEW_FDS = 128
MANY_CLIENTS = 1000
MAX_LAYERS = 4096


@contextlib.contextmanager
def _worker(
    run_dir: Path, *arguments: str, max_fds: int | None = None, settle_s: float = TIMEOUT_S
) -> Iterator[WorkerProcess]:
    """Afterwards it serves, has no pool, no reserved byte and no more descriptors than at first."""
    command = WORKER_COMMAND
    if max_fds is not None:
        command = ["sh", "-c", f'ulimit -n {max_fds}; exec "$@"', "sh", *WORKER_COMMAND]
    with WorkerProcess(run_dir, *arguments, command=command) as worker, worker.client() as client:
        client.request(messages.ListPools())
        num_fds = worker.num_fds()
        yield worker
        for pool in client.ask(messages.ListPools(), messages.PoolList).pools:
            client.ask(messages.DeletePool(pool_id=pool.pool_id, timeout_s=60), messages.PoolDeleted)
        state = client.ask(messages.DescribeDevice(), messages.DeviceState)
        assert (state.num_pools, state.reserved_bytes) == (0, 0), state
        assert worker.settles_at(num_fds, client, settle_s), "descriptors are left"


def num_clients(client: WorkerClient) -> int:
    """How many the worker has by now: one that has left is one of them until the worker looks."""
    return client.ask(messages.DescribeDevice(), messages.DeviceState).num_clients


def slow_clients(run_dir: Path) -> str:
    """Clients that ask for descriptors and never take them, as many as the worker admits, do not block others."""
    with _worker(run_dir, max_fds=FEW_FDS) as worker, worker.client() as good, contextlib.ExitStack() as stack:
        create_pool(good, size_bytes=4096)
        num_slow = 0
        with contextlib.suppress(TooManyClients):
            while num_slow < FEW_FDS:
                before = num_clients(good)
                worker.client().close()  # is there room for one more?
                until(lambda before=before: num_clients(good) == before)  # type: ignore[misc]
                slow = stack.enter_context(RawClient(worker.socket_path))
                slow.send(messages.Attach(name="mimo"))
                num_slow += 1
        assert 0 < num_slow < FEW_FDS, "the limit was not reached"
        for _ in range(100):
            attached, mapping = attach_pool(good)
            mapping.close()
            good.ask(messages.Detach(hold_id=attached.hold_id), messages.Detached)
        stack.close()
    return f"{num_slow} clients that take nothing, limit of {FEW_FDS} files: 100 of 100 attaches of another went on"


def more_clients_than_files(run_dir: Path) -> str:
    """Those beyond the limit are told so, and one that leaves makes room."""
    with _worker(run_dir, max_fds=FEW_FDS) as worker, contextlib.ExitStack() as stack:
        clients: list[WorkerClient] = []
        try:
            while len(clients) < FEW_FDS:
                clients.append(stack.enter_context(worker.client()))
        except TooManyClients as error:
            refused = error.code
        before = num_clients(clients[1])
        clients[0].close()
        until(lambda: num_clients(clients[1]) == before - 1)
        clients.append(stack.enter_context(worker.client()))
        for client in clients[1:]:
            client.request(messages.ListPools())
    return f"{len(clients) - 1} served, the next one `{refused}`"


def many_clients(run_dir: Path) -> str:
    """A thousand connect, and each of them is answered."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MANY_CLIENTS + 200
    if hard < wanted:
        return f"not tried: this process may open {hard} files only"
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    try:
        with _worker(run_dir) as worker, contextlib.ExitStack() as stack:
            clients = [stack.enter_context(worker.client()) for _ in range(MANY_CLIENTS)]
            create_pool(clients[0], size_bytes=4096)
            for client in clients:
                attach_pool(client)[1].close()
            state = clients[0].ask(messages.FindPool(name="mimo"), messages.PoolState)
            assert state.num_holders == MANY_CLIENTS
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return f"{MANY_CLIENTS:,} connected and attached"


def a_client_that_never_reads(run_dir: Path) -> str:
    """It is closed when it has taken nothing for 5 s; nobody else waits for it."""
    with _worker(run_dir) as worker, worker.client() as good:
        for number in range(20):
            create_pool(good, f"{number}" + "n" * 250, size_bytes=4096)
        with RawClient(worker.socket_path) as silent:
            silent.socket.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    silent.send(messages.ListPools())
            poll = select.poll()
            poll.register(silent.socket, 0)  # only the end of the connection
            num_answers = 0
            while not poll.poll(0):
                good.request(messages.ListPools())
                num_answers += 1
    return f"closed by the worker, which answered {num_answers:,} requests of another meanwhile"


def more_memory_than_allowed(run_dir: Path) -> str:
    with _worker(run_dir, "--memory", "64MiB") as worker, worker.client() as client:
        create_pool(client, "first", size_bytes=48 << 20)
        for size_bytes in (17 << 20, 2**62):
            with pytest.raises(NotEnoughMemory) as caught:
                create_pool(client, "second", size_bytes=size_bytes)
            assert caught.value.details["available_bytes"] == (16 << 20) - OVERHEAD_BYTES
        assert create_pool(client, "second", size_bytes=(16 << 20) - 2 * OVERHEAD_BYTES).state == "ready"
    return f"`{NotEnoughMemory.code}` with the bytes needed and the bytes there; a pool that fits is made"


def races_for_memory(run_dir: Path, rounds: int = 20) -> str:
    """Two ask at once for more than half of the budget: one gets it, one is told why not."""

    def ask(client: WorkerClient, name: str) -> bool:
        body = messages.CreatePool(name=name, plan_id=PLAN_ID, plan=PLAN, buffer_size_bytes=40 << 20)
        try:
            return client.ask(body, messages.PoolCreated).created
        except NotEnoughMemory:
            return False

    with _worker(run_dir, "--memory", "64MiB") as worker, ThreadPoolExecutor(2) as threads:
        with worker.client() as one, worker.client() as other:
            for _ in range(rounds):
                created = list(threads.map(ask, (one, other), ("one", "other")))
                assert sorted(created) == [False, True], created
                [pool] = one.ask(messages.ListPools(), messages.PoolList).pools
                one.ask(messages.DeletePool(pool_id=pool.pool_id), messages.PoolDeleted)
    return f"{rounds} rounds: one created and one `not-enough-memory` in each"


def most_layers(run_dir: Path) -> str:
    """The largest plan there is, from its request to what an engine receives; one layer more is refused."""

    def request(num_layers: int) -> dict[str, Any]:
        layer = {"kind": "full_attention", "num_kv_heads": 1, "head_size": 8, "dtype": "float16", "block_size": 16}
        return {"layers": [{"name": "l{i}", "count": num_layers, **layer}], "strategy": "unify", "num_blocks": 2}

    with ApiService(run_dir) as service, service.client() as client:
        pool = client.create_pool(request(MAX_LAYERS), name="mimo")
        with pytest.raises(SpecInvalid) as caught:
            client.create_pool(request(MAX_LAYERS + 1), name="larger")
        with WorkerClient(service.run_directory.worker_socket("host"), timeout_s=60) as direct:
            attached, mapping = attach_pool(direct)
            assert attached.plan is not None
            assert len(Plan.from_json(attached.plan).layers) == MAX_LAYERS
            num_bytes = len(attached.plan)
            mapping.close()
        client.delete_pool(pool.id, wait_s=30)
        service.terminate()
    refused = caught.value.code
    return f"{MAX_LAYERS:,} layers planned, made and attached (a plan of {num_bytes:,} bytes); one more: `{refused}`"


def cycles(run_dir: Path, count: int) -> str:
    """Creating, attaching and deleting again and again leaves nothing, in the worker, here, or in the folder."""
    with _worker(run_dir) as worker, worker.client() as client:
        before, files, maps = Holdings.now(), sorted(os.listdir(run_dir)), _num_maps(worker.pid)
        for number in range(count):
            pool = create_pool(client, f"pool {number % 7}", size_bytes=1 << 20)
            with worker.client() as other:
                attach_pool(other, pool.name)[1].close()
            client.ask(messages.DeletePool(pool_id=pool.pool_id, timeout_s=60), messages.PoolDeleted)
        leaks = Holdings.now().leaks_since(before)
        assert not leaks, leaks
        assert sorted(os.listdir(run_dir)) == files
        assert _num_maps(worker.pid) <= maps + 8, "mappings are left"  # the interpreter's own heap may have grown
        assert not Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text()
    return f"{count:,} cycles: no descriptor, mapping, byte, file or process more"


def _num_maps(pid: int) -> int:
    return len(Path(f"/proc/{pid}/maps").read_text().splitlines())
