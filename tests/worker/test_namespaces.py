"""A client that shares nothing with the worker but the folder of its socket, as in another container."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from kvpage.wire import messages
from support.eventually import until
from support.pools import SIZE_BYTES, attach_pool, contents, create_pool
from support.remote_client import RemoteClient
from support.worker_process import WorkerProcess

APART = ["unshare", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child", "--ipc", "--net", "--uts"]
OWN_SHM = ["sh", "-c", 'mount -t tmpfs -o size=1m none /dev/shm && exec "$@"', "sh"]


@pytest.fixture(scope="module")
def apart() -> list[str]:
    """A command that runs another in namespaces of its own, with 1 MiB of /dev/shm."""
    if shutil.which("unshare") is None:
        pytest.skip("no unshare command on this machine")
    prefix = [*APART, *OWN_SHM]
    trial = subprocess.run([*prefix, "true"], capture_output=True, text=True, check=False)
    if trial.returncode != 0:
        pytest.skip(f"this machine permits no new user namespaces: {trial.stderr.strip()}")
    return prefix


def test_bytes_are_shared_across_all_namespaces(worker: WorkerProcess, apart: list[str]) -> None:
    size_bytes = 4 * SIZE_BYTES  # more than the client's /dev/shm could hold
    with worker.client() as client, RemoteClient(prefix=apart) as remote:
        create_pool(client, size_bytes=size_bytes)
        _, mapping = attach_pool(client)
        answer = remote.do("connect", socket=str(worker.socket_path))
        assert answer["epoch"] == client.epoch
        remote.do("attach", name="mimo")
        remote.do("write", offset=size_bytes - 9, data="from afar")
        assert bytes(contents(mapping)[-9:]) == b"from afar"
        contents(mapping)[:4] = b"back"
        assert remote.do("read", offset=0, size_bytes=4) == {"data": "back"}
        mapping.close()


def test_the_client_is_really_apart(apart: list[str]) -> None:
    with RemoteClient(prefix=apart) as remote:
        assert remote.do("who")["pid"] < 10  # of its own PID namespace
        assert remote.do("namespace", kind="ipc")["id"] != str(Path("/proc/self/ns/ipc").readlink())


def test_the_hold_of_a_client_apart_ends_with_its_death(worker: WorkerProcess, apart: list[str]) -> None:
    with worker.client() as client, RemoteClient(prefix=apart) as remote:
        pool = create_pool(client)
        remote.do("connect", socket=str(worker.socket_path), name="afar")
        remote.do("attach", name="mimo")
        [holder] = client.ask(messages.GetPool(pool_id=pool.pool_id), messages.PoolState).holders
        assert holder.client_name == "afar"
        remote.end()
        until(lambda: client.ask(messages.GetPool(pool_id=pool.pool_id), messages.PoolState).holders == [])
