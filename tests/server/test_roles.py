"""Every operation has a role, and every role may do what the table says: tried over TCP, one by one."""

from __future__ import annotations

import itertools
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from starlette.routing import BaseRoute, Match, Route

from kvpage.run_directory import RunDirectory
from kvpage_server.app import Application, create_app
from kvpage_server.operations import Operations
from kvpage_server.roles import FORCED_DELETE, ROLES_BY_LABEL, RULES
from kvpage_server.settings import Settings
from support.api_service import ApiService
from support.leaks import leak_guard
from support.problems import assert_problem
from support.token_files import ROLES, token_of, with_every_role

NO_POOL = "pool-0123456789abcdef"
ASKERS = ("nobody", "wrong", *ROLES)
HOSTS = ("its own", "another")


def application() -> Application:
    app = create_app(Settings(run_directory=RunDirectory(Path("/nonexistent"))))
    assert isinstance(app, Application)
    return app


APP = application()


def asked_for(path: str) -> str:
    """A path of that form, of things that are not there."""
    return re.sub(r"\{\w+(:\w+)?\}", NO_POOL, path)


def requests_of(routes: list[BaseRoute]) -> list[tuple[str, str]]:
    return sorted(
        (method, asked_for(route.path))
        for route in routes
        if isinstance(route, Route)
        for method in route.methods or ()
    )


REQUESTS = requests_of(APP.routes)


# --- the table --------------------------------------------------------------------------------------------------------


def test_every_operation_has_a_role_and_the_table_has_no_others() -> None:
    assert APP.operations.names | {FORCED_DELETE} == RULES.keys()


def test_an_application_with_an_operation_without_a_role_is_not_made() -> None:
    app = FastAPI(openapi_url=None)
    app.add_api_route("/v1/new", lambda: None, methods=["POST"], operation_id="do_something_new")
    with pytest.raises(LookupError, match="do_something_new"):
        Operations(app.routes)


def test_what_changes_something_is_open_to_nobody() -> None:
    assert not [name for name, rule in RULES.items() if rule.is_open and (rule.is_change or rule.is_recorded)]


def routed(method: str, path: str) -> str:
    """The operation that the framework's router serves; `none` when it serves nothing."""
    scope = {"type": "http", "method": method, "path": path, "root_path": "", "headers": []}
    for route in APP.routes:
        if route.matches(scope)[0] is Match.FULL:
            assert isinstance(route, Route)
            return getattr(route, "operation_id", None) or route.name
    return "none"


def odd_paths() -> Iterator[str]:
    for _, path in REQUESTS:
        yield from (path, path + "/", "/" + path, path + "/x", path.upper(), path + ":adopt", path + "\n", path[:-1])
        yield from (path.replace("/v1", "", 1), path.replace(NO_POOL, "a/b"), path.replace(NO_POOL, ""), path + "/..")


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "get"])
def test_the_operation_is_the_one_that_the_router_serves(method: str) -> None:
    paths = sorted(set(odd_paths()))
    assert {path: APP.operations.find(method, path).name for path in paths} == {
        path: routed(method, path) for path in paths
    }


def test_a_path_that_is_asked_for_again_is_found_again() -> None:
    """Short paths are remembered; resources come with them."""
    for path in (f"/v1/pools/{NO_POOL}", "/v1/pools/" + "p" * 1000):
        first, second = APP.operations.find("GET", path), APP.operations.find("GET", path)
        assert first == second
        assert first.resources == {"pool_id": path.rpartition("/")[2]}


# --- every operation, every role, over TCP ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def service() -> Iterator[ApiService]:
    with leak_guard(), tempfile.TemporaryDirectory(prefix="kvp-") as folder, tempfile.TemporaryDirectory() as other:
        tokens = str(with_every_role(Path(other)))
        with ApiService(Path(folder), "--port", "0", "--memory", "64MiB", "--token-file", tokens) as service:
            yield service


def status_of(client: httpx.Client, method: str, path: str, asker: str, host: str) -> int:
    """Of the head of the answer: some go on for ever."""
    headers = {} if asker == "nobody" else {"Authorization": f"Bearer {token_of(asker)}"}
    if host == "another":
        headers["Host"] = "kvpage.example"
    with client.stream(method, path, headers=headers) as response:
        return response.status_code


def expected(method: str, path: str, asker: str, host: str) -> int | None:
    """401 or 403; None when it is served, whatever comes of it."""
    rule = APP.operations.find(method, path).rule
    if asker == "wrong":
        return 401
    if asker != "nobody" and ROLES_BY_LABEL[asker] >= rule.role:
        return None
    if rule.is_open:
        return 403 if host == "another" else None
    if asker == "nobody":
        return 403 if host == "another" else 401
    return 403


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("asker", ASKERS)
def test_each_operation_is_served_to_whom_the_table_says(service: ApiService, asker: str, host: str) -> None:
    with httpx.Client(base_url=service.url, timeout=60) as client:
        seen = {request: status_of(client, *request, asker, host) for request in REQUESTS}
    refused = {request: status if status in (401, 403) else None for request, status in seen.items()}
    assert refused == {request: expected(*request, asker, host) for request in REQUESTS}
    assert not [request for request, status in seen.items() if status == 500]


def test_the_matrix_can_fail() -> None:
    """It expects something of every kind, so a server that refuses or allows everything does not pass."""
    kinds = {expected(*request, asker, host) for request, asker, host in itertools.product(REQUESTS, ASKERS, HOSTS)}
    assert kinds == {401, 403, None}


def test_to_delete_what_others_hold_needs_more_than_to_delete(service: ApiService) -> None:
    path = f"/v1/pools/{NO_POOL}?force=true"
    with httpx.Client(base_url=service.url, timeout=60) as client:
        client.headers["Authorization"] = f"Bearer {token_of('allocate')}"
        refused = assert_problem(client.delete(path), "permission-denied")
        assert refused["details"] == {"needed_role": "admin", "role": "allocate"}
        assert_problem(client.delete(path.replace("true", "false")), "pool-not-found")
        client.headers["Authorization"] = f"Bearer {token_of('admin')}"
        assert_problem(client.delete(path), "pool-not-found")


def test_over_the_unix_socket_everything_is_served(service: ApiService) -> None:
    transport = httpx.HTTPTransport(uds=str(service.run_directory.api_socket))
    with httpx.Client(transport=transport, base_url="http://kvpage", timeout=60) as client:
        seen = {request: status_of(client, *request, "nobody", "another") for request in REQUESTS}
    assert {status for status in seen.values() if status in (401, 403)} == set()
