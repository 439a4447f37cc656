"""Who may connect. Other users are played by children with other ids, which takes root."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvpage.wire.credentials import peer_of, supplementary_groups
from support.pools import PLAN_ID, SIZE_BYTES
from support.remote_client import RemoteClient
from support.worker_process import WorkerProcess

NOBODY = 65534
GROUP = 54321

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="playing another user takes root")


@contextlib.contextmanager
def another_user(*, uid: int = NOBODY, gid: int = NOBODY, groups: Sequence[int] = ()) -> Iterator[RemoteClient]:
    with RemoteClient() as client:
        client.do("become", uid=uid, gid=gid, groups=list(groups))
        yield client


WORKER_AS_NOBODY = f"""
import locale, os, sys  # locale: argparse imports it late, and nobody may not be able to read it
from kvpage_server.worker import main
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
sys.exit(main(sys.argv[1:]))
"""


def worker_of_nobody(run_dir: Path) -> WorkerProcess:
    os.chown(run_dir, NOBODY, NOBODY)
    return WorkerProcess(run_dir, command=[sys.executable, "-c", WORKER_AS_NOBODY])


@pytest.fixture
def shared(no_leaks: None, run_dir: Path) -> Path:
    return run_dir


@needs_root
def test_another_user_cannot_reach_the_socket(worker: WorkerProcess) -> None:
    with another_user() as stranger:
        assert stranger.do("connect", socket=str(worker.socket_path))["error"] == "permission-denied"


@needs_root
def test_another_user_is_refused_even_where_the_files_let_it_in(worker: WorkerProcess) -> None:
    open_to_all(worker)
    with another_user() as stranger:
        refusal = stranger.do("connect", socket=str(worker.socket_path))
        assert refusal["error"] == "permission-denied"
        assert "--group" in refusal["message"]


@needs_root
@pytest.mark.parametrize("ids", [{"gid": GROUP}, {"groups": [GROUP]}], ids=["primary", "supplementary"])
def test_a_member_of_the_group_may_use_pools(shared: Path, ids: dict[str, Any]) -> None:
    with WorkerProcess(shared, "--group", str(GROUP)) as worker, another_user(**ids) as member:
        member.do("connect", socket=str(worker.socket_path))
        created = member.do("create", name="mimo", plan_id=PLAN_ID, size_bytes=SIZE_BYTES)
        assert created["state"] == "ready"
        assert member.do("attach", name="mimo")["pool_id"] == created["pool_id"]


@needs_root
def test_a_member_of_the_group_may_not_be_the_api(shared: Path) -> None:
    with WorkerProcess(shared, "--group", str(GROUP)) as worker, another_user(gid=GROUP) as member:
        refusal = member.do("connect", socket=str(worker.socket_path), role="api")
        assert refusal["error"] == "permission-denied"


@needs_root
def test_who_is_not_in_the_group_is_refused_even_where_the_files_let_it_in(shared: Path) -> None:
    with WorkerProcess(shared, "--group", str(GROUP)) as worker:
        open_to_all(worker)
        with another_user() as stranger:
            assert stranger.do("connect", socket=str(worker.socket_path))["error"] == "permission-denied"


@needs_root
def test_root_may_use_the_worker_of_another_user(shared: Path) -> None:
    with worker_of_nobody(shared) as worker, worker.client(role="api") as client:
        assert client.welcome.worker_pid == worker.pid


@needs_root
def test_a_client_trusts_the_worker_of_the_user_who_owns_the_folder(shared: Path) -> None:
    with worker_of_nobody(shared) as worker:
        open_to_all(worker)
        with another_user(uid=2, gid=2) as client:
            refusal = client.do("connect", socket=str(worker.socket_path))
            assert "only uid 65534 and root may" in refusal["message"]  # it is the worker that does not trust


@needs_root
def test_a_client_does_not_trust_a_worker_in_a_folder_of_somebody_else(shared: Path) -> None:
    with worker_of_nobody(shared) as worker:
        open_to_all(worker)
        os.chown(shared, 3, 3)
        with another_user(uid=2, gid=2) as client:
            refusal = client.do("connect", socket=str(worker.socket_path))
            assert refusal["error"] == "permission-denied"
            assert f"runs as uid {NOBODY}" in refusal["message"]


def open_to_all(worker: WorkerProcess) -> None:
    worker.socket_path.parent.chmod(0o755)
    worker.socket_path.chmod(0o666)


def test_the_group_enters_the_folder_and_writes_to_the_socket(shared: Path) -> None:
    with WorkerProcess(shared, "--group", str(os.getegid())) as worker:
        folder, socket = shared.stat(), worker.socket_path.stat()
        assert (stat.S_IMODE(folder.st_mode), folder.st_gid) == (0o750, os.getegid())
        assert (stat.S_IMODE(socket.st_mode), socket.st_gid) == (0o660, os.getegid())


def test_the_kernel_says_who_the_worker_is(worker: WorkerProcess) -> None:
    with worker.client() as client:
        assert client._socket is not None
        peer = peer_of(client._socket)
        assert (peer.pid, peer.uid, peer.gid) == (worker.pid, os.geteuid(), os.getegid())
        assert supplementary_groups(client._socket) == set(os.getgroups())
