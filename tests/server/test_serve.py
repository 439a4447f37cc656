"""The server as a process: its sockets and their modes, its callers, its size, what it refuses to start with."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kvpage.client.http import Client
from kvpage.errors import PermissionDenied, Unauthorized
from support.api_service import ApiService, run_refused
from support.eventually import until
from support.plan_requests import small_request, wide_request
from support.problems import assert_problem
from support.raw_http import RawHttp
from support.token_files import token_file

TOKEN = "0123456789abcdef0123456789abcdef"
GROUP = 54321
STRANGER = 65534
MAX_RSS_BYTES = 90_000_000
POST_PLAN = b"POST /v1/plans HTTP/1.1\r\nHost: <host>\r\nContent-Type: application/json\r\n"

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start programs as other users")

# Run as root: drops to another user after its imports, which that user may not be able to read.
CALLER = """
import os, sys, socket
path, uid, gid, *groups = sys.argv[1:]
os.setgroups([int(group) for group in groups])
os.setresgid(int(gid), int(gid), int(gid))
os.setresuid(int(uid), int(uid), int(uid))
with socket.socket(socket.AF_UNIX) as sock:
    sock.connect(path)
    sock.sendall(b"GET /v1/pools HTTP/1.1\\r\\nHost: kvpage\\r\\nConnection: close\\r\\n\\r\\n")
    print(sock.makefile("rb").read().decode())
"""


def status_for(service: ApiService, uid: int, gid: int, *groups: int) -> int:
    """Status of a request by a process of that user and those groups."""
    arguments = [str(service.run_directory.api_socket), *map(str, (uid, gid, *groups))]
    done = subprocess.run([sys.executable, "-c", CALLER, *arguments], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[1])


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# --- sockets ----------------------------------------------------------------------------------------------------------


def test_nobody_else_can_reach_the_socket(shared_service: ApiService) -> None:
    directory = shared_service.run_directory
    assert mode(directory.path) == 0o700
    assert mode(directory.api_socket) == 0o600
    assert all(mode(path) == 0o600 for path in directory.path.glob("*.log"))


@as_root
def test_a_group_can_be_let_in(no_leaks: None, run_dir: Path) -> None:
    with ApiService(run_dir, "--group", str(GROUP)) as service:
        assert mode(run_dir) == 0o750
        assert mode(service.run_directory.api_socket) == 0o660
        assert service.run_directory.api_socket.stat().st_gid == GROUP
        assert status_for(service, STRANGER, GROUP) == 200
        assert status_for(service, STRANGER, STRANGER, 7, GROUP) == 200


@as_root
def test_a_stranger_is_refused_even_when_the_socket_lies_open(no_leaks: None, run_dir: Path) -> None:
    with ApiService(run_dir) as service:
        run_dir.chmod(0o755)
        service.run_directory.api_socket.chmod(0o666)
        assert status_for(service, STRANGER, STRANGER) == 403
        assert status_for(service, STRANGER, 0, 0) == 403  # root's group is not root
        assert status_for(service, 0, 0) == 200


def test_a_stale_socket_is_replaced(no_leaks: None, run_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(run_dir / "kvpage.sock"))
    with ApiService(run_dir) as service, service.client() as client:
        assert client.health().status == "ready"


def test_a_budget_that_is_not_there_is_said_when_it_starts(no_leaks: None, run_dir: Path) -> None:
    with ApiService(run_dir, "--memory", "99TiB") as service:
        until(lambda: "pools may take" in service.log().rpartition("\n")[0])
        [line] = [line for line in service.log().splitlines() if "pools may take" in line]
    assert json.loads(line)["level"] == "warning"
    assert f"{99 << 40} bytes" in line
    with ApiService(run_dir, "--memory", "64MiB") as service:
        assert "pools may take" not in service.log()


def test_a_socket_somebody_answers_at_is_left_alone(no_leaks: None, run_dir: Path) -> None:
    path = run_dir / "kvpage.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        done = run_refused(run_dir)
    assert done.returncode == 1
    assert "already" in done.stderr
    assert path.exists()


def test_a_port_in_use_is_refused_and_nothing_is_left(no_leaks: None, run_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run_refused(run_dir, "--port", str(taken.getsockname()[1]))
    assert done.returncode == 1
    assert "cannot listen on 127.0.0.1" in done.stderr
    assert "give another --port" in done.stderr
    assert not (run_dir / "kvpage.sock").exists()


@pytest.mark.parametrize(
    ("arguments", "reason", "status"),
    [
        (["--port", "0", "--host", "0.0.0.0"], "--token-file", 2),
        (["--token-file", "/nonexistent", "--port", "0"], "cannot be read", 2),
        (["--group", "no-such-group-here"], "no group", 2),
        (["--device", "/etc"], "'/etc' is none", 2),
        (["--device", "cuda:0"], "install the driver", 1),
        (["--memory", "lots"], "--memory is 'lots'; it takes bytes", 2),
    ],
)
def test_what_cannot_be_served_is_refused(
    no_leaks: None, run_dir: Path, arguments: list[str], reason: str, status: int
) -> None:
    done = run_refused(run_dir, *arguments)
    assert done.returncode == status  # 2 for what no second try can help
    assert reason in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_directory_with_too_long_a_name_is_refused(run_dir: Path) -> None:
    done = run_refused(run_dir / ("d" * 100))
    assert done.returncode == 2
    assert "107" in done.stderr


# --- TCP --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def token_service(no_leaks: None, run_dir: Path) -> Iterator[ApiService]:
    token = str(token_file(run_dir, TOKEN))
    with ApiService(run_dir, "--port", "0", "--host", "0.0.0.0", "--token-file", token, "--insecure") as service:
        yield service


def test_a_token_opens_pools_over_tcp(token_service: ApiService) -> None:
    url = token_service.url.replace("0.0.0.0", "127.0.0.1")
    with Client(url, token=TOKEN) as client:
        pool = client.create_pool(small_request(), name="mimo")
        assert client.pools() == [pool]
    with Client(url) as client, pytest.raises(Unauthorized):
        client.pools()
    with Client(url, token=TOKEN + "x") as client, pytest.raises(Unauthorized):
        client.devices()
    with token_service.client() as client:
        assert client.find_pool("mimo") == pool


def test_without_a_token_a_pool_is_out_of_reach(shared_service: ApiService) -> None:
    with Client(shared_service.url) as client, pytest.raises(PermissionDenied):
        client.create_pool(small_request(), name="mimo")


def test_a_head_in_many_pieces_and_many_requests_on_one_connection_are_served(shared_service: ApiService) -> None:
    with httpx.Client(base_url=shared_service.url) as http:
        for _ in range(20):
            assert http.get("/livez", headers={"X-Long": "x" * 30_000}).status_code == 200


def test_http_without_a_host_is_refused(shared_service: ApiService) -> None:
    with RawHttp(shared_service) as client:
        client.send(b"GET /v1/devices HTTP/1.0\r\n\r\n")
        assert_problem(client.answer(), "permission-denied")


def test_a_caller_that_leaves_mid_body_does_no_harm(shared_service: ApiService) -> None:
    path = str(shared_service.run_directory.api_socket)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
        sock.sendall(
            b"POST /v1/plans HTTP/1.1\r\nHost: k\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        )
    with shared_service.client() as client:
        assert client.plan(small_request()).num_blocks > 0
    assert "Traceback" not in shared_service.log()


def test_large_plans_keep_nobody_from_asking_whether_the_server_lives(service: ApiService) -> None:
    with contextlib.ExitStack() as stack:
        planning = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(16)]
        for number, sock in enumerate(planning):
            body = json.dumps(wide_request(4096 - number)).encode()
            sock.settimeout(60)
            sock.connect(str(service.run_directory.api_socket))
            sock.sendall(POST_PLAN.replace(b"<host>", b"k") + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        client = stack.enter_context(service.client())
        assert client.health().status == "ready"
        answered, _, _ = select.select(planning, [], [], 0)
        assert len(answered) < len(planning), "all plans were made before anybody else was heard"
        assert {sock.recv(12) for sock in planning} == {b"HTTP/1.1 201"}


# --- the process ------------------------------------------------------------------------------------------------------


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"process {pid} has no VmRSS")


def mapped_libraries(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def test_the_api_process_is_small_and_has_no_torch(shared_service: ApiService) -> None:
    with shared_service.client() as client:
        for num_layers in range(1, 60):
            client.plan(wide_request(num_layers))
        client.plan(wide_request(2000))
        pool = client.create_pool(small_request(), name="small")
        client.pool_tensors(pool.id)
        client.delete_pool(pool.id)
    with httpx.Client(base_url=shared_service.url) as http:
        assert http.get("/openapi.json").status_code == 200
    assert resident_bytes(shared_service.pid) < MAX_RSS_BYTES
    loaded = mapped_libraries(shared_service.pid)
    assert "pydantic" in loaded  # the look works
    assert "libtorch" not in loaded
    assert "libcuda" not in loaded


def test_the_torch_check_fires() -> None:
    program = "import torch; print('imported', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"imported\n"
        assert "libtorch" in mapped_libraries(child.pid)
        assert resident_bytes(child.pid) > MAX_RSS_BYTES
        child.communicate(b"\n")


def test_an_unknown_program_is_refused() -> None:
    for arguments in ([], ["plan"], ["--help"]):
        done = subprocess.run(
            [sys.executable, "-m", "kvpage_server", *arguments], capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert "usage" in done.stderr
