"""Plans from the server's cache, beside servers that answer the same requests with nothing, or with as many bytes."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

import floor_server
import kvpage
import planning
from kvpage.run_directory import RunDirectory
from measure import print_table, take_turns

ROUNDS = 200
REQUESTS_PER_TURN = 20  # or each server would meet what the other has left in the processor's caches
JSON = {"Content-Type": "application/json", "Accept-Encoding": "identity"}

Send = Callable[[str, str, bytes | None, Mapping[str, str]], bytes]
"""Method, path, body and headers; returns the body of the answer."""


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="kvpage-bench-") as folder, ExitStack() as stack:
        stack.enter_context(_server(folder))
        for kind in ("bare", "fastapi"):
            stack.enter_context(_floor(f"{folder}/{kind}.sock", kind))
        api = str(RunDirectory(Path(folder)).api_socket)
        for make in (_by_httpx, _by_http_client):
            ours, bare, framework = (
                make(path, stack) for path in (api, f"{folder}/bare.sock", f"{folder}/fastapi.sock")
            )
            for num_layers in (15, 53):
                _measure(make.__name__.removeprefix("_by_"), num_layers, ours, bare, framework)


def _measure(client: str, num_layers: int, ours: Send, bare: Send, framework: Send) -> None:
    wanted = planning.request(num_layers)
    plan, body = kvpage.plan(wanted), json.dumps(wanted).encode()
    size_bytes = len(plan.to_json())
    sized = JSON | {floor_server.SIZE_HEADER: str(size_bytes)}
    for method, path, sent in (("POST", "/v1/plans", body), ("GET", f"/v1/plans/{plan.plan_id}", None)):
        assert ours(method, path, sent, JSON) == plan.to_json()
        sides = {
            f"empty {method}, FastAPI": _repeated(framework, method, path, sent, JSON),
            f"empty {method}, bare server": _repeated(bare, method, path, sent, JSON),
            f"{method} answered with {size_bytes:,} bytes": _repeated(bare, method, path, sent, sized),
            f"{method} answered with the plan": _repeated(ours, method, path, sent, JSON),
        }
        timings = [timing.divided(REQUESTS_PER_TURN) for timing in take_turns(sides, rounds=ROUNDS)]
        print_table(f"{client}: a known plan of {num_layers} layers", timings, floor=f"empty {method}, FastAPI")


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
def _floor(path: str, kind: str) -> Iterator[None]:
    command = [sys.executable, str(Path(floor_server.__file__)), path, kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield
        finally:
            process.terminate()


if __name__ == "__main__":
    main()
