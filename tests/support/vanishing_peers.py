"""Clients that vanish in every phase of a request: reset, half-closed, killed, or stopped while they hold something."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from kvpage.client.http import Client
from kvpage.run_directory import RunDirectory
from support.api_service import ApiService
from support.attacked_service import Bystander, Remains, attacked_service, conclude, losing
from support.eventually import until
from support.plan_requests import small_request, wide_request
from support.tally import Tally
from support.worker_process import readable

HASTY = {"head_s": 1.0, "body_s": 1.0, "unread_s": 1.0, "linger_s": 0.3}
PHASES = (
    "before the head", "in the head", "in the body", "while it is planned", "while the answer is sent",
    "reading events", "holding a pool", "waiting for a pool", "waiting for holders", "between two requests",
)  # fmt: skip
WAYS = ("reset", "closed", "sends no more", "reads no more")
HOLDER = "holder"
PATIENCE_S = 60.0
"""For what is left behind to go."""


def vanishing_clients(num_each: int) -> Tally:
    """Each phase × each way × each kind of connection, so often. Somebody else is answered after each."""
    tally = Tally()
    with attacked_service(HASTY) as service, _pool(service) as pool_id:
        _warm_up(service, pool_id)
        remains, bystander = Remains(service), Bystander(service)
        for over in ("unix", "tcp"):
            for phase in PHASES:
                for way in WAYS:
                    with losing(tally, f"{phase}, {way}, over {over}"):
                        for _ in range(num_each):
                            _vanish(in_phase(service, over, phase, pool_id), way)
                        bystander.ask()
                        tally.survive("answered others and left nothing", num_each)
        conclude(tally, remains, bystander, PATIENCE_S)
    return tally


def killed_clients(num_each: int) -> Tally:
    """A process with a connection in each phase, and one that holds a pool and leases blocks, is stopped, and later
    killed. While it is stopped it keeps what it holds, and no more; when it is killed nothing is left.
    """
    tally = Tally()
    with attacked_service(HASTY) as service, _pool(service) as pool_id:
        _warm_up(service, pool_id)
        remains, bystander = Remains(service), Bystander(service)
        for number in range(num_each):
            with losing(tally, f"process {number}"), _victim(service, pool_id) as victim, service.client() as client:
                os.kill(victim, signal.SIGSTOP)
                bystander.ask()
                assert _holders(client, pool_id) == [victim], "a stopped process has lost its hold"
                os.kill(victim, signal.SIGKILL)
                until(lambda: not _holders(client, pool_id))
                bystander.ask()
                tally.survive("held while stopped, freed when killed")
        conclude(tally, remains, bystander, PATIENCE_S)
    return tally


def _warm_up(service: ApiService, pool_id: str) -> None:
    """The server keeps some connections to its worker once it has needed them."""
    connections = [in_phase(service, over, phase, pool_id) for over in ("unix", "tcp") for phase in PHASES]
    for connection in connections:
        _vanish(connection, "closed")
    Bystander(service).ask()


@contextlib.contextmanager
def _pool(service: ApiService) -> Iterator[str]:
    with service.client() as client:
        pool = client.create_pool(small_request(), name="mimo")
        yield pool.id
        client.delete_pool(pool.id, wait_s=30)


def _holders(client: Client, pool_id: str) -> list[int]:
    return [holder.pid for holder in client.get_pool(pool_id).holders if holder.client_name == HOLDER]


@contextlib.contextmanager
def _victim(service: ApiService, pool_id: str) -> Iterator[int]:
    """The id of a process that is in every phase at once."""
    place = json.dumps([str(service.run_directory.path), service.url, pool_id])
    child = subprocess.Popen(
        [sys.executable, __file__, place], stdout=subprocess.PIPE, cwd=Path(__file__).parent.parent
    )
    try:
        assert child.stdout is not None
        assert readable(child.stdout.fileno())
        assert child.stdout.readline() == b"ready\n"
        yield child.pid
    finally:
        child.kill()
        child.communicate()


def in_phase(service: ApiService | _Place, over: str, phase: str, pool_id: str) -> socket.socket:
    """A connection that has come so far with a request."""
    host = service.url.removeprefix("http://")
    sock = _connected(service, over)
    body = _body()
    post = b"POST /v1/plans HTTP/1.1\r\nHost: %b\r\nContent-Type: application/json\r\n" % host.encode()
    post += b"Content-Length: %d\r\n\r\n" % len(body)
    get = "GET {} HTTP/1.1\r\nHost: " + host + "\r\n\r\n"
    sent = {
        "before the head": b"",
        "in the head": post[:30],
        "in the body": post + body[: len(body) // 2],
        "while it is planned": post + body,
        "while the answer is sent": post + body,
        "reading events": get.format("/v1/events").encode(),
        "holding a pool": get.format(f"/v1/pools/{pool_id}/hold").encode(),
        "waiting for a pool": get.format(f"/v1/pools/{pool_id}?wait=30").encode(),
        "waiting for holders": get.format("/v1/pools").encode(),
        "between two requests": get.format("/livez").encode(),
    }[phase]
    sock.sendall(sent)
    if phase in ("while the answer is sent", "reading events", "holding a pool", "between two requests"):
        sock.recv(12)
    return sock


def _body() -> bytes:
    """Of a plan that nobody has asked for, and whose answer no socket can hold."""
    request = wide_request(500) | {"num_blocks": random.randrange(2, 1 << 20)}
    return json.dumps(request).encode()


def _connected(service: ApiService | _Place, over: str) -> socket.socket:
    if over == "tcp":
        name, port = service.url.removeprefix("http://").split(":")
        return socket.create_connection((name, int(port)))
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(str(service.run_directory.api_socket))
    return sock


def _vanish(sock: socket.socket, way: str) -> None:
    with sock:
        if way == "reset":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif way != "closed":
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR if way == "sends no more" else socket.SHUT_RD)
            sock.settimeout(30)
            with contextlib.suppress(ConnectionError):  # until the server gives it up
                while way == "sends no more" and sock.recv(1 << 16):
                    pass


# --- as a program -----------------------------------------------------------------------------------------------------


class _Place:
    def __init__(self, run_dir: str, url: str) -> None:
        self.run_directory, self.url = RunDirectory(Path(run_dir)), url


def _be_victim(run_dir: str, url: str, pool_id: str) -> None:
    import kvpage

    place = _Place(run_dir, url)
    connections = [in_phase(place, over, phase, pool_id) for over in ("unix", "tcp") for phase in PHASES]
    with kvpage.Connection(place.run_directory.worker_socket("host"), client_name=HOLDER) as connection:
        attachment = connection.attach("mimo")
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        signal.pause()
        del attachment, connections


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))
    _be_victim(*json.loads(sys.argv[1]))
