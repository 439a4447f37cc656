"""Kills one process at one step of one operation, lets its successor start, and looks at what is left."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvpage.client.http import Client
from kvpage.client.resources import Pool
from kvpage.errors import KvpageError, PoolNotFound
from kvpage.wire import messages
from kvpage.wire.channel import close_fds
from support.dying import DyingApi, DyingWorker
from support.eventually import until
from support.plan_requests import small_request
from support.pools import attach_pool, contents, export_pool
from support.remote_client import RemoteClient
from support.worker_process import WorkerProcess

TEXT = "written before anybody died"


class Leaked(AssertionError):
    """Nothing is lost, but something is left behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    survived_the_operation: bool
    """Whether the operation ended before its step came: no later step needs to be tried."""


class Scene:
    """A worker, a server that keeps its pools too, a pool with `TEXT` in it, and an engine that has it mapped."""

    def __init__(self, run_dir: Path, device: str = "host") -> None:
        self.run_dir = run_dir
        self.device = device
        self.worker: WorkerProcess = DyingWorker(run_dir, device=device)
        self.api = DyingApi(run_dir, device=device)
        self.engine = RemoteClient()
        self.precious = self.create("precious")
        with self.client() as client:
            [described] = client.devices()
            self._reserved_bytes = described.reserved_bytes
        self._attach_engine()
        self.engine.do("write", offset=4096, data=TEXT)

    def close(self) -> None:
        self.engine.__exit__()
        self.api.__exit__()
        self.worker.__exit__()

    def client(self) -> Client:
        return self.api.client()

    def create(self, name: str) -> Pool:
        with self.client() as client:
            return client.create_pool(small_request(), device=self.device, name=name)

    def replace_worker(self, step: int = 0) -> None:
        """Kill it if it lives; the next one dies at `step` of what it does after `arm`."""
        if not self.worker.ended:
            self.worker.kill()
        self.worker = DyingWorker(self.run_dir, step, device=self.device)

    def replace_api(self, step: int = 0) -> None:
        if not self.api.ended:
            self.api.kill()
        self.api = DyingApi(self.run_dir, step, device=self.device)

    def arm_worker(self) -> None:
        assert isinstance(self.worker, DyingWorker)
        self.worker.arm()

    def await_ready(self) -> None:
        """Until the server has handed this worker everything."""
        with self.client() as client:
            until(lambda: [device.worker_pid for device in client.devices()] == [self.worker.pid])

    def check(self) -> None:
        """Nothing is lost: the pool, its bytes, its epoch, and that it can be attached by those who know the epoch."""
        self.await_ready()
        with self.client() as client:
            now = client.find_pool("precious")
            kept = (now.id, now.epoch, now.plan_id, now.state)
            assert kept == (self.precious.id, self.precious.epoch, self.precious.plan_id, "ready"), now
        assert self._read() == TEXT, "the engine's bytes have changed"
        self._attach_engine()
        assert self._read() == TEXT, "attached again, it has other bytes"

    def check_nothing_else(self) -> None:
        """Nothing is left over: no other pool, no byte of the budget, no descriptor. Raises `Leaked`."""
        try:
            self._check_nothing_else()
        except AssertionError as error:
            raise Leaked(str(error)) from error

    def _check_nothing_else(self) -> None:
        with self.client() as client:
            assert [pool.name for pool in client.pools()] == ["precious"]
            [device] = client.devices()
            assert device.reserved_bytes == self._reserved_bytes
        with self.worker.client() as direct:  # a descriptor of the pool's memory, and one of its control block
            until(lambda: _num_memory_fds(self.worker.pid) == 2 and direct.request(messages.ListPools()))
        until(lambda: _num_memory_fds(self.api.pid) == 2)

    def _attach_engine(self) -> None:
        self.engine.do("connect", socket=str(self.worker.socket_path), name="engine")
        answer = self.engine.do("attach", name="precious", epoch=self.precious.epoch)
        assert "error" not in answer, answer

    def _read(self) -> str:
        return str(self.engine.do("read", offset=4096, size_bytes=len(TEXT))["data"])


@contextlib.contextmanager
def scene(run_dir: Path, device: str = "host") -> Iterator[Scene]:
    made = Scene(run_dir, device)
    try:
        yield made
    finally:
        made.close()


def _num_memory_fds(pid: int) -> int:
    """Descriptors of host memory, or of device memory as the driver double has it."""
    names = []
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            names.append(os.readlink(f"/proc/{pid}/fd/{number}"))
    return sum(name.startswith("/memfd:") or "/kvp-gpu-" in name for name in names)


# --- what is done when the blow falls --------------------------------------------------------------------------------


def create(on: Scene) -> None:
    assert on.create("fresh").state == "ready"


def delete(on: Scene) -> None:
    with on.client() as client:
        with contextlib.suppress(PoolNotFound):  # an earlier attempt got as far as that
            client.delete_pool(_fresh(client).id, wait_s=30)


def attach(on: Scene) -> None:
    with on.worker.client() as client:
        _, mapping = attach_pool(client, "precious")
        assert bytes(contents(mapping)[4096 : 4096 + len(TEXT)]) == TEXT.encode()
        mapping.close()


def detach(on: Scene) -> None:
    with on.worker.client() as client:
        attached, mapping = attach_pool(client, "precious")
        mapping.close()
        client.ask(messages.Detach(hold_id=attached.hold_id), messages.Detached)


def export(on: Scene) -> None:
    with on.worker.client(role="api") as keeper:
        _, fds = export_pool(keeper, on.precious.id)
        close_fds(fds)


def _fresh(client: Client) -> Pool:
    return client.find_pool("fresh")


def _nothing(on: Scene) -> None:
    """No preparation."""


OPERATIONS: dict[str, tuple[Callable[[Scene], None], Callable[[Scene], None]]] = {
    "create": (_nothing, create),
    "attach": (_nothing, attach),
    "detach": (_nothing, detach),
    "export": (_nothing, export),
    "delete": (create, delete),
}
"""Preparation, and the operation itself: both may be done twice."""


# --- the blows -------------------------------------------------------------------------------------------------------

Blow = Callable[[Scene, int], Trial]
"""Kill at this step of something; all of it is checked."""


def kill_worker_during(on: Scene, operation: str, step: int) -> Trial:
    prepare, perform = OPERATIONS[operation]
    on.replace_worker(step)
    on.await_ready()
    prepare(on)
    on.arm_worker()
    done = _attempt(perform, on)
    survived = done and not on.worker.ended
    on.replace_worker()
    on.check()
    _repeat(perform, on)
    delete(on)
    on.check_nothing_else()
    return Trial(survived_the_operation=survived)


def kill_worker_during_adoption(on: Scene, step: int) -> Trial:
    os.kill(on.api.pid, signal.SIGSTOP)  # so that nothing is handed over before the steps count
    on.replace_worker(step)
    on.arm_worker()
    os.kill(on.api.pid, signal.SIGCONT)
    with on.client() as client:
        until(lambda: on.worker.ended or [device.worker_pid for device in client.devices()] == [on.worker.pid])
    survived = not on.worker.ended
    on.replace_worker()
    on.check()
    on.check_nothing_else()
    return Trial(survived_the_operation=survived)


def kill_worker_during_replacement(on: Scene, step: int) -> Trial:
    """While it hands everything to a worker that is to replace it; that one serves, or another is started."""
    on.replace_worker(step)
    on.await_ready()
    on.arm_worker()
    old = on.worker
    with contextlib.suppress(AssertionError):  # it got too little to serve
        on.worker = WorkerProcess(on.run_dir, "--replace", device=on.device)
    survived = old.wait() == 0
    if on.worker is old:
        on.replace_worker()
    on.check()
    on.check_nothing_else()
    return Trial(survived_the_operation=survived)


def kill_api_during(on: Scene, operation: str, step: int) -> Trial:
    prepare, perform = OPERATIONS[operation]
    on.replace_api(step)
    prepare(on)
    on.api.arm()
    done = _attempt(perform, on)
    survived = done and not on.api.ended
    on.replace_api()
    on.check()
    _repeat(perform, on)
    delete(on)
    on.check_nothing_else()
    return Trial(survived_the_operation=survived)


def kill_api_while_it_learns(on: Scene, step: int) -> Trial:
    """While a new server asks the worker for its pools and takes duplicates of their descriptors."""
    on.api.kill()
    os.kill(on.worker.pid, signal.SIGSTOP)
    on.api = DyingApi(on.run_dir, step, device=on.device, wait_ready=False)
    with on.client() as client:
        until(lambda: _answers(client))
        on.api.arm()
        os.kill(on.worker.pid, signal.SIGCONT)
        until(lambda: on.api.ended or _is_ready(client))
    survived = not on.api.ended
    on.replace_api()
    on.check()
    on.check_nothing_else()
    return Trial(survived_the_operation=survived)


def every_step(kill: Callable[[int], Trial]) -> int:
    """Kill at step 1, 2, 3 … until the operation ends before its step comes; how many steps it has."""
    step = 1
    while not kill(step).survived_the_operation:
        step += 1
    return step - 1


def kill_both_in_turn(on: Scene, operation: str, step: int) -> Trial:
    """The worker during the operation; when its successor has everything, the server; then the worker again."""
    trial = kill_worker_during(on, operation, step)
    on.replace_api()
    on.check()
    on.replace_worker()
    on.check()
    on.check_nothing_else()
    return trial


def _during(kill: Callable[[Scene, str, int], Trial], operation: str) -> Blow:
    return lambda on, step: kill(on, operation, step)


BLOWS: dict[str, Blow] = {
    **{f"worker, {name}": _during(kill_worker_during, name) for name in OPERATIONS},
    "worker, adoption": kill_worker_during_adoption,
    "worker, replacement": kill_worker_during_replacement,
    **{f"server, {name}": _during(kill_api_during, name) for name in ("create", "delete")},
    "server, learning": kill_api_while_it_learns,
    "both in turn, create": _during(kill_both_in_turn, "create"),
}
"""Who dies, and during what."""


def _attempt(perform: Callable[[Scene], None], on: Scene) -> bool:
    """Whether it was done. A failure must say that it may be tried again."""
    try:
        perform(on)
    except KvpageError as error:
        if not error.retryable:
            raise AssertionError(f"{error.code} is no answer to who may try again: {error.message}") from error
        return False
    return True


def _repeat(perform: Callable[[Scene], None], on: Scene) -> None:
    """After the death of one, the operation can be done, whatever the first attempt got to."""
    until(lambda: _attempt(perform, on))


def _answers(client: Client) -> bool:
    try:
        client.health()
    except KvpageError:
        return False
    return True


def _is_ready(client: Client) -> bool:
    try:
        return client.health().status == "ready"
    except KvpageError:
        return False
