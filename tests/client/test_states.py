"""What connections and attachments say of themselves, and answer, after each way in which they can end."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import kvpage
from kvpage.client.finding import closed_system_directory
from kvpage.errors import DeviceUnavailable, InternalError, KvpageError, StaleHandle, WorkerLost
from kvpage.wire import messages
from support.blocking_client import BOTH_CLIENTS
from support.eventually import until
from support.plan_requests import small_request
from support.worker_process import WorkerProcess


@pytest.fixture
def worker(no_leaks: None, run_dir: Path) -> Iterator[WorkerProcess]:
    """With a pool named mimo."""
    with WorkerProcess(run_dir) as process:
        with process.client() as client:
            plan = kvpage.plan(small_request())
            body = messages.CreatePool(
                name="mimo", plan_id=plan.plan_id, plan=plan.to_json(), buffer_size_bytes=plan.buffer_size_bytes
            )
            pool = client.ask(body, messages.PoolCreated).pool
            client.ask(messages.WaitPool(pool_id=pool.pool_id, timeout_s=60), messages.PoolState)
        yield process


@pytest.fixture
def connection(worker: WorkerProcess, run_dir: Path) -> Iterator[kvpage.Connection]:
    with kvpage.connect(run_dir=str(run_dir)) as connection:
        yield connection


@pytest.fixture
def attachment(connection: kvpage.Connection) -> Iterator[kvpage.Attachment]:
    with connection.attach("mimo") as attachment:
        yield attachment


def facts(attachment: kvpage.Attachment) -> tuple[str, ...]:
    """What stays true of an attachment whatever becomes of it."""
    return attachment.name, attachment.device, attachment.epoch, attachment.pool_id, attachment.plan.plan_id


def refused(work: Callable[[], object], kind: type[KvpageError], match: str) -> None:
    with pytest.raises(kind, match=match):
        work()


def assert_closed(attachment: kvpage.Attachment, match: str) -> None:
    refused(lambda: attachment.tensor("target.0"), StaleHandle, match)
    refused(lambda: attachment.tensors, StaleHandle, match)
    refused(lambda: attachment.buffer, StaleHandle, match)


def test_in_use(connection: kvpage.Connection, attachment: kvpage.Attachment) -> None:
    assert (connection.closed, connection.device) == (False, "host")
    assert (attachment.closed, attachment.detached) == (False, False)
    assert "open" in repr(connection)
    assert "open" in repr(attachment)


def test_a_closed_attachment(connection: kvpage.Connection, attachment: kvpage.Attachment) -> None:
    before = facts(attachment)
    tensor = attachment.tensor("target.0")
    attachment.close()
    assert (attachment.closed, attachment.detached) == (True, False), "a tensor keeps the hold"
    del tensor
    assert (attachment.closed, attachment.detached) == (True, True)
    assert (facts(attachment), connection.closed) == (before, False)
    assert "closed" in repr(attachment)
    assert_closed(attachment, "is closed")
    attachment.close()


def test_a_closed_connection(connection: kvpage.Connection, attachment: kvpage.Attachment) -> None:
    connection.close()
    assert (connection.closed, attachment.closed, attachment.detached) == (True, False, False)
    assert (connection.device, "closed" in repr(connection)) == ("host", True)
    refused(lambda: connection.attach("mimo"), StaleHandle, "connect again")
    attachment.tensor("target.0").fill_(1)
    attachment.close()
    assert attachment.detached
    connection.close()


def test_a_worker_that_died(
    worker: WorkerProcess, connection: kvpage.Connection, attachment: kvpage.Attachment, run_dir: Path
) -> None:
    before = facts(attachment)
    worker.kill()
    assert (connection.closed, attachment.closed, attachment.detached) == (True, False, True)
    assert (facts(attachment), connection.device, "closed" in repr(connection)) == (before, "host", True)
    for _ in range(2):
        refused(lambda: connection.attach("mimo"), WorkerLost, "connect")
    attachment.tensor("target.0").fill_(1)
    assert float(attachment.tensor("target.0").max()) == 1
    attachment.close()
    assert_closed(attachment, "is closed")
    refused(lambda: kvpage.attach("mimo", run_dir=str(run_dir), timeout_s=0), WorkerLost, "kvpage serve")
    refused(lambda: kvpage.connect(run_dir=str(run_dir)), WorkerLost, "kvpage serve")


FORKING = """
import os, sys
import kvpage
from kvpage.errors import StaleHandle, WorkerLost
run_dir = sys.argv[1]
connection = kvpage.connect(run_dir=run_dir)
attachment = connection.attach("mimo")
tensor = attachment.tensor("target.0")
client = kvpage.Client(run_dir=run_dir)
child = os.fork()
if child == 0:
    said = []
    for work in (lambda: attachment.tensor("target.0"), lambda: attachment.tensors, lambda: attachment.buffer,
                 lambda: client.pools(), lambda: connection.attach("mimo")):
        try:
            work()
        except (StaleHandle, WorkerLost) as error:
            said.append("fork" in error.message)
    assert said == [True] * 5, said
    assert connection.closed and attachment.detached and connection.device == "host" and attachment.name == "mimo"
    repr(connection), repr(attachment)
    attachment.close(), connection.close(), client.close()
    with kvpage.attach("mimo", run_dir=run_dir) as anew:
        anew.tensor("target.0").fill_(3)
    os._exit(42)
_, status = os.waitpid(child, 0)
assert not connection.closed and not attachment.detached
assert float(tensor.max()) == 3
connection.attach("mimo").close()
print(os.waitstatus_to_exitcode(status))
"""


def test_a_forked_child_is_told_so_and_the_parent_keeps_everything(worker: WorkerProcess, run_dir: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKING, str(run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("42\n", 0), done.stderr


LEAVING = """
import sys, threading
import kvpage
attachment = kvpage.attach("mimo", run_dir=sys.argv[1])
connection = kvpage.connect(run_dir=sys.argv[1])
other = connection.attach("mimo")
tensors = [attachment.tensor("target.0"), other.tensor("target.1")]
sys.kept = [attachment, connection, other, tensors]
"""


def test_a_process_that_ends_with_everything_open_ends_quietly(worker: WorkerProcess, run_dir: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LEAVING, str(run_dir)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@contextmanager
def few_descriptors(free: int) -> Iterator[None]:
    """This process may open `free` more files."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    limit = max(int(name) for name in os.listdir("/proc/self/fd")) + 3 + free
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limits[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        for _ in range(free):
            os.close(taken.pop())
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_without_a_descriptor_a_connection_refuses_to_attach_and_lives_on(
    worker: WorkerProcess, connection: kvpage.Connection, attachment: kvpage.Attachment
) -> None:
    with few_descriptors(0):
        refused(lambda: connection.attach("mimo"), InternalError, "ulimit -n")
    assert (connection.closed, attachment.detached) == (False, False)
    connection.attach("mimo").close()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("free", range(4))
def test_with_hardly_a_descriptor_attaching_is_refused_whole(
    worker: WorkerProcess, run_dir: Path, attachment: kvpage.Attachment, free: int
) -> None:
    def attach() -> None:
        kvpage.attach("mimo", run_dir=str(run_dir), timeout_s=0).close()

    with few_descriptors(free):
        if free < 2:  # a socket, and what comes through it
            refused(attach, InternalError, "ulimit -n")
        else:
            attach()
    with worker.client() as client:
        until(lambda: client.ask(messages.FindPool(name="mimo"), messages.PoolState).num_holders == 1)


@pytest.mark.parametrize("kind", BOTH_CLIENTS, ids=["sync", "async"])
def test_without_a_descriptor_a_client_says_so(run_dir: Path, no_leaks: None, kind: type[kvpage.Client]) -> None:
    with kind(run_dir=str(run_dir)) as client:
        refused(client.pools, DeviceUnavailable, "kvpage serve")  # what is imported to connect needs descriptors too
        with few_descriptors(0):
            refused(client.pools, InternalError, "ulimit -n")


STRANGER = """
import os, sys
from pathlib import Path
from kvpage.client.finding import closed_system_directory
import kvpage, kvpage.client.connection
from kvpage.errors import KvpageError
folder = sys.argv[1]
client = kvpage.Client(run_dir=folder)
os.setgroups([]), os.setresgid(65534, 65534, 65534), os.setresuid(65534, 65534, 65534)
attach = kvpage.attach
for work in (lambda: attach("mimo", run_dir=folder), lambda: attach("mimo", device="host", run_dir=folder),
             lambda: kvpage.connect(run_dir=folder), client.pools):
    try:
        work()
    except KvpageError as error:
        print(type(error).__name__, "65534" in error.message)
print(folder in closed_system_directory(Path(folder)))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_stranger_is_told_that_the_folder_is_closed_to_him(run_dir: Path, below: str) -> None:
    (run_dir / "deeper").mkdir()
    command = [sys.executable, "-c", STRANGER, str(run_dir / below)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    can_be_seen = not below  # what lies in a closed folder cannot
    assert done.stdout == "PermissionDenied True\n" * 4 + f"{can_be_seen}\n", done.stderr


def test_who_finds_nobody_hears_of_a_system_folder_that_is_closed_to_him(tmp_path: Path) -> None:
    assert closed_system_directory(tmp_path) == ""
    assert closed_system_directory(tmp_path / "absent") == ""
