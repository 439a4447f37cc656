"""The API keeps to its description: schemathesis sends what it allows and what it does not, to the application with a
real worker, and compares every answer with what it promises.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.core.failures import FailureGroup
from schemathesis.python import asgi
from schemathesis.schemas import BaseSchema
from schemathesis.specs.openapi.checks import positive_data_acceptance
from starlette.types import ASGIApp, Receive, Scope, Send

from kvpage.run_directory import RunDirectory
from kvpage_server.app import create_app
from kvpage_server.openapi_examples import PLAN_REQUEST, POOL_REQUEST
from kvpage_server.openapi_lease_examples import REQUESTS as LEASE_REQUESTS
from kvpage_server.openapi_lease_examples import TENANT
from kvpage_server.settings import Settings
from support.api_in_process import OWN_CALLER, CalledBy
from support.checkout import ROOT
from support.eventually import until
from support.memory_fleet import manager_of, small_fleet
from support.plan_requests import small_request
from support.worker_process import WorkerProcess


class Late:
    """Stands for an application that is made when the tests begin, so that they can be collected before."""

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


LATE = Late()
EXAMPLES = {"/v1/plans": PLAN_REQUEST, "/v1/pools": POOL_REQUEST}
SEEN: defaultdict[str, set[int]] = defaultdict(set)
"""Statuses by operation."""
DOCUMENT = json.loads((ROOT / "docs" / "openapi.json").read_text())
DESCRIBED = schemathesis.openapi.from_dict(DOCUMENT)
DESCRIBED.app = LATE


def with_one_request() -> BaseSchema:
    """The same, but a pool's body has one request. POST /v1/plans tries each bound of requests, thousands; the long
    tier tries them inside a pool's body too.
    """
    document = copy.deepcopy(DOCUMENT)
    document["components"]["schemas"]["PoolRequest"]["properties"]["request"] = {"enum": [POOL_REQUEST["request"]]}
    described = schemathesis.openapi.from_dict(document)
    described.app = LATE
    return described


IS_LONG = settings.get_current_profile_name() == "long"
DESCRIBED_FOR = {} if IS_LONG else {"/v1/pools": with_one_request()}


@pytest.fixture(scope="module", autouse=True)
def served() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="kvp-") as folder, WorkerProcess(Path(folder), "--memory", "64MiB"):
        settings = Settings(run_directory=RunDirectory(Path(folder)), external_workers=True)
        app = create_app(settings, join_fleet=lambda: manager_of(small_fleet()))
        LATE.app = CalledBy(app, OWN_CALLER)
        until(is_ready)
        yield
        asgi.shutdown_lifespans()


def is_ready() -> bool:
    with asgi.get_client(cast(Any, LATE)) as client:
        return bool(client.get("/readyz").ok)


NO_POOL = "pool-0123456789abcdef"
# A schema cannot say which layers go together or which devices there are: these may refuse what it allows.
PARTICULAR = {"POST /v1/plans", "POST /v1/pools", "GET /v1/pools", "POST /v1/fleet/plans"}
# How many groups a pool has is in its plan; where a reader of events was, only the server can say.
PARTICULAR |= {"GET /v1/pools/{pool_id}/contents", "GET /v1/events"}
# To a schema 8.0 is an integer; these refuse it, as all of kvpage does. And an id may be of a lease that has ended.
PARTICULAR |= {
    f"{method.upper()} {path}"
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
    if "requestBody" in operation or "{lease_id}" in path
}


def check(case: schemathesis.Case[Any], response: schemathesis.Response) -> None:
    label = case.operation.label
    SEEN[label].add(response.status_code)
    case.validate_response(response, excluded_checks=[positive_data_acceptance] if label in PARTICULAR else [])


def answers_are_as_described(method: str, path: str) -> Any:
    """A test of one operation."""

    @DESCRIBED_FOR.get(path, DESCRIBED).include(method=method, path=path).parametrize()
    @settings(max_examples=6, suppress_health_check=list(HealthCheck))
    def test(case: schemathesis.Case[Any]) -> None:
        if path == "/v1/events":  # of no pool that is there: else it would go on for ever
            case.query = {"pool_id": NO_POOL, **(case.query or {})}
        response = case.call()
        if response.status_code == 503:  # a machine so busy that worker and API lost each other for a moment
            until(is_ready)
            response = case.call()
        check(case, response)

    return test


# One function for each: the tests that schemathesis makes of one function have one id, and side by side only one runs.
for _path, _methods in DOCUMENT["paths"].items():
    for _method in _methods:
        globals()[f"test_answers_{_method}_{_path}"] = answers_are_as_described(_method.upper(), _path)


# The events of a pool that is there would go on for ever.
class Workflow(DESCRIBED.exclude(path="/v1/events").as_state_machine()):  # type: ignore[misc]  # its class is made at run time
    """Goes from what was created to what can be done with it, by the links of the description."""

    def setup(self) -> None:
        """Every scenario begins with the same server, so that hypothesis can repeat one."""
        with asgi.get_client(cast(Any, LATE)) as client:
            for pool in client.get("/v1/pools").json()["pools"]:
                assert client.delete(f"/v1/pools/{pool['id']}", params={"force": "true"}).ok
            assert client.post("/v1/plans", json=PLAN_REQUEST).ok

    def before_call(self, case: schemathesis.Case[Any]) -> None:
        """Generated requests hardly ever make a plan, so the described ones are sent."""
        mode = case.meta and case.meta.generation.mode
        if case.method == "POST" and mode == schemathesis.GenerationMode.POSITIVE:
            case.body = EXAMPLES.get(case.path, case.body)
            case.headers["Prefer"] = "wait=30"

    def validate_response(self, response: schemathesis.Response, case: schemathesis.Case[Any], **_: Any) -> None:
        check(case, response)


TestWorkflow = Workflow.TestCase
TestWorkflow.settings = settings(
    max_examples=50 if IS_LONG else 6, stateful_step_count=8, suppress_health_check=list(HealthCheck)
)


def test_what_is_done_with_what_is_there_is_as_described() -> None:
    """The workflow above need not come by every link; here each is followed once."""
    with asgi.get_client(cast(Any, LATE)) as client:
        for pool in client.get("/v1/pools").json()["pools"]:
            assert client.delete(f"/v1/pools/{pool['id']}", params={"force": "true"}).ok
        plan = client.post("/v1/plans", json=PLAN_REQUEST).json()
        pool = client.post("/v1/pools", json=cast(Any, POOL_REQUEST), headers={"Prefer": "wait=30"}).json()
    done = [
        ("/v1/plans/{plan_id}", "GET", {"plan_id": plan["plan_id"]}),
        ("/v1/plans/{plan_id}/layout.svg", "GET", {"plan_id": plan["plan_id"]}),
        ("/v1/pools/{pool_id}", "GET", {"pool_id": pool["id"]}),
        ("/v1/pools/{pool_id}/tensors", "GET", {"pool_id": pool["id"]}),
        ("/v1/pools/{pool_id}", "DELETE", {"pool_id": pool["id"]}),
    ]
    for path, method, parameters in done:
        case = DESCRIBED[path][method].Case(path_parameters=parameters)
        response = case.call()
        assert response.status_code < 300, (method, path)
        check(case, response)


def test_what_is_done_with_a_lease_is_as_described() -> None:
    """Each operation with the example of its body."""
    lease, tenant = "/v1/pools/{pool_id}/leases/{lease_id}", "/v1/pools/{pool_id}/tenants/{name}"
    with asgi.get_client(cast(Any, LATE)) as client:
        for pool in client.get("/v1/pools").json()["pools"]:
            assert client.delete(f"/v1/pools/{pool['id']}", params={"force": "true"}).ok
        pool = client.post("/v1/pools", json=cast(Any, POOL_REQUEST), headers={"Prefer": "wait=30"}).json()
    parts = {"pool_id": pool["id"], "name": TENANT}
    opened = do("/v1/pools/{pool_id}/leases", "POST", parts, LEASE_REQUESTS["LeaseRequest"])
    adopted = do("/v1/pools/{pool_id}/leases:adopt", "POST", parts, LEASE_REQUESTS["LeaseAdoption"])
    assert adopted["generation"] == opened["generation"] + 1
    parts["lease_id"] = adopted["lease_id"]
    for what in ("prefix:find", "prefix:take"):
        do(f"{lease}/{what}", "POST", parts, {"hashes": [[], [], []], "at_most_tokens": 16})
    do(f"{lease}/blocks:batch", "POST", parts, {"allocate": {"0": 2, "1": 1}})
    reserved = do(f"{lease}/reservations", "POST", parts, LEASE_REQUESTS["ReservationRequest"])
    parts["reservation_id"] = reserved["reservation_id"]
    do(f"{lease}/reservations/{{reservation_id}}:commit", "POST", parts, LEASE_REQUESTS["ReservationCommit"])
    do(f"{lease}/reservations/{{reservation_id}}", "DELETE", parts)
    do(tenant, "PUT", parts, LEASE_REQUESTS["TenantRequest"])
    for path, query in (
        ("/v1/pools/{pool_id}", {}), ("/v1/pools/{pool_id}/leases", {}), (lease, {"group": 0}), (tenant, {}),
        ("/v1/pools/{pool_id}/tenants", {}), ("/v1/pools/{pool_id}/contents", {"group": 0}),
        ("/v1/pools/{pool_id}/block-map", {}),
    ):  # fmt: skip
        do(path, "GET", parts, query=query)
    for method, path in (
        ("POST", f"{lease}/renew"), ("DELETE", lease), ("POST", "/v1/pools/{pool_id}/prefixes:clear"),
    ):  # fmt: skip
        do(path, method, parts)


def test_a_fleet_does_what_is_described() -> None:
    do("/v1/fleet", "GET", {})
    plan = do("/v1/fleet/plans", "POST", {}, {"name": "described", "request": small_request(ranks=[{}, {}])})
    for method in ("GET", "DELETE"):
        do("/v1/fleet/plans/{fleet_plan_id}", method, {"fleet_plan_id": plan["id"]})


def do(path: str, method: str, parts: dict[str, str], body: Any = None, query: dict[str, Any] | None = None) -> Any:
    """Its answer, which is as described."""
    named = {name: value for name, value in parts.items() if f"{{{name}}}" in path}
    with_body = {} if body is None else {"body": body, "media_type": "application/json"}
    case = DESCRIBED[path][method].Case(path_parameters=named, query=query or {}, **with_body)
    response = case.call()
    assert response.status_code < 300, (method, path, response.content)
    check(case, response)
    return json.loads(response.content) if response.content else None


def test_every_operation_has_been_done_and_has_been_refused() -> None:
    """Otherwise the comparisons above have seen only half of what they are for."""
    described = {f"{method.upper()} {path}" for path, methods in DOCUMENT["paths"].items() for method in methods}
    if SEEN.keys() != described:
        pytest.skip("only when every test of this file has run")
    for label, statuses in SEEN.items():
        # A stream is never done: tests/server/test_events.py reads one, tests/cuda/test_hold.py the other.
        assert min(statuses) < 300 or label.endswith(("/hold", "/events")), label
        assert max(statuses) >= 400, label


@pytest.mark.parametrize(
    ("status", "body"), [(418, {}), (200, {}), (200, {"pools": [{"id": 7}]}), (500, {"pools": []})]
)
def test_the_comparison_fires(status: int, body: object) -> None:
    with pytest.raises(FailureGroup):
        case_of_pools().validate_response(answer(status, body))


def test_the_comparison_does_not_fire_without_cause() -> None:
    case_of_pools().validate_response(answer(200, {"pools": []}))


def case_of_pools() -> schemathesis.Case[Any]:
    return DESCRIBED["/v1/pools"]["GET"].Case()


def answer(status: int, body: object) -> httpx.Response:
    response = httpx.Response(status, json=body, request=httpx.Request("GET", "http://testserver/v1/pools"))
    response.elapsed = timedelta(0)
    return response
