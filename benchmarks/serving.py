"""Plans from the server's cache, beside servers that answer the same requests with nothing, or with as many bytes."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

import floor_server
import kvpage
import planning
from kvpage.run_directory import RunDirectory
from measure import Effort, Row, beside, take_turns
from report import Pair, Subject, main_of

ROUNDS = 80
REQUESTS_PER_TURN = 10  # or each server would meet what the other has left in the processor's caches
SIZES = (15, 53)
CLIENTS = ("httpx", "http.client")
SAME_BYTES = "the bare server, answering with as many bytes"
ABOUT = """
`benchmarks/serving.py`. A plan that `kvpage serve` has in its cache is asked for over its Unix socket: by `POST` with
the whole request, and by `GET` with its id. Beside it: an empty endpoint of FastAPI on the same HTTP server, which
reads the body and answers with nothing (`benchmarks/floor_server.py`); and that HTTP server without FastAPI, which
answers with as many bytes. httpx takes most of the time of its own rows; `http.client` shows the servers.
"""
JSON = {"Content-Type": "application/json", "Accept-Encoding": "identity"}

Send = Callable[[str, str, bytes | None, Mapping[str, str]], bytes]
"""Method, path, body and headers; returns the body of the answer."""


def measure(effort: Effort) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="kvpage-bench-") as folder, ExitStack() as stack:
        stack.enter_context(_server(folder))
        for kind in ("bare", "fastapi"):
            stack.enter_context(floor(f"{folder}/{kind}.sock", kind))
        api = str(RunDirectory(Path(folder)).api_socket)
        rows: list[Row] = []
        for client, make in zip(CLIENTS, (_by_httpx, _by_http_client), strict=True):
            senders = [make(path, stack) for path in (api, f"{folder}/bare.sock", f"{folder}/fastapi.sock")]
            for num_layers in SIZES:
                rows += _of_size(client, num_layers, senders, effort.rounds(ROUNDS))
    return rows


def _of_size(client: str, num_layers: int, senders: Sequence[Send], rounds: int) -> list[Row]:
    ours, bare, framework = senders
    wanted = planning.request(num_layers)
    plan, body = kvpage.plan(wanted), json.dumps(wanted).encode()
    sized = JSON | {floor_server.SIZE_HEADER: str(len(plan.to_json()))}
    rows: list[Row] = []
    for method, path, sent in (("POST", "/v1/plans", body), ("GET", f"/v1/plans/{plan.plan_id}", None)):
        assert ours(method, path, sent, JSON) == plan.to_json()
        name, empty = _row_name(client, method, num_layers), _empty(method)
        sides = {
            empty: _repeated(framework, method, path, sent, JSON),
            SAME_BYTES: _repeated(bare, method, path, sent, sized),
            name: _repeated(ours, method, path, sent, JSON),
        }
        timed = take_turns(sides, rounds=rounds)
        each = {side: runs.divided(REQUESTS_PER_TURN) for side, runs in timed.items()}
        rows += beside(empty, each, [name]) + beside(SAME_BYTES, each, [name])
    return rows


def _row_name(client: str, method: str, num_layers: int) -> str:
    return f"{method} of a known plan, {num_layers} layers, by {client}"


def _empty(method: str) -> str:
    return f"an empty {method} of FastAPI"


def _pairs() -> tuple[Pair, ...]:
    asked = [(client, method, size) for client in CLIENTS for size in SIZES for method in ("POST", "GET")]
    return tuple((_row_name(*one), peer) for one in asked for peer in (_empty(one[1]), SAME_BYTES))


def _repeated(
    send: Send, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
) -> Callable[[], object]:
    def turn() -> None:
        for _ in range(REQUESTS_PER_TURN):
            send(method, path, body, headers)

    return turn


def _by_httpx(socket_path: str, stack: ExitStack) -> Send:
    transport = httpx.HTTPTransport(uds=socket_path, verify=False)
    client = stack.enter_context(httpx.Client(transport=transport, base_url="http://kvpage"))
    return lambda method, path, body, headers: client.request(method, path, content=body, headers=headers).content


def _by_http_client(socket_path: str, stack: ExitStack) -> Send:
    connection = http.client.HTTPConnection("kvpage")
    connection.sock = stack.enter_context(socket.socket(socket.AF_UNIX))
    connection.sock.connect(socket_path)

    def send(method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> bytes:
        connection.request(method, path, body, headers)
        return connection.getresponse().read()

    return send


@contextmanager
def _server(folder: str) -> Iterator[None]:
    ready, told = os.pipe()
    command = [sys.executable, "-m", "kvpage_server", "serve", "--run-dir", folder, "--ready-fd", str(told)]
    command += ["--config", os.devnull]  # no settings of this machine
    process = subprocess.Popen(command, pass_fds=[told], stderr=subprocess.DEVNULL)
    os.close(told)
    os.read(ready, 1)
    os.close(ready)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


@contextmanager
def floor(path: str, kind: str) -> Iterator[int]:
    """The process id of a server of `floor_server.py` that listens at `path`."""
    command = [sys.executable, str(Path(floor_server.__file__)), path, kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.terminate()


IN_SHORT = tuple((_row_name("http.client", method, 53), _empty(method)) for method in ("POST", "GET"))
SUBJECT = Subject(title="HTTP", about=ABOUT, pairs=_pairs(), measure=measure, in_short=IN_SHORT)

if __name__ == "__main__":
    main_of(SUBJECT)
