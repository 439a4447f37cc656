"""Kills one process at one step of what a lease does, lets its successor start, and proves the pool.

The client goes on by itself: what it had asked for is done once. After every death the block state is copied out of the
control block and proved, and what each client believes it holds is what is written there.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvpage.client.http_lease import HttpLease
from kvpage.errors import NotFound, WorkerLost
from kvpage.pages.steps import Content, Step
from kvpage.plans import Plan
from kvpage.wire import leasing, messages
from kvpage.wire.channel import close_fds
from kvpage.wire.leasing import MAX_TTL_S
from support.dying import DyingApi, DyingWorker, arm, dying_command
from support.eventually import until
from support.kill_matrix import Leaked, Trial
from support.lease_proof import Book, ControlView, numbers_fault, prove
from support.leased_pools import content, plan_of
from support.pools import export_pool, finish_adoption
from support.worker_process import WorkerProcess, readable

PROGRAM = Path(__file__).with_name("lease_remote_program.py")
POOL = "mimo"
TOKEN = "0123456789abcdef"
LONG_S = 600.0
_TIMEOUT_MS = 60_000


class Client:
    """A `lease_remote_program`; `step` as of `dying_command`, armed by `arm`."""

    def __init__(self, run_dir: Path, step: int | str = 0) -> None:
        command = dying_command(run_dir, step, str(PROGRAM)) if step else [sys.executable, str(PROGRAM)]
        self._run_dir = run_dir
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.ended = False
        """Whether it has died by its step."""

    @property
    def pid(self) -> int:
        return self._child.pid

    def fileno(self) -> int:
        assert self._child.stdout is not None
        return self._child.stdout.fileno()

    def arm(self) -> None:
        arm(self.pid, self._run_dir)

    def send(self, command: str, **arguments: Any) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps({"do": command, **arguments}) + "\n")
        self._child.stdin.flush()

    def answer(self) -> dict[str, Any] | None:
        """None: it has died."""
        assert readable(self.fileno()), "no answer"
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            self.ended = True
            return None
        found: dict[str, Any] = json.loads(line)
        return found

    def do(self, command: str, **arguments: Any) -> dict[str, Any] | None:
        if self.ended:
            return None
        try:
            self.send(command, **arguments)
        except BrokenPipeError:
            self.ended = True
            return None
        return self.answer()

    def kill(self) -> None:
        self._child.kill()
        with contextlib.suppress(BrokenPipeError), self._child:
            pass  # closes the pipes and waits

    close = kill


class Scene:
    """A worker, who keeps its pools for the next one, a pool, and two clients of it who live on."""

    def __init__(self, run_dir: Path, plan: Plan | None = None) -> None:
        self.run_dir = run_dir
        self.plan = plan_of("three", 17) if plan is None else plan
        self.worker: WorkerProcess = DyingWorker(run_dir)
        self.keeper = self.worker.client(role="api")
        body = messages.CreatePool(
            name=POOL, plan_id=self.plan.plan_id, plan=self.plan.to_json(),
            buffer_size_bytes=self.plan.buffer_size_bytes,
        )  # fmt: skip
        self.pool_id = self.keeper.ask(body, messages.PoolCreated).pool.pool_id
        self.keeper.ask(messages.WaitPool(pool_id=self.pool_id, timeout_s=60), messages.PoolState)
        self.chunks, self.fds = export_pool(self.keeper, self.pool_id)
        self.view = ControlView(self.keeper, self.pool_id)
        self.first, self.second = Client(run_dir), Client(run_dir)
        self.extra: list[Client] = []
        self._number = 0
        self.succeed()
        _open_both(self)
        for client, lease in ((self.first, "first"), (self.second, "second")):
            self.ask(client, "close", lease=lease)
        until(lambda: self.told().num_leases == 0)
        self._idle = self._left()

    def close(self) -> None:
        for client in (self.first, self.second, *self.extra):
            client.close()
        self.view.close()
        close_fds(self.fds)
        self.keeper.close()
        self.worker.__exit__()
        self.run_dir.with_name(f"{self.run_dir.name}.log").unlink(missing_ok=True)  # of API processes

    # --- the worker and its successors --------------------------------------------------------------------------------

    def hand_over(self, then: Callable[[], None] = lambda: None) -> None:
        """What was kept to the worker that runs now; `then` when it is connected and has not been asked yet."""
        self.keeper.close()
        self.keeper = self.worker.client(role="api")
        then()
        self.keeper.ask(messages.AdoptPool(chunks=self.chunks), messages.PoolState, self.fds)
        finish_adoption(self.keeper)

    def succeed(self, step: int | str = 0) -> None:
        """The worker is dead, or killed now; the next one dies at `step` of what it does after `arm`."""
        if not self.worker.ended:
            self.worker.kill()
        self.worker = DyingWorker(self.run_dir, step)
        self.hand_over()

    def arm_worker(self) -> None:
        assert isinstance(self.worker, DyingWorker)
        self.worker.arm()

    def ask(self, client: Client, command: str, **arguments: Any) -> dict[str, Any]:
        """Of a client that lives. When the worker dies meanwhile it has a successor, and the client goes on."""
        client.send(command, **arguments)
        died = self._await(client)
        if died:
            self.succeed()
        answer = client.answer()
        assert answer is not None, f"the client ended at {command}"
        return answer

    def _await(self, *others: Client) -> bool:
        """Whether the worker has died before any of these answers."""
        pidfd = os.pidfd_open(self.worker.pid)
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            for other in others:
                poll.register(other.fileno(), select.POLLIN)
            ready = [fd for fd, _ in poll.poll(_TIMEOUT_MS)]
        finally:
            os.close(pidfd)
        assert ready, "neither did the client answer nor did the worker die"
        return pidfd in ready and not set(ready) - {pidfd}

    def until(self, holds: Callable[[], bool]) -> None:
        """Of the worker, or of its successor if it dies meanwhile."""

        def attempt() -> bool:
            if self.worker.ended:
                self.succeed()
            try:
                return holds()
            except WorkerLost:
                return False

        until(attempt)

    def told(self) -> leasing.BlocksState:
        return self.keeper.ask(leasing.DescribeBlocks(pool_id=self.pool_id), leasing.BlocksState)

    # --- clients ------------------------------------------------------------------------------------------------------

    def another(self, step: int | str = 0) -> Client:
        self.extra.append(Client(self.run_dir, step))
        return self.extra[-1]

    def begin(self, client: Client, command: str, lease: str, **more: Any) -> dict[str, Any]:
        """`open` or `adopt`."""
        return self.ask(client, command, pool=POOL, run_dir=str(self.run_dir), lease=lease, token=TOKEN, **more)

    def hashes(self, num_blocks: int) -> list[list[str]]:
        """Of a prompt that no other trial has, by group."""
        self._number += 1
        return [
            [content((self._number << 16) + (group << 8) + block + 1).hex() for block in range(num_blocks)]
            for group in range(len(self.plan.groups))
        ]

    # --- what must hold -----------------------------------------------------------------------------------------------

    def check(self, others: Mapping[str, Book] = MappingProxyType({})) -> None:
        """What the clients that live believe, and `others`, is what the worker says, and what is written; the pool is
        sound."""
        books = dict(others)
        for client in (self.first, self.second, *self.extra):
            if not client.ended:
                answer = self.ask(client, "audit")
                assert "error" not in answer, answer
                books |= {lease: _book(entries) for lease, entries in answer["books"].items()}
        written = prove(self.plan, self.view.copy())
        assert written == books, f"{written} is written, and clients have {books}"
        fault = numbers_fault(self.told(), books)
        assert fault is None, fault

    def check_nothing_left(self) -> None:
        """When every lease is closed. Raises `Leaked`."""
        for client in (self.first, self.second, *self.extra):
            if not client.ended:
                for lease in self.ask(client, "audit")["books"]:
                    self.ask(client, "close", lease=lease)
        for client in self.extra:
            client.close()
        self.extra.clear()
        try:
            self._check_nothing_left()
        except AssertionError as error:
            raise Leaked(str(error)) from error

    def _check_nothing_left(self) -> None:
        until(lambda: self.told().num_leases == 0)
        assert prove(self.plan, self.view.copy()) == {}
        told = self.told()
        assert all(group.used == group.leased == group.quarantined == 0 for group in told.groups), told
        assert told.free_slabs + told.idle_slabs + 1 == told.num_slabs, told
        until(lambda: self._left() == self._idle)

    def _left(self) -> Counter[str]:
        """Descriptors of the worker by their kinds, and what of shared memory it has mapped."""
        self.told()
        found = Counter[str]()
        for number in os.listdir(f"/proc/{self.worker.pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                name = os.readlink(f"/proc/{self.worker.pid}/fd/{number}")
                found[name.partition(":[")[0].partition(" ")[0]] += 1
        maps = Path(f"/proc/{self.worker.pid}/maps").read_text().splitlines()
        found["mapped"] = sum("/memfd:" in line for line in maps)
        return found


def _book(entries: Sequence[tuple[int, int, int]]) -> Book:
    book: Book = {}
    for group, block, times in entries:
        if times:
            book.setdefault(group, {})[block] = times
    return book


@contextlib.contextmanager
def scene(run_dir: Path) -> Iterator[Scene]:
    made = Scene(run_dir)
    try:
        yield made
    finally:
        made.close()


# --- what is done when the blow falls --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    prepare: Callable[[Scene], Any]
    perform: Callable[[Scene, Any], None]
    """With what `prepare` returned."""


def _done(answer: dict[str, Any]) -> dict[str, Any]:
    assert "error" not in answer, answer
    return answer


def _open_both(on: Scene) -> None:
    for client, lease in ((on.first, "first"), (on.second, "second")):
        _done(on.begin(client, "open", lease))


def _furnish(on: Scene) -> dict[int, list[int]]:
    """Both leases have blocks of every group, and share some: what `first` has, by group."""
    _open_both(on)
    mine: dict[int, list[int]] = {}
    for client, lease in ((on.first, "first"), (on.second, "second")):
        ids = _done(on.ask(client, "step", lease=lease, allocate={0: 2, 1: 3, 2: 1}))["ids"]
        mine = mine or {int(group): some for group, some in ids.items()}
    _done(on.ask(on.second, "step", lease="second", retain={group: ids[:1] for group, ids in mine.items()}))
    return mine


def _allocate(on: Scene, _: Any) -> None:
    ids = _done(on.ask(on.first, "step", lease="first", allocate={0: 1, 1: 5, 2: 2}))["ids"]
    assert {group: len(some) for group, some in ids.items()} == {"0": 1, "1": 5, "2": 2}


def _free(on: Scene, mine: dict[int, list[int]]) -> None:
    _done(on.ask(on.first, "step", lease="first", free=mine))


def _share(on: Scene, mine: dict[int, list[int]]) -> None:
    hashes = on.hashes(8)
    commit = {group: (ids, hashes[group][: len(ids)]) for group, ids in mine.items()}
    _done(on.ask(on.first, "step", lease="first", retain=mine, commit=commit, free={1: mine[1][:1]}, allocate={0: 1}))


def _commit_prompt(on: Scene) -> list[list[str]]:
    """A prompt of 64 tokens that `first` has computed, and half of it given back."""
    _open_both(on)
    hashes = on.hashes(4)
    ids = _done(on.ask(on.first, "step", lease="first", allocate={0: 4, 1: 4, 2: 4}))["ids"]
    commit = {group: (some, hashes[int(group)]) for group, some in ids.items()}
    free = {group: some[2:] for group, some in ids.items()}
    _done(on.ask(on.first, "step", lease="first", commit=commit, free=free))
    return hashes


def _take_prefix(on: Scene, hashes: list[list[str]]) -> None:
    taken = _done(on.ask(on.second, "take_prefix", lease="second", hashes=hashes, tokens=64))
    assert taken["tokens"] == 64


def _reserve(on: Scene, _: Any) -> None:
    _done(on.ask(on.first, "reserve", lease="first", counts={0: 2, 1: 3}))


def _reserved(on: Scene) -> None:
    _furnish(on)
    _reserve(on, None)


def _commit(on: Scene, _: Any) -> None:
    """A reservation is lost with its worker, unless it was committed before."""
    answer = on.ask(on.first, "commit", lease="first")
    assert answer.get("error", "not-found") == "not-found", answer
    if "error" not in answer:
        assert {group: len(some) for group, some in answer["ids"].items()} == {"0": 2, "1": 3}


def _reserve_and_commit(on: Scene, _: Any) -> None:
    _reserve(on, None)
    _commit(on, None)


def _give_back(on: Scene, _: Any) -> None:
    answer = on.ask(on.first, "give_back", lease="first")
    assert answer.get("error", "not-found") == "not-found", answer


def _stock(on: Scene, _: Any) -> None:
    assert len(_done(on.ask(on.first, "stock", lease="first", group=1, count=3))["ids"]["1"]) == 3


def _open(on: Scene, _: Any) -> None:
    _done(on.begin(on.first, "open", "third"))


def _close(on: Scene, _: Any) -> None:
    _done(on.ask(on.first, "close", lease="first"))
    on.until(lambda: "first" not in {lease.name for lease in on.told().leases})


def _to_be_adopted(on: Scene) -> None:
    """A lease whose owner has died, and that is kept."""
    _furnish(on)
    other = on.another()
    _done(on.begin(other, "open", "kept", keep_s=LONG_S))
    _done(on.ask(other, "step", lease="kept", allocate={0: 2, 2: 1}))
    assert other.do("leave") is None
    until(lambda: {lease.name: lease.state for lease in on.told().leases}["kept"] == "kept")


def _adopt(on: Scene, _: Any) -> None:
    _done(on.begin(on.second, "adopt", "kept", keep_s=LONG_S))


def _to_die(on: Scene) -> Client:
    mine = _furnish(on)
    other = on.another()
    _done(on.begin(other, "open", "mortal"))
    _done(on.ask(other, "step", lease="mortal", allocate={0: 2, 2: 1}, retain={0: mine[0]}))
    return other


def _die(on: Scene, other: Client) -> None:
    """Its blocks are free again when it is known to be gone."""
    assert other.do("leave") is None
    on.until(lambda: "mortal" not in {lease.name for lease in on.told().leases})


def _die_and_be_kept(on: Scene, other: Client) -> None:
    assert other.do("leave") is None
    on.until(lambda: {lease.name: lease.state for lease in on.told().leases}["kept"] == "kept")
    _adopt(on, None)


def _to_be_kept(on: Scene) -> Client:
    _furnish(on)
    other = on.another()
    _done(on.begin(other, "open", "kept", keep_s=LONG_S))
    _done(on.ask(other, "step", lease="kept", allocate={0: 2, 2: 1}))
    return other


OPERATIONS = {
    "open": Operation(prepare=_furnish, perform=_open),
    "allocate": Operation(prepare=_furnish, perform=_allocate),
    "free": Operation(prepare=_furnish, perform=_free),
    "retain, commit, free and allocate": Operation(prepare=_furnish, perform=_share),
    "take a prefix": Operation(prepare=_commit_prompt, perform=_take_prefix),
    "reserve, and commit it": Operation(prepare=_furnish, perform=_reserve_and_commit),
    "give a reservation back": Operation(prepare=_reserved, perform=_give_back),
    "fill a stock": Operation(prepare=_furnish, perform=_stock),
    "adopt a kept lease": Operation(prepare=_to_be_adopted, perform=_adopt),
    "close": Operation(prepare=_furnish, perform=_close),
    "a client's death": Operation(prepare=_to_die, perform=_die),
    "a client's death, its blocks kept": Operation(prepare=_to_be_kept, perform=_die_and_be_kept),
}


# --- the blows on a worker -------------------------------------------------------------------------------------------


def kill_worker_during(on: Scene, operation: str, step: int | str) -> Trial:
    on.succeed(step)
    what = OPERATIONS[operation]
    prepared = what.prepare(on)
    armed = on.worker
    on.arm_worker()
    what.perform(on, prepared)
    survived = on.worker is armed and not armed.ended
    if armed.ended and on.worker is armed:
        on.succeed()
    return _ended(on, survived=survived)


def _ended(on: Scene, *, survived: bool) -> Trial:
    """What is under way of the armed one must not meet the checks: they are steps too."""
    if survived:
        on.succeed()
    on.check()
    on.check_nothing_left()
    return Trial(survived_the_operation=survived)


def kill_worker_during_adoption(on: Scene, step: int | str) -> Trial:
    """While the pool of a worker that was killed, and its leases, are handed to it."""
    on.succeed()
    _furnish(on)
    on.worker.kill()
    on.worker = DyingWorker(on.run_dir, step)
    try:
        on.hand_over(on.arm_worker)
        on.told()
    except WorkerLost:
        on.worker.wait()
    return _ended(on, survived=not on.worker.ended) if not on.worker.ended else _after_death(on)


def _after_death(on: Scene) -> Trial:
    on.succeed()
    return _ended(on, survived=False)


def kill_worker_during_replacement(on: Scene, step: int | str) -> Trial:
    """The one that is replaced, while it hands over; the next one serves, or another is started."""
    on.succeed(step)
    _furnish(on)
    on.arm_worker()
    old = on.worker
    with contextlib.suppress(AssertionError):  # it got too little to serve
        on.worker = WorkerProcess(on.run_dir, "--replace")
    survived = old.wait() == 0
    if not survived:
        _go_on(on)
    return _ended(on, survived=survived)


def kill_successor_during_replacement(on: Scene, step: int) -> Trial:
    """The one that replaces, armed from its start: the old one goes on, or the next is started."""
    on.succeed()
    _furnish(on)
    old = on.worker
    survived = True
    try:
        on.worker = _DyingSuccessor(on.run_dir, step)
    except AssertionError:
        survived = False
    if survived:
        assert old.wait() == 0
    else:
        _go_on(on)
    return _ended(on, survived=survived)


class _DyingSuccessor(WorkerProcess):
    """Counts from its connecting to the one that it replaces: before, it has done nothing that matters."""

    def __init__(self, run_dir: Path, step: int) -> None:
        command = dying_command(run_dir, step, "worker")
        command[3] = "-"
        super().__init__(run_dir, "--replace", command=command)


def _go_on(on: Scene) -> None:
    """With the worker that was left, or a new one."""
    if not on.worker.ended:
        with contextlib.suppress(WorkerLost):
            on.told()
            return
        on.worker.kill()
    on.succeed()


# --- the blows on clients --------------------------------------------------------------------------------------------


def kill_client_in_a_session(on: Scene, step: int | str) -> Trial:
    """One whose blocks `second` shares, right before each of its calls of the system."""
    return _session(on, step, _sharer)


def kill_second_client_in_a_session(on: Scene, step: int | str) -> Trial:
    """One that shares the blocks of `first`."""
    return _session(on, step, _sharing)


def _session(on: Scene, step: int | str, script: Callable[[Scene, Client], None]) -> Trial:
    mortal = on.another(step)
    mine = _furnish(on)
    assert mine
    mortal.send("audit")
    assert mortal.answer() == {"books": {}}  # it has imported everything, and waits
    mortal.arm()
    script(on, mortal)
    survived = not mortal.ended
    on.until(lambda: "mortal" not in {lease.name for lease in on.told().leases})
    mortal.ended = True
    on.check()
    on.check_nothing_left()
    return Trial(survived_the_operation=survived)


def _sharer(on: Scene, mortal: Client) -> None:
    hashes = on.hashes(4)
    options = {"pool": POOL, "run_dir": str(on.run_dir), "token": TOKEN}
    mortal.do("open", lease="mortal", **options)
    given = mortal.do("step", lease="mortal", allocate={0: 4, 1: 4, 2: 4})
    if given:
        commit = {group: (some, hashes[int(group)]) for group, some in given["ids"].items()}
        if mortal.do("step", lease="mortal", commit=commit):
            _done(on.ask(on.second, "take_prefix", lease="second", hashes=hashes, tokens=32))
        mortal.do("step", lease="mortal", free=given["ids"], allocate={1: 2})
    mortal.do("close", lease="mortal")


def _sharing(on: Scene, mortal: Client) -> None:
    hashes = on.hashes(4)
    given = _done(on.ask(on.first, "step", lease="first", allocate={0: 4, 1: 4, 2: 4}))["ids"]
    commit = {group: (some, hashes[int(group)]) for group, some in given.items()}
    _done(on.ask(on.first, "step", lease="first", commit=commit))
    options = {"pool": POOL, "run_dir": str(on.run_dir), "token": TOKEN}
    mortal.do("open", lease="mortal", **options)
    mortal.do("take_prefix", lease="mortal", hashes=hashes, tokens=64)
    mortal.do("step", lease="mortal", retain={0: given["0"][:1]})
    _done(on.ask(on.first, "step", lease="first", free=given))
    mortal.do("reserve", lease="mortal", counts={1: 2})
    mortal.do("commit", lease="mortal")
    mortal.do("close", lease="mortal")


# --- the blows on the API process ------------------------------------------------------------------------------------


def kill_api_in_a_session(on: Scene, step: int) -> Trial:
    """While somebody leases blocks over HTTP, whose time goes on meanwhile; who asked is asked again by its client."""
    on.succeed()
    _furnish(on)
    api = DyingApi(on.run_dir, step)
    try:
        with api.client() as http:
            lease = http.create_lease(on.pool_id, name="http", ttl_s=MAX_TTL_S, token=TOKEN)
            api.arm()
            with ThreadPoolExecutor(1) as thread:
                working = thread.submit(_work_over_http, lease, on.hashes(2))
                until(lambda: working.done() or api.ended)
                survived = not api.ended
                if not api.ended:  # what follows is no part of the session
                    api.kill()
                api = DyingApi(on.run_dir)
                book = working.result()
            assert {group: dict(zip(held.ids, held.times, strict=True)) for group, held in lease.held().items()} == book
            on.check({"http": book})
            lease.close()
        api.kill()  # it keeps a connection
        on.check_nothing_left()
    finally:
        if not api.ended:
            api.kill()
    return Trial(survived_the_operation=survived)


def _work_over_http(lease: HttpLease, hashes: list[list[str]]) -> Book:
    """What it holds then."""
    book = Counter[tuple[int, int]]()
    grants = [lease.step(Step(allocate={0: 2, 1: 3})), lease.step(Step(allocate={2: 2}))]
    for _ in range(2):
        with contextlib.suppress(NotFound):  # it was lost, or it was committed and the answer was
            grants.append(lease.reserve({1: 1}).commit())
    book.update((group, int(block)) for grant in grants for group, ids in grant.ids.items() for block in ids)
    mine = grants[0].ids[0].tolist()
    commit = {0: Content(mine, [bytes.fromhex(one) for one in hashes[0]])}
    lease.step(Step(commit=commit, free={0: mine[1:]}, retain={0: mine[:1]}))
    book.subtract((0, block) for block in mine[1:])
    book.update((0, block) for block in mine[:1])
    return _book([(group, block, times) for (group, block), times in book.items()])


OTHER_BLOWS: dict[str, Callable[[Scene, int], Trial]] = {
    "worker, being handed pools": kill_worker_during_adoption,
    "worker, being replaced": kill_worker_during_replacement,
    "worker, replacing": kill_successor_during_replacement,
    "client, sharing its blocks": kill_client_in_a_session,
    "client, sharing another's blocks": kill_second_client_in_a_session,
    "API, while blocks are leased over HTTP": kill_api_in_a_session,
}
