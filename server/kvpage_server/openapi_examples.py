"""Examples in the API's description: requests that work, the answers to them, and every problem once."""

from __future__ import annotations

from typing import Any

import msgspec

from kvpage.client import resources
from kvpage.errors import FieldError, error_from_code
from kvpage.planner.planner import plan as plan_request
from kvpage.plans import Plan
from kvpage_server import openapi_fleet
from kvpage_server import openapi_lease_examples as lease_examples
from kvpage_server.problems import PROBLEM_JSON, problem_of

PLAN_REQUEST: dict[str, Any] = {
    "layers": [
        {
            "name": "target.{i}", "count": 2, "kind": "full_attention", "block_size": 16, "num_kv_heads": 8,
            "head_size": 192, "dtype": "bfloat16", "backend": "flash_attn",
        },
        {
            "name": "draft", "kind": "sliding_window", "sliding_window": 1024, "block_size": 16, "num_kv_heads": 8,
            "head_size": 128, "dtype": "bfloat16", "backend": "flash_attn", "draft": True,
        },
    ],
    "strategy": "unify",
    "memory_bytes": 4 << 20,
}  # fmt: skip
POOL_REQUEST = {"name": "mimo", "device": "host", "request": PLAN_REQUEST}
POOL_ID = "pool-0123456789abcdef"
EPOCH = "0123456789abcdef" * 2
REQUEST_ID = "0123456789abcdef"
_HOLDER = resources.Holder(pid=4711, uid=1000, client_name="engine 0")

# Code: message, details, faults. As the server words them.
PROBLEMS: dict[str, tuple[str, dict[str, Any], list[FieldError]]] = {
    "http-invalid": ("this is not an HTTP/1.1 request; nothing in it was looked at", {}, []),
    "json-invalid": ("the key 'layers' appears twice in one object", {}, []),
    "unauthorized": ("the Authorization header does not carry a token of this server", {}, []),
    "permission-denied": (
        "/v1/pools is not served over TCP without a token; use the Unix socket, or start the server with --token-file",
        {}, [],
    ),
    "not-found": ("there is nothing at /v1/plan; see /openapi.json", {}, []),
    "plan-not-found": ("plan sha256:00 is not known here; POST its request to /v1/plans again", {}, []),
    "pool-not-found": (f"there is no pool {POOL_ID}", {"pool_id": POOL_ID}, []),
    "method-not-allowed": ("/v1/plans takes POST, not PUT", {}, []),
    "request-timeout": (
        "the request's body was not complete within 30 s; send it faster", {"limit_s": 30}, [],
    ),
    "conflict": (
        f"pool {POOL_ID} (mimo) has 1 holders: pid 4711 uid 1000 (engine 0); end them or let them detach first",
        {"num_holders": 1, "holders": [msgspec.to_builtins(_HOLDER)]}, [],
    ),
    "not-enough-memory": (
        "a pool of 4190000 bytes takes 4194304, in whole units of memory; 1048576 bytes are left of --memory",
        {"buffer_size_bytes": 4190000, "needed_bytes": 4194304, "available_bytes": 1048576}, [],
    ),
    "out-of-blocks": ("the pool has 3 free blocks; 5 were asked for", {}, []),
    "stale-handle": (f"pool {POOL_ID} (mimo): the process that held the memory has ended", {}, []),
    "too-large": ("the body has 5000000 bytes or more; at most 4194304 are read", {"limit_bytes": 4194304}, []),
    "unsupported-media-type": ("Content-Type is missing; send Content-Type: application/json", {}, []),
    "spec-invalid": (
        "/layers/1/block_size: Input should be a valid integer", {},
        [FieldError("/layers/1/block_size", "Input should be a valid integer")],
    ),
    "cannot-unify-page-size": ("layer draft has pages of 65536 bytes, which do not divide 98304", {}, []),
    "layout-unsupported": ("layer draft: its backend has no layered stride order", {}, []),
    "not-supported": (
        "/model/config: model_type 'xyz' is not known", {},
        [FieldError("/model/config", "model_type 'xyz' is not known")],
    ),
    "rate-limited": ("1022 requests wait to be planned; try again shortly", {}, []),
    "internal": ("kvpage made a mistake; the server's log has the cause under this request_id", {}, []),
    "protocol-error": ("the worker answered request 7, request 8 was asked", {}, []),
    "worker-lost": ("the worker has ended the connection", {}, []),
    "device-unavailable": ("device host is lost: its worker ended", {"device": "host", "state": "lost"}, []),
    "draining": ("the server is shutting down and creates no more pools", {}, []),
    "audit-unavailable": (
        "the audit log cannot record this request, so it was not done: No space left on device", {}, []
    ),
    "too-many-clients": ("the worker has 780 clients and takes no more", {}, []),
}  # fmt: skip


def add_examples(document: dict[str, Any]) -> None:
    """Put an example beside every schema of a body, and one for each code beside that of a problem."""
    plan = plan_request(PLAN_REQUEST)
    bodies = _bodies(plan)
    for operations in document["paths"].values():
        for operation in operations.values():
            _add_to_parameters(operation, plan)
            for message in (operation.get("requestBody", {}), *operation["responses"].values()):
                for content in message.get("content", {}).values():
                    schema = content.get("schema", {})
                    name = (schema.get("$ref") or schema.get("anyOf", [{}])[0].get("$ref", "")).rpartition("/")[2]
                    if name in bodies:
                        content["example"] = bodies[name]
    for answer in document["components"]["responses"].values():
        codes = [code for code in PROBLEMS if f"`{code}`" in answer["description"]]
        answer["content"][PROBLEM_JSON]["examples"] = {code: {"value": problem(code)} for code in codes}


def problem(code: str) -> Any:
    message, details, faults = PROBLEMS[code]
    return msgspec.to_builtins(problem_of(error_from_code(code, message, details=details, errors=faults), REQUEST_ID))


def _add_to_parameters(operation: dict[str, Any], plan: Plan) -> None:
    values = {
        "plan_id": (f"Content address of the plan, such as {plan.plan_id[:19]}…", plan.plan_id),
        "pool_id": ("Given by the server when the pool was created", POOL_ID),
        "lease_id": ("Given by the server when the lease was opened or adopted", lease_examples.LEASE_ID),
        "reservation_id": ("Given by the server when the blocks were set aside", lease_examples.RESERVATION_ID),
        "fleet_plan_id": ("Id or name of a plan of the fleet", openapi_fleet.FLEET_PLAN_ID),
        "name": ("Of the tenant; empty for the tenant of those who name none", lease_examples.TENANT),
    }
    for parameter in operation.get("parameters", ()):
        if parameter["in"] == "path":
            parameter["description"], parameter["example"] = values[parameter["name"]]


def _bodies(plan: Plan) -> dict[str, Any]:
    """An example for each schema that is a body."""
    pool = resources.Pool(
        id=POOL_ID, name="mimo", device="host", state="ready", plan_id=plan.plan_id, epoch=EPOCH,
        buffer_size_bytes=plan.buffer_size_bytes, committed_bytes=plan.buffer_size_bytes, num_holders=1,
        holders=[_HOLDER],
    )  # fmt: skip
    device = resources.Device(
        device="host", state="ready", handle_kinds=["memfd"], epoch=EPOCH, worker_pid=4700,
        memory_limit_bytes=1 << 30, reserved_bytes=plan.buffer_size_bytes, num_pools=1, pinned_bytes=0,
        free_bytes=3 << 30, free_age_s=0.0,
    )  # fmt: skip
    tensors = [
        resources.PoolTensor(
            layer=layer.name, name=view.name, dtype=view.dtype, shape=view.shape, strides_bytes=view.strides_bytes,
            offset_bytes=view.offset_bytes,
        )
        for layer in plan.layers.values()
        for view in layer.tensors
    ]  # fmt: skip
    answers = {
        "Pool": pool,
        "PoolList": resources.PoolList(pools=[pool]),
        "ForgottenPool": resources.ForgottenPool(
            id=POOL_ID, pinned_bytes=plan.buffer_size_bytes, num_holders=1, holders=[_HOLDER]
        ),
        "DeviceList": resources.DeviceList(devices=[device]),
        "PoolTensors": resources.PoolTensors(
            pool_id=POOL_ID, plan_id=plan.plan_id, epoch=EPOCH, device="host",
            buffer_size_bytes=plan.buffer_size_bytes, tensors=tensors,
        ),
        "Health": resources.Health(status="ready"),
    }  # fmt: skip
    return {
        "PlanRequest": PLAN_REQUEST,
        "PoolRequest": POOL_REQUEST,
        "Plan": msgspec.json.decode(plan.to_json()),
        **openapi_fleet.examples(PLAN_REQUEST, plan.plan_id),
        **lease_examples.REQUESTS,
        **lease_examples.answers(POOL_ID),
        **{name: msgspec.to_builtins(value) for name, value in answers.items()},
    }
