"""Memory by handle for a client that has nothing but HTTP: the stream is the hold."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

import kvpage
from kvpage.errors import Conflict, PoolNotFound, StaleHandle
from kvpage.memory.cuda_device import find_device
from kvpage.memory.cuda_driver import CudaDriver
from kvpage.memory.cuda_mapping import map_handle
from kvpage_server.routes_hold import COMMENT_S
from support.api_service import ApiService, children_of, kill_process
from support.eventually import until
from support.fakecuda import FakeDevices
from support.fakecuda_here import wrap_double
from support.plan_requests import small_request
from support.problems import assert_problem

TOKEN = "0123456789abcdef" * 4


@contextmanager
def held(service: ApiService, pool_id: str) -> Iterator[dict[str, Any]]:
    """What the first event of the stream says, while the stream is open."""
    transport = httpx.HTTPTransport(uds=str(service.run_directory.api_socket))
    with httpx.Client(transport=transport, base_url="http://kvpage", timeout=60) as client:
        with client.stream("GET", f"/v1/pools/{pool_id}/hold") as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert answer.headers["cache-control"] == "no-store"
            lines = answer.iter_lines()
            assert next(lines) == "event: handle"
            yield json.loads(next(lines).removeprefix("data: "))


def create(service: ApiService, **options: Any) -> str:
    with service.client() as client:
        return client.create_pool(small_request(), device="cuda:0", name="mimo", **options).id


@pytest.fixture
def service(devices: FakeDevices, run_dir: Path) -> Iterator[ApiService]:
    with ApiService(run_dir, "--device", "cuda:0") as service:
        yield service


def test_a_client_maps_by_the_handle_what_another_wrote(service: ApiService, run_dir: Path) -> None:
    pool_id = create(service, handle_kind="cuda_ipc")
    with kvpage.attach("mimo", run_dir=str(run_dir), wrap=wrap_double) as attached:
        attached.buffer.fill_(9)
        with held(service, pool_id) as event:
            assert (event["pool_id"], event["epoch"], event["kind"]) == (pool_id, attached.epoch, "cuda_ipc")
            assert event["size_bytes"] == attached.plan.buffer_size_bytes
            driver = CudaDriver()
            device = find_device(driver, event["device_uuid"])
            with map_handle(driver, device, base64.b64decode(event["handle"]), None, event["size_bytes"]) as mapping:
                assert wrap_double(mapping).eq(9).all()


def test_the_stream_is_the_hold(service: ApiService) -> None:
    pool_id = create(service, handle_kind="cuda_ipc")
    with service.client() as client:
        with held(service, pool_id):
            assert client.get_pool(pool_id).num_holders == 1
            with pytest.raises(Conflict):
                client.delete_pool(pool_id)
        until(lambda: client.get_pool(pool_id).num_holders == 0)
        client.delete_pool(pool_id)


@pytest.mark.parametrize("is_unix", [True, False], ids=["unix", "tcp"])
def test_a_client_that_asked_for_more_on_the_same_connection_and_died_holds_nothing(
    is_unix: bool, devices: FakeDevices, run_dir: Path
) -> None:
    """The server reads no further while a request waits behind the hold, so it reads no end of it either."""
    token_file = run_dir / "token"
    token_file.write_text(TOKEN)
    token_file.chmod(0o600)
    options = ("--device", "cuda:0", "--port", "0", "--token-file", str(token_file))
    with ApiService(run_dir, *options) as service, service.client() as client:
        pool_id = create(service, handle_kind="cuda_ipc")
        headers = f"Host: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
        hold = f"GET /v1/pools/{pool_id}/hold HTTP/1.1\r\n{headers}".encode()
        more = f"GET /v1/devices HTTP/1.1\r\n{headers}".encode()
        url = urlsplit(service.url)
        with socket.socket(socket.AF_UNIX if is_unix else socket.AF_INET) as dying:
            dying.connect(str(service.run_directory.api_socket) if is_unix else (url.hostname, url.port))
            dying.sendall(hold + more)
            received = b""
            while b"event: handle" not in received:
                received += (more_received := dying.recv(4096))
                assert more_received, received
            assert client.get_pool(pool_id).num_holders == 1
            dying.sendall(more)
        until(lambda: client.get_pool(pool_id).num_holders == 0, timeout_s=COMMENT_S / 2)  # not by writing to it


def test_a_stream_ends_when_the_memory_is_lost(service: ApiService) -> None:
    pool_id = create(service, handle_kind="cuda_ipc")
    transport = httpx.HTTPTransport(uds=str(service.run_directory.api_socket))
    with httpx.Client(transport=transport, base_url="http://kvpage", timeout=60) as client:
        with client.stream("GET", f"/v1/pools/{pool_id}/hold") as answer:
            lines = answer.iter_lines()
            assert next(lines) == "event: handle"
            [holder] = children_of(service.worker_pid())
            os.kill(holder, signal.SIGKILL)
            rest = list(lines)  # to the end of the stream
            told = rest[rest.index("event: lost") + 1]
            assert json.loads(told.removeprefix("data: "))["code"] == StaleHandle.code


def test_memory_is_kept_for_a_stream_when_the_worker_dies(service: ApiService, devices: FakeDevices) -> None:
    pool_id = create(service, handle_kind="cuda_ipc")
    with held(service, pool_id):
        worker = service.worker_pid()
        kill_process(worker)
        with service.client() as client:
            until(lambda: client.devices()[0].worker_pid not in (None, worker))
            client.delete_pool(pool_id, wait_s=60)
        assert devices.used_bytes(devices.uuids[0]) > 0
    until(lambda: devices.used_bytes(devices.uuids[0]) == 0)


def test_ending_the_server_ends_the_streams(service: ApiService) -> None:
    pool_id = create(service, handle_kind="cuda_ipc")
    with held(service, pool_id):
        assert service.terminate() == -signal.SIGTERM


def test_memory_that_no_handle_names_is_refused(service: ApiService) -> None:
    pool_id = create(service)
    transport = httpx.HTTPTransport(uds=str(service.run_directory.api_socket))
    with httpx.Client(transport=transport, base_url="http://kvpage", timeout=60) as client:
        body = assert_problem(client.get(f"/v1/pools/{pool_id}/hold"), Conflict.code)
        assert "cuda_ipc" in body["detail"]
        assert_problem(client.get("/v1/pools/pool-0123456789abcdef/hold"), PoolNotFound.code)
    with service.client() as http:
        assert http.get_pool(pool_id).num_holders == 0


def test_the_handle_stands_in_no_log_and_in_no_other_answer(service: ApiService) -> None:
    pool_id = create(service, handle_kind="cuda_ipc")
    with held(service, pool_id) as event, service.client() as client:
        handle = event["handle"]
        shown = repr((client.get_pool(pool_id), client.pools(), client.devices(), client.pool_tensors(pool_id)))
        assert handle not in shown
    assert handle[:20] not in service.log()
