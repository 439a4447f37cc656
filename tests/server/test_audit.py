"""What the audit log of a server says of its requests, and what the server does while it can say nothing."""

from __future__ import annotations

import json
import os
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvpage.errors import AuditUnavailable, PermissionDenied
from kvpage_server import audit
from kvpage_server.app import create_app
from kvpage_server.audit import REFUSALS_AT_ONCE
from kvpage_server.audit_log import AuditLog
from kvpage_server.operations import Operation
from kvpage_server.roles import RULES
from support.api_in_process import in_process, settings_without_worker
from support.api_service import ApiService, run_refused
from support.eventually import until
from support.leaks import leak_guard
from support.plan_requests import small_request
from support.token_files import token_of, with_every_role

NO_POOL = "pool-0123456789abcdef"
LEASE_ID = "lease-of-mine-0123456789abcdef"
Records = list[dict[str, Any]]


def records_of(path: Path) -> Records:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[ApiService]:
    """A real one, over TCP with every role."""
    arguments = ["--token-file", str(with_every_role(folder)), "--audit-log", str(folder / "audit.jsonl")]
    with leak_guard(), tempfile.TemporaryDirectory(prefix="kvp-") as run_dir:
        with ApiService(Path(run_dir), "--port", "0", "--memory", "64MiB", *arguments) as service:
            yield service


def told_of(service: ApiService, folder: Path, request_id: str, num_records: int) -> Records:
    """The records of one request. The last of them comes after the answer."""

    def found() -> Records:
        return [record for record in records_of(folder / "audit.jsonl") if record["request_id"] == request_id]

    until(lambda: len(found()) >= num_records)
    return found()


def call(service: ApiService, method: str, path: str, request_id: str, role: str | None = None, **more: Any) -> int:
    """Over the Unix socket, or with a role over TCP. The status."""
    headers = {"X-Request-ID": request_id}
    transport = httpx.HTTPTransport(uds=str(service.run_directory.api_socket)) if role is None else None
    if role is not None:
        headers["Authorization"] = f"Bearer {token_of(role)}"
    base_url = "http://kvpage" if role is None else service.url
    with httpx.Client(transport=transport, base_url=base_url, timeout=60) as client:
        return client.request(method, path, headers=headers, **more).status_code


def test_a_change_has_a_line_before_and_a_line_after(service: ApiService, folder: Path) -> None:
    body = {"name": "mimo", "request": small_request()}
    assert call(service, "POST", "/v1/pools", "create-1", json=body) in (201, 202)
    begin, end = told_of(service, folder, "create-1", 2)
    with service.client() as client:
        pool = client.find_pool("mimo")
    who = {"uid": os.geteuid(), "gid": os.getegid(), "pid": os.getpid()}
    assert (begin["event"], end["event"], begin["id"]) == ("begin", "end", end["id"])
    assert begin["operation"] == end["operation"] == "create_pool"
    assert begin["who"] == end["who"] == who
    assert begin["role"] == end["role"] == "admin"
    assert end["resources"] == {"name": "mimo", "device": "host", "pool_id": pool.id}
    assert end["status"] in (201, 202)
    assert begin["time"] < end["time"]
    assert call(service, "DELETE", f"/v1/pools/{pool.id}?wait=30", "delete-1") == 204
    begin, end = told_of(service, folder, "delete-1", 2)
    assert begin["resources"] == end["resources"] == {"pool_id": pool.id}


def test_over_tcp_it_is_the_name_of_the_token_and_the_address(service: ApiService, folder: Path) -> None:
    assert call(service, "PUT", f"/v1/pools/{NO_POOL}/tenants/team", "tenant-1", role="admin", json={}) == 404
    begin, end = told_of(service, folder, "tenant-1", 2)
    assert begin["who"] == {"token": "the-admin", "address": "127.0.0.1"}
    assert (begin["role"], begin["operation"]) == ("admin", "set_tenant")
    assert begin["resources"] == {"pool_id": NO_POOL, "name": "team"}
    assert (end["status"], end["code"]) == (404, "pool-not-found")


@pytest.mark.parametrize(
    ("method", "path", "role", "status", "code"),
    [
        ("POST", "/v1/pools", "read", 403, "permission-denied"),
        ("GET", "/v1/pools", "wrong", 401, "unauthorized"),
        ("GET", "/v1/events/x", "wrong", 401, "unauthorized"),
    ],
)
def test_whoever_may_not_is_told_of(
    service: ApiService, folder: Path, method: str, path: str, role: str, status: int, code: str
) -> None:
    request_id = f"refused-{role}-{path.replace('/', '.')}"
    assert call(service, method, path, request_id, role=role) == status
    [refused] = told_of(service, folder, request_id, 1)
    assert (refused["event"], refused["status"], refused["code"]) == ("refused", status, code)
    assert refused["who"] == {"address": "127.0.0.1"}


def test_reads_and_steps_of_a_lease_are_not_in_it(service: ApiService, folder: Path) -> None:
    lease = f"/v1/pools/{NO_POOL}/leases/{LEASE_ID}"
    call(service, "GET", "/v1/pools", "quiet", role="read")
    call(service, "POST", f"{lease}/blocks:batch", "quiet", role="allocate", json={})
    call(service, "POST", f"{lease}/renew", "quiet", role="allocate")
    call(service, "DELETE", lease, "loud", role="allocate")
    told_of(service, folder, "loud", 2)
    assert told_of(service, folder, "quiet", 0) == []


def test_no_secret_is_in_it(service: ApiService, folder: Path) -> None:
    """Neither tokens, right or wrong, nor the ids of leases, which open them."""
    call(service, "DELETE", f"/v1/pools/{NO_POOL}/leases/{LEASE_ID}", "lease-1", role="allocate")
    begin, _ = told_of(service, folder, "lease-1", 2)
    assert begin["resources"]["lease_id"].startswith("sha256:")
    call(service, "GET", "/v1/pools", "secret-1", role="wrong")
    told_of(service, folder, "secret-1", 1)
    content = (folder / "audit.jsonl").read_text()
    for secret in (LEASE_ID, *map(token_of, ("wrong", "allocate", "admin"))):
        assert secret not in content


def test_what_the_caller_chooses_cannot_break_a_line(service: ApiService, folder: Path) -> None:
    name = "a%09b%22%7D" + "x" * 5000
    call(service, "PUT", f"/v1/pools/{NO_POOL}/tenants/{name}", "odd-1", role="admin", json={})
    begin, _ = told_of(service, folder, "odd-1", 2)
    assert begin["resources"]["name"].startswith('a\\tb"}xxx')
    assert len(begin["resources"]["name"]) <= 200


# --- a disk that is full ----------------------------------------------------------------------------------------------


def limit_files(service: ApiService, size_bytes: int) -> None:
    """Let no file of the server grow beyond that: to it this looks like a disk without room (EFBIG)."""
    _, hard = resource.prlimit(service.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(service.pid, resource.RLIMIT_FSIZE, (size_bytes, hard))


def test_while_nothing_can_be_recorded_nothing_is_changed_and_all_else_goes_on(
    service: ApiService, folder: Path
) -> None:
    path = folder / "audit.jsonl"
    with service.client() as client:
        pool = client.create_pool(small_request(), name="before")
        limit_files(service, path.stat().st_size + 50)  # a line does not fit
        for _ in range(3):
            with pytest.raises(AuditUnavailable) as refused:
                client.create_pool(small_request(), name="during")
            assert refused.value.retryable
            with pytest.raises(AuditUnavailable):
                client.delete_pool(pool.id)
        assert client.pools() == [pool]
        assert client.plan(small_request()).plan_id == pool.plan_id
        assert client.health().status == "ready"
        limit_files(service, resource.RLIM_INFINITY)
        client.delete_pool(pool.id)  # by itself, and at once
        until(lambda: path.read_bytes().endswith(b'"status":204}\n'))
    lines = path.read_bytes().splitlines()
    whole = [line for line in lines if line.endswith(b"}")]
    assert len(lines) - len(whole) == 1  # the line that was torn, by itself
    assert json.loads(whole[-1])["operation"] == "delete_pool"


# --- how much of it there can be --------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_strangers_cannot_fill_the_disk(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refusals are told of up to a rate, and then how many were left out."""
    monkeypatch.setattr(audit, "REFUSALS_PER_S", 1e-6)
    path = run_dir / "audit.jsonl"
    async with in_process(create_app(settings_without_worker(run_dir, audit_log=path)), caller=None) as api:
        for _ in range(int(REFUSALS_AT_ONCE) + 50):
            assert (await api.get("/v1/pools")).status_code == 403
    assert len(records_of(path)) == REFUSALS_AT_ONCE


def test_how_many_were_left_out_is_told_with_the_next(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.jsonl")
    records = audit.Audit(log)
    waits = iter([0, 1, 1, 0])
    records._refusals.take = lambda name: next(waits)  # type: ignore[method-assign]
    scope = {"method": "GET", "path": "/x", "headers": []}
    for _ in range(4):
        records.refused(scope, Operation("none", RULES["metrics"], {}), PermissionDenied("no"))
    log.close()
    assert [record["num_left_out_before"] for record in records_of(tmp_path / "audit.jsonl")] == [0, 2]


def test_a_log_that_cannot_be_opened_stops_the_start(run_dir: Path) -> None:
    done = run_refused(run_dir, "--audit-log", str(run_dir / "absent" / "audit.jsonl"))
    assert done.returncode == 2
    assert "audit log" in done.stderr
    assert not (run_dir / "kvpage.sock").exists()
