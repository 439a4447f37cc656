"""Who may do what: on the Unix socket by user and group, over TCP by token and Host."""

from __future__ import annotations

import functools
import json
import os
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvpage.errors import KvpageError, PermissionDenied, Unauthorized
from kvpage.run_directory import RunDirectory
from kvpage.wire.credentials import Peer
from kvpage_server import peer_protocol
from kvpage_server.access import AccessPolicy, Caller, Identity
from kvpage_server.app import Application, create_app
from kvpage_server.operations import Operations
from kvpage_server.roles import Role
from kvpage_server.settings import Settings
from kvpage_server.tokens import TokenFile
from support.api_in_process import BASE_URL, in_process, settings_without_worker
from support.plan_requests import small_request
from support.problems import assert_problem
from support.token_files import token_file, token_of, with_every_role

TOKEN = "0123456789abcdef0123456789abcdef"
asynchronous = pytest.mark.anyio

OPEN = ["/livez", "/errors", "/openapi.json", "/v1/devices"]
CLOSED = [
    ("GET", "/v1/pools"),
    ("POST", "/v1/pools"),
    ("GET", "/v1/pools/pool-00"),
    ("DELETE", "/v1/pools/pool-00"),
    ("GET", "/v1/pools/pool-00/tensors"),
    ("POST", "/v1/pools/pool-00/leases"),
    ("GET", "/v1/pools/pool-00/hold"),
    ("GET", "/metrics"),
    ("GET", "/v1/anything/new"),
]


def tcp_scope(path: str, *headers: tuple[str, str], server: tuple[str, int] = ("127.0.0.1", 8000)) -> dict[str, Any]:
    named = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers]
    return {"path": path, "headers": named, "server": server, "client": ("192.0.2.7", 50000)}


def peer_scope(uid: int, gid: int = 1, groups: frozenset[int] = frozenset()) -> dict[str, Any]:
    caller = Caller(peer=Peer(pid=1, uid=uid, gid=gid), groups=groups)
    return {"path": "/v1/pools", "headers": [], "server": ("/run/kvpage.sock", None), "state": {"caller": caller}}


POLICY = AccessPolicy(server_uid=1000)
WITH_GROUP = AccessPolicy(server_uid=1000, group_gid=50)


@functools.cache
def operations() -> Operations:
    app = create_app(Settings(run_directory=RunDirectory(Path("/nonexistent"))))
    assert isinstance(app, Application)
    return app.operations


def check(policy: AccessPolicy, scope: dict[str, Any], method: str = "GET") -> Identity:
    identity = policy.identify(scope)
    policy.authorize(identity, operations().find(method, scope["path"]), scope)
    return identity


@pytest.fixture
def with_token(tmp_path: Path) -> AccessPolicy:
    return AccessPolicy(server_uid=1000, tokens=TokenFile(token_file(tmp_path, TOKEN)))


@pytest.fixture
def with_roles(tmp_path: Path) -> AccessPolicy:
    return AccessPolicy(server_uid=1000, tokens=TokenFile(with_every_role(tmp_path)))


@pytest.mark.parametrize("scope", [peer_scope(0), peer_scope(1000), peer_scope(1000, gid=7)])
def test_the_servers_own_user_and_root_may_do_everything(scope: dict[str, Any]) -> None:
    assert check(POLICY, scope).role is Role.ADMIN
    assert check(WITH_GROUP, scope).role is Role.ADMIN


def test_members_of_the_group_may_do_everything() -> None:
    assert check(WITH_GROUP, peer_scope(1001, gid=50)).role is Role.ADMIN
    assert check(WITH_GROUP, peer_scope(1001, groups=frozenset({49, 50}))).role is Role.ADMIN


@pytest.mark.parametrize(
    ("policy", "scope"),
    [
        (POLICY, peer_scope(1001)),
        (POLICY, peer_scope(1001, gid=1000, groups=frozenset({0, 1000}))),
        (WITH_GROUP, peer_scope(1001, gid=51, groups=frozenset({49}))),
        (WITH_GROUP, peer_scope(65534)),
    ],
)
def test_strangers_on_the_unix_socket_are_refused(policy: AccessPolicy, scope: dict[str, Any]) -> None:
    with pytest.raises(PermissionDenied):
        check(policy, scope)


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost:8000", "LOCALHOST:8000", "[::1]:8000"])
def test_names_of_the_loopback_are_accepted(host: str) -> None:
    check(POLICY, tcp_scope("/v1/plans", ("Host", host)), "POST")


@pytest.mark.parametrize(
    "host",
    [
        "evil.example:8000", "evil.example", "127.0.0.1", "127.0.0.1:8001", "localhost", "127.0.0.1:8000.evil.example",
        "localhost:8000@evil", "", " ", "0.0.0.0:8000", "[::]:8000",
    ],
)  # fmt: skip
def test_other_names_are_refused_even_for_reads(host: str) -> None:
    with pytest.raises(PermissionDenied):
        check(POLICY, tcp_scope("/livez", ("Host", host)))


def test_no_host_and_two_hosts_are_refused() -> None:
    with pytest.raises(PermissionDenied):
        check(POLICY, tcp_scope("/livez"))
    with pytest.raises(PermissionDenied):
        check(POLICY, tcp_scope("/livez", ("Host", "127.0.0.1:8000"), ("Host", "evil.example")))


@pytest.mark.parametrize(("scheme", "port"), [("http", 80), ("https", 443)])
def test_another_address_goes_by_its_own_name_only(with_token: AccessPolicy, scheme: str, port: int) -> None:
    def scope(host: str) -> dict[str, Any]:
        return {**tcp_scope("/livez", ("Host", host), server=("192.0.2.1", port)), "scheme": scheme}

    check(with_token, scope("192.0.2.1"))
    check(with_token, scope(f"192.0.2.1:{port}"))
    for other in (f"localhost:{port}", f"127.0.0.1:{port}", "192.0.2.1:8080"):
        with pytest.raises(PermissionDenied):
            check(with_token, scope(other))


@pytest.mark.parametrize("value", [f"Bearer {TOKEN}", f"bearer {TOKEN}", f"Bearer  {TOKEN} "])
def test_a_token_that_stands_alone_opens_everything_under_any_name(with_token: AccessPolicy, value: str) -> None:
    scope = tcp_scope("/v1/pools/p/prefixes:clear", ("Authorization", value), ("Host", "kvpage.example"))
    assert check(with_token, scope, "POST") == Identity(Role.ADMIN, "token")


@pytest.mark.parametrize(
    "value",
    ["", "Bearer", "Bearer ", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Basic {TOKEN}", TOKEN, "Bearer \xe9"],
)
@pytest.mark.parametrize("has_file", [False, True])
def test_a_wrong_token_is_refused_wherever_it_is_sent(with_token: AccessPolicy, value: str, has_file: bool) -> None:
    for path in ("/livez", "/v1/plans", "/v1/pools"):
        with pytest.raises(Unauthorized):
            check(
                with_token if has_file else POLICY,
                tcp_scope(path, ("Authorization", value), ("Host", "127.0.0.1:8000")),
            )


def test_two_different_tokens_are_no_token(with_roles: AccessPolicy) -> None:
    tokens = [("Authorization", f"Bearer {token_of(role)}") for role in ("read", "admin")]
    with pytest.raises(Unauthorized):
        check(with_roles, tcp_scope("/livez", *tokens, ("Host", "127.0.0.1:8000")))


def test_without_a_token_file_pools_are_forbidden_and_with_one_they_need_it(with_token: AccessPolicy) -> None:
    scope = tcp_scope("/v1/pools", ("Host", "127.0.0.1:8000"))
    with pytest.raises(PermissionDenied):
        check(POLICY, scope)
    with pytest.raises(Unauthorized):
        check(with_token, scope)


@pytest.mark.parametrize(
    "path", ["/v1/plansX", "/v1/devices/host", "/livez/", "/v1/plan", "", "//v1/plans", "/V1/plans", "/v1/plans/"]
)
def test_only_listed_paths_are_open(path: str) -> None:
    with pytest.raises(PermissionDenied):
        check(POLICY, tcp_scope(path, ("Host", "127.0.0.1:8000")))


def test_a_token_takes_nothing_away_that_everybody_may_do(with_roles: AccessPolicy) -> None:
    """Under a name the server is bound to; under another the role decides."""
    token = ("Authorization", f"Bearer {token_of('read')}")
    check(with_roles, tcp_scope("/v1/plans", token, ("Host", "127.0.0.1:8000")), "POST")
    with pytest.raises(PermissionDenied):
        check(with_roles, tcp_scope("/v1/plans", token, ("Host", "kvpage.example")), "POST")
    planner = ("Authorization", f"Bearer {token_of('plan')}")
    check(with_roles, tcp_scope("/v1/plans", planner, ("Host", "kvpage.example")), "POST")


@pytest.mark.parametrize(
    ("scheme", "client", "allowed"),
    [
        ("http", "127.0.0.1", True),
        ("http", "::1", True),
        ("https", "192.0.2.7", True),
        ("http", "192.0.2.7", False),
        ("http", "::ffff:192.0.2.7", False),
    ],
)
def test_what_opens_memory_is_not_sent_to_another_machine_in_the_clear(
    with_roles: AccessPolicy, scheme: str, client: str, allowed: bool
) -> None:
    headers = [("Authorization", f"Bearer {token_of('allocate')}"), ("Host", "kvpage.example")]
    scope = {**tcp_scope("/v1/pools/p/hold", *headers), "scheme": scheme, "client": (client, 50000)}
    if allowed:
        check(with_roles, scope)
        return
    with pytest.raises(PermissionDenied, match="in the clear"):
        check(with_roles, scope)
    check(with_roles, {**scope, "path": "/v1/pools/p"})  # anything else it may


def test_a_refusal_says_what_is_needed_and_not_the_token(with_roles: AccessPolicy) -> None:
    headers = [("Authorization", f"Bearer {token_of('read')}"), ("Host", "kvpage.example")]
    with pytest.raises(KvpageError) as refused:
        check(with_roles, tcp_scope("/v1/pools", *headers), "POST")
    assert refused.value.details == {"needed_role": "allocate", "role": "read"}
    assert "the-read" in refused.value.message
    assert token_of("read") not in refused.value.message


@asynchronous
async def test_over_tcp_reads_and_planning_are_served(api_over_tcp: httpx.AsyncClient) -> None:
    for path in OPEN:
        assert (await api_over_tcp.get(path)).status_code == 200
    posted = await api_over_tcp.post("/v1/plans", json=small_request())
    assert posted.status_code == 201
    assert (await api_over_tcp.get(posted.headers["location"])).status_code == 200


@asynchronous
@pytest.mark.parametrize(("method", "path"), CLOSED)
async def test_over_tcp_pools_are_refused(api_over_tcp: httpx.AsyncClient, method: str, path: str) -> None:
    assert_problem(await api_over_tcp.request(method, path), "permission-denied")


@asynchronous
async def test_a_refused_body_is_not_read(api_over_tcp: httpx.AsyncClient) -> None:
    response = await api_over_tcp.post("/v1/pools", content=b" " * (64 << 20))
    assert_problem(response, "permission-denied")


@asynchronous
async def test_a_token_opens_pools_over_tcp(run_dir: Path) -> None:
    settings = settings_without_worker(run_dir, token_file=token_file(run_dir, TOKEN))
    async with in_process(create_app(settings), caller=None) as api:
        refused = await api.get("/v1/pools")
        assert_problem(refused, "unauthorized")
        assert refused.headers["www-authenticate"] == "Bearer"
        allowed = await api.get("/v1/pools", headers={"Authorization": f"Bearer {TOKEN}", "Host": "any.example"})
        assert allowed.json() == {"pools": []}


@asynchronous
async def test_a_rebound_name_reaches_nothing(api_over_tcp: httpx.AsyncClient) -> None:
    response = await api_over_tcp.get(f"{BASE_URL}/v1/devices", headers={"Host": "evil.example:8000"})
    assert_problem(response, "permission-denied")


@asynchronous
async def test_no_page_of_another_origin_may_read_or_be_asked_before(api_over_tcp: httpx.AsyncClient) -> None:
    """There is no CORS: browsers keep answers from such pages, and do not send what needs to be asked for first."""
    origin = {"Origin": "http://evil.example"}
    for path in ("/livez", "/v1/devices", "/v1/plans", "/v1/pools"):
        asked = {**origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
        for response in (
            await api_over_tcp.get(path, headers=origin),
            await api_over_tcp.options(path, headers=asked),
        ):
            assert not [name for name in response.headers if name.startswith("access-control-")]
        assert response.status_code in (403, 405)


@asynchronous
@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
async def test_a_form_of_another_page_does_nothing(api_over_tcp: httpx.AsyncClient, media_type: str) -> None:
    """These are what a page may send anywhere without asking."""
    body = json.dumps(small_request()).encode()
    refused = await api_over_tcp.post("/v1/plans", content=body, headers={"Content-Type": media_type})
    assert_problem(refused, "unsupported-media-type")
    refused = await api_over_tcp.post("/v1/pools", content=body, headers={"Content-Type": media_type})
    assert_problem(refused, "permission-denied")


def test_who_connects_is_known_by_the_connection_itself(no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without another descriptor: opening and closing one would wait for the planning threads, a thousand times."""
    ours, theirs = socket.socketpair(socket.AF_UNIX)

    def fail(_fd: int) -> int:
        raise AssertionError("a descriptor was duplicated")

    monkeypatch.setattr(os, "dup", fail)
    with ours, theirs:
        caller = peer_protocol._caller(ours.fileno())
        assert (caller.peer.pid, caller.peer.uid) == (os.getpid(), os.geteuid())
        theirs.send(b"x")
        assert ours.recv(1) == b"x"
