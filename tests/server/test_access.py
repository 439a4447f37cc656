"""Who may do what: on the Unix socket by user and group, over TCP by token and Host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from kvpage.errors import PermissionDenied, Unauthorized
from kvpage.wire.credentials import Peer
from kvpage_server.access import AccessPolicy, Caller
from kvpage_server.app import create_app
from support.api_in_process import BASE_URL, in_process, settings_without_worker
from support.plan_requests import small_request
from support.problems import assert_problem

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
    return {"path": path, "headers": named, "server": server}


def peer_scope(uid: int, gid: int = 1, groups: frozenset[int] = frozenset()) -> dict[str, Any]:
    caller = Caller(peer=Peer(pid=1, uid=uid, gid=gid), groups=groups)
    return {"path": "/v1/pools", "headers": [], "server": ("/run/kvpage.sock", None), "state": {"caller": caller}}


POLICY = AccessPolicy(server_uid=1000)
WITH_GROUP = AccessPolicy(server_uid=1000, group_gid=50)
WITH_TOKEN = AccessPolicy(server_uid=1000, token=TOKEN.encode())


@pytest.mark.parametrize("scope", [peer_scope(0), peer_scope(1000), peer_scope(1000, gid=7)])
def test_the_servers_own_user_and_root_may_do_everything(scope: dict[str, Any]) -> None:
    POLICY.check(scope)
    WITH_GROUP.check(scope)


def test_members_of_the_group_may_do_everything() -> None:
    WITH_GROUP.check(peer_scope(1001, gid=50))
    WITH_GROUP.check(peer_scope(1001, groups=frozenset({49, 50})))


@pytest.mark.parametrize(
    ("policy", "scope"),
    [
        (POLICY, peer_scope(1001)),
        (POLICY, peer_scope(1001, gid=1000, groups=frozenset({0, 1000}))),
        (WITH_GROUP, peer_scope(1001, gid=51, groups=frozenset({49}))),
        (WITH_TOKEN, peer_scope(65534)),
    ],
)
def test_strangers_on_the_unix_socket_are_refused(policy: AccessPolicy, scope: dict[str, Any]) -> None:
    with pytest.raises(PermissionDenied):
        policy.check(scope)


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost:8000", "LOCALHOST:8000", "[::1]:8000"])
def test_names_of_the_loopback_are_accepted(host: str) -> None:
    POLICY.check(tcp_scope("/v1/plans", ("Host", host)))


@pytest.mark.parametrize(
    "host",
    [
        "evil.example:8000", "evil.example", "127.0.0.1", "127.0.0.1:8001", "localhost", "127.0.0.1:8000.evil.example",
        "localhost:8000@evil", "", " ", "0.0.0.0:8000", "[::]:8000",
    ],
)  # fmt: skip
def test_other_names_are_refused_even_for_reads(host: str) -> None:
    with pytest.raises(PermissionDenied):
        POLICY.check(tcp_scope("/livez", ("Host", host)))


def test_no_host_and_two_hosts_are_refused() -> None:
    with pytest.raises(PermissionDenied):
        POLICY.check(tcp_scope("/livez"))
    with pytest.raises(PermissionDenied):
        POLICY.check(tcp_scope("/livez", ("Host", "127.0.0.1:8000"), ("Host", "evil.example")))


def test_another_address_goes_by_its_own_name_only() -> None:
    server = ("192.0.2.1", 80)
    WITH_TOKEN.check(tcp_scope("/livez", ("Host", "192.0.2.1"), server=server))
    WITH_TOKEN.check(tcp_scope("/livez", ("Host", "192.0.2.1:80"), server=server))
    with pytest.raises(PermissionDenied):
        WITH_TOKEN.check(tcp_scope("/livez", ("Host", "localhost:80"), server=server))


@pytest.mark.parametrize("value", [f"Bearer {TOKEN}", f"bearer {TOKEN}", f"Bearer  {TOKEN} "])
def test_the_token_opens_everything_under_any_name(value: str) -> None:
    WITH_TOKEN.check(tcp_scope("/v1/pools", ("Authorization", value), ("Host", "kvpage.example")))


@pytest.mark.parametrize(
    "value",
    ["", "Bearer", "Bearer ", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Basic {TOKEN}", TOKEN, "Bearer \xe9"],
)
@pytest.mark.parametrize("policy", [POLICY, WITH_TOKEN])
def test_a_wrong_token_is_refused_wherever_it_is_sent(policy: AccessPolicy, value: str) -> None:
    for path in ("/livez", "/v1/plans", "/v1/pools"):
        with pytest.raises(Unauthorized):
            policy.check(tcp_scope(path, ("Authorization", value), ("Host", "127.0.0.1:8000")))


def test_without_a_token_file_pools_are_forbidden_and_with_one_they_need_it() -> None:
    scope = tcp_scope("/v1/pools", ("Host", "127.0.0.1:8000"))
    with pytest.raises(PermissionDenied):
        POLICY.check(scope)
    with pytest.raises(Unauthorized):
        WITH_TOKEN.check(scope)


@pytest.mark.parametrize(
    "path", ["/v1/plansX", "/v1/devices/host", "/livez/", "/v1/plan", "", "//v1/plans", "/V1/plans"]
)
def test_only_listed_paths_are_open(path: str) -> None:
    with pytest.raises(PermissionDenied):
        POLICY.check(tcp_scope(path, ("Host", "127.0.0.1:8000")))


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
    token_file = run_dir / "token"
    token_file.write_text(TOKEN)
    token_file.chmod(0o600)
    async with in_process(create_app(settings_without_worker(run_dir, token_file=token_file)), caller=None) as api:
        refused = await api.get("/v1/pools")
        assert_problem(refused, "unauthorized")
        assert refused.headers["www-authenticate"] == "Bearer"
        allowed = await api.get("/v1/pools", headers={"Authorization": f"Bearer {TOKEN}", "Host": "any.example"})
        assert allowed.json() == {"pools": []}


@asynchronous
async def test_a_rebound_name_reaches_nothing(api_over_tcp: httpx.AsyncClient) -> None:
    response = await api_over_tcp.get(f"{BASE_URL}/v1/devices", headers={"Host": "evil.example:8000"})
    assert_problem(response, "permission-denied")
