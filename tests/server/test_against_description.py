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
from kvpage_server.settings import Settings
from support.api_in_process import OWN_CALLER, CalledBy
from support.checkout import ROOT
from support.eventually import until
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
        app = create_app(Settings(run_directory=RunDirectory(Path(folder)), external_workers=True))
        LATE.app = CalledBy(app, OWN_CALLER)
        until(is_ready)
        yield
        asgi.shutdown_lifespans()


def is_ready() -> bool:
    with asgi.get_client(cast(Any, LATE)) as client:
        return bool(client.get("/readyz").ok)


# A schema cannot say which layers go together or which devices there are: these may refuse what it allows.
PARTICULAR = {"POST /v1/plans", "POST /v1/pools", "GET /v1/pools"}


def check(case: schemathesis.Case[Any], response: schemathesis.Response) -> None:
    label = case.operation.label
    SEEN[label].add(response.status_code)
    case.validate_response(response, excluded_checks=[positive_data_acceptance] if label in PARTICULAR else [])


def answers_are_as_described(method: str, path: str) -> Any:
    """A test of one operation."""

    @DESCRIBED_FOR.get(path, DESCRIBED).include(method=method, path=path).parametrize()
    @settings(max_examples=10, suppress_health_check=list(HealthCheck))
    def test(case: schemathesis.Case[Any]) -> None:
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


class Workflow(DESCRIBED.as_state_machine()):  # type: ignore[misc]  # its class is made at run time
    """Goes from what was created to what can be done with it, by the links of the description."""

    def setup(self) -> None:
        """Every scenario begins with the same server, so that hypothesis can repeat one."""
        with asgi.get_client(cast(Any, LATE)) as client:
            for pool in client.get("/v1/pools").json()["pools"]:
                assert client.delete(f"/v1/pools/{pool['id']}").ok
            assert client.post("/v1/plans", json=PLAN_REQUEST).ok

    def before_call(self, case: schemathesis.Case[Any]) -> None:
        """Generated requests hardly ever make a plan, so the described ones are sent."""
        mode = case.meta and case.meta.generation.mode
        if case.method == "POST" and mode == schemathesis.GenerationMode.POSITIVE:
            case.body = EXAMPLES[case.path]
            case.headers["Prefer"] = "wait=30"

    def validate_response(self, response: schemathesis.Response, case: schemathesis.Case[Any], **_: Any) -> None:
        check(case, response)


TestWorkflow = Workflow.TestCase
TestWorkflow.settings = settings(max_examples=15, stateful_step_count=8, suppress_health_check=list(HealthCheck))


def test_what_is_done_with_what_is_there_is_as_described() -> None:
    """The workflow above need not come by every link; here each is followed once."""
    with asgi.get_client(cast(Any, LATE)) as client:
        for pool in client.get("/v1/pools").json()["pools"]:
            assert client.delete(f"/v1/pools/{pool['id']}").ok
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


def test_every_operation_has_been_done_and_has_been_refused() -> None:
    """Otherwise the comparisons above have seen only half of what they are for."""
    described = {f"{method.upper()} {path}" for path, methods in DOCUMENT["paths"].items() for method in methods}
    if SEEN.keys() != described:
        pytest.skip("only when every test of this file has run")
    for label, statuses in SEEN.items():
        # A stream is never done, and only memory of a GPU has handles: tests/cuda/test_hold.py opens it.
        assert min(statuses) < 300 or label.endswith("/hold"), label
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
