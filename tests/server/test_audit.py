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
    asked = {"name": "mimo", "device": "host", "plan_id": pool.plan_id}
    assert begin["resources"] == asked  # all that tells, after a crash, what may have been done
    assert end["resources"] == {**asked, "pool_id": pool.id}
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
    settings = {"quota_bytes": "none", "priority": 0, "weight": 1}
    assert begin["resources"] == {"pool_id": NO_POOL, "name": "team", **settings}
    assert (end["status"], end["code"]) == (404, "pool-not-found")


@pytest.mark.parametrize(
    ("method", "path", "role", "status", "code"),
    [
        ("POST", "/v1/pools", "read", 403, "permission-denied"),
        ("PUT", f"/v1/pools/{NO_POOL}/tenants/team", "allocate", 403, "permission-denied"),
        ("DELETE", f"/v1/pools/{NO_POOL}?force=true", "allocate", 403, "permission-denied"),
        ("GET", "/v1/pools", "wrong", 401, "unauthorized"),
        ("GET", "/v1/events/x", "wrong", 401, "unauthorized"),
    ],
)
def test_whoever_may_not_is_told_of(
    service: ApiService, folder: Path, method: str, path: str, role: str, status: int, code: str
) -> None:
    request_id = f"refused-{role}-{method}-{len(path)}"
    assert call(service, method, path, request_id, role=role) == status
    [refused] = told_of(service, folder, request_id, 1)
    assert (refused["event"], refused["status"], refused["code"]) == ("refused", status, code)
    is_known = role != "wrong"
    assert refused["who"] == {**({"token": f"the-{role}"} if is_known else {}), "address": "127.0.0.1"}
    assert refused.get("role") == (role if is_known else None)


FAULTY = [
    ("create_pool", "POST", "/v1/pools", {"name": "x", "request": {}}, {"name": "x", "device": "host"}),
    ("delete_pool", "DELETE", f"/v1/pools/{NO_POOL}?wait=soon", None, {"pool_id": NO_POOL}),
    ("create_lease", "POST", f"/v1/pools/{NO_POOL}/leases", {"name": 1}, {"pool_id": NO_POOL}),
    ("adopt_lease", "POST", f"/v1/pools/{NO_POOL}/leases:adopt", {"name": 1}, {"pool_id": NO_POOL}),
    ("create_fleet_plan", "POST", "/v1/fleet/plans", {"name": 1}, {}),
    ("delete_fleet_plan", "DELETE", "/v1/fleet/plans/mimo?force=maybe", None, {"fleet_plan_id": "mimo"}),
    ("set_tenant", "PUT", f"/v1/pools/{NO_POOL}/tenants/t", {"weight": 0}, {"pool_id": NO_POOL, "name": "t"}),
]
"""Requests that a role may make, with a fault."""


@pytest.mark.parametrize(("operation", "method", "path", "body", "resources"), FAULTY)
def test_a_faulty_request_that_began_nothing_is_told_of_once(
    service: ApiService, folder: Path, operation: str, method: str, path: str, body: Any, resources: dict[str, Any]
) -> None:
    status = call(service, method, path, f"faulty-{operation}", role="admin", json=body)
    assert status in (400, 422)
    [refused] = told_of(service, folder, f"faulty-{operation}", 1)
    assert (refused["event"], refused["operation"], refused["status"]) == ("refused", operation, status)
    assert refused["who"]["token"] == "the-admin"
    assert refused["resources"] == resources


def test_every_operation_whose_route_begins_the_record_is_tried_here() -> None:
    begun = {"create_lease", "adopt_lease", "create_pool", "delete_pool", "set_tenant"}
    begun |= {"create_fleet_plan", "delete_fleet_plan"}
    assert begun == {name for name, rule in RULES.items() if rule.begins_in_route} == {one[0] for one in FAULTY}


def test_the_line_before_has_what_the_body_and_the_query_name(service: ApiService, folder: Path) -> None:
    leases, of_lease = f"/v1/pools/{NO_POOL}/leases", {"name": "s", "token": "0" * 32}
    for request_id, method, path, body, named in (
        ("lease-2", "POST", leases, {"name": "s", "tenant": "t", "ttl_s": 30}, {"name": "s", "tenant": "t"}),
        ("adopt-2", "POST", f"{leases}:adopt", {**of_lease, "generation": 1, "ttl_s": 30}, {"name": "s"}),
        ("delete-2", "DELETE", f"/v1/pools/{NO_POOL}?force=true", None, {"force": True}),
    ):
        assert call(service, method, path, request_id, role="admin", json=body) == 404, request_id
        begin, end = told_of(service, folder, request_id, 2)
        assert (begin["event"], end["event"], end["status"]) == ("begin", "end", 404)
        assert begin["resources"] == {"pool_id": NO_POOL, **named}


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
        records.refused(scope, None, Operation("none", RULES["metrics"], {}), PermissionDenied("no"))
    log.close()
    assert [record["num_left_out_before"] for record in records_of(tmp_path / "audit.jsonl")] == [0, 2]


def test_a_log_that_cannot_be_opened_stops_the_start(run_dir: Path) -> None:
    done = run_refused(run_dir, "--audit-log", str(run_dir / "absent" / "audit.jsonl"))
    assert done.returncode == 2
    assert "audit log" in done.stderr
    assert not (run_dir / "kvpage.sock").exists()
