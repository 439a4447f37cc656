"""What the description says about leases, tenants, contents and events."""

from __future__ import annotations

from typing import Any

from kvpage.client import block_resources
from kvpage.wire import leasing
from kvpage_server import lease_bodies
from kvpage_server.lease_keys import MAX_KEYS
from kvpage_server.openapi import Answers, answer, answers, body, headers, problems, query
from kvpage_server.queries import DEFAULT_CELLS

_WORKER = (502, 503)
_IN_POOL = (404, 409, 422, *_WORKER)
"""Of what is done with a pool whose blocks may be leased or not."""
_OF_LEASE = (404, 410, 422, *_WORKER)
_BODY = (400, 413, 415)

_GROUP: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 9999}
_TOKEN = {"type": "string"}
_KEY = {
    "name": "Idempotency-Key", "in": "header", "required": False,
    "schema": {"type": "string", "minLength": 1, "maxLength": 200, "pattern": "^[!-~]+$"},
    "description": "another one for each request: the same request with the same key is done once. The lease's last "
    f"request is answered again, also by another server; for one of the {MAX_KEYS} before it that is refused",
}  # fmt: skip

# --- leases -----------------------------------------------------------------------------------------------------------

_LEASE = {
    "headers": headers(Location="Where the lease is"),
    "links": {
        operation: {
            "operationId": operation,
            "parameters": {"pool_id": "$response.body#/pool_id", "lease_id": "$response.body#/lease_id"},
        }
        for operation in ("get_lease", "renew_lease", "delete_lease")
    },
}
LEASE_BODY = body("LeaseRequest")
ADOPTION_BODY = body("LeaseAdoption")
POST_LEASE_ANSWERS: Answers = {
    201: answer("OpenedLease", "A lease without blocks", **_LEASE),
    **problems(*_BODY, *_IN_POOL),
}
ADOPT_ANSWERS: Answers = {
    200: answer("OpenedLease", "The lease with its blocks, and another id"),
    **problems(*_BODY, *_IN_POOL, 410),
}
LEASE_LIST_ANSWERS = answers("LeaseList", *_IN_POOL)
HELD_PARAMETERS = {
    "parameters": [
        query("group", "list the blocks that it holds of this group", _GROUP),
        query("page_token", "`next_page_token` of the page before", _TOKEN),
    ]
}
LEASE_ANSWERS = answers("LeaseView", *_OF_LEASE)
RENEW_ANSWERS = answers("RenewedLease", *_OF_LEASE)
DELETE_ANSWERS: Answers = {204: {"description": "All that it held is given back"}, **problems(*_OF_LEASE)}

# --- blocks -----------------------------------------------------------------------------------------------------------

BATCH_BODY = {**body("LeaseBatch"), "parameters": [_KEY]}
BATCH_ANSWERS = answers("GrantedBlocks", *_BODY, *_OF_LEASE, 409, 429)
TAKE_BODY = {**body("PrefixRequest"), "parameters": [_KEY]}
TAKE_ANSWERS = answers("PrefixBlocks", *_BODY, *_OF_LEASE, 409)
FIND_BODY = body("PrefixRequest")
FIND_ANSWERS = answers("FoundBlocks", *_BODY, *_OF_LEASE, 409)
RESERVATION_BODY = body("ReservationRequest")
RESERVE_ANSWERS: Answers = {
    201: answer("ReservedBlocks", "Blocks are set aside"),
    **problems(*_BODY, *_OF_LEASE, 409, 429),
}
COMMIT_BODY = {**body("ReservationCommit"), "parameters": [_KEY]}
COMMIT_ANSWERS = answers("GrantedBlocks", *_BODY, *_OF_LEASE, 409)
DELETE_RESERVATION_ANSWERS: Answers = {204: {"description": "They are given back"}, **problems(*_OF_LEASE)}

# --- tenants and contents ---------------------------------------------------------------------------------------------

TENANT_BODY = body("TenantRequest")
TENANT_LIST_ANSWERS = answers("TenantList", *_IN_POOL)
MAP_PARAMETERS = {
    "parameters": [
        query(
            "cells",
            f"how many at most; left out: {DEFAULT_CELLS}",
            {"type": "integer", "minimum": 1, "maximum": leasing.MAX_CELLS},
        )
    ]
}
MAP_ANSWERS = answers("BlockMap", *_IN_POOL)
TENANT_ANSWERS = answers("TenantState", *_IN_POOL)
PUT_TENANT_ANSWERS = answers("TenantState", *_BODY, *_IN_POOL)
CLEAR_ANSWERS: Answers = {204: {"description": "Nothing is cached any more"}, **problems(*_IN_POOL)}
CONTENTS_PARAMETERS = {
    "parameters": [
        {**query("group", "of which group", _GROUP), "required": True},
        query("page_token", "`next_page_token` of the page before", _TOKEN),
    ]
}
CONTENTS_ANSWERS = answers("ContentsPage", *_IN_POOL, 410)
EVENT_PARAMETERS = {
    "parameters": [
        query("pool_id", "only of this pool; the stream ends with it", {"type": "string"}),
        {
            "name": "Last-Event-ID", "in": "header", "required": False, "schema": {"type": "string"},
            "description": "go on after this event, or from a `cursor` of a list of contents",
        },
    ]
}  # fmt: skip
_EVENT = 'event: stored\nid: kZLAAA==\ndata: {"pool_id": "pool-0123456789abcdef", "number": 1, "group": 0, …}\n\n'
EVENT_ANSWERS: Answers = {
    200: {
        "description": "Events `stored` and `removed`, `missed`, and `pool`; their data is JSON. docs/api.md has them",
        "content": {"text/event-stream": {"schema": {"type": "string"}, "example": _EVENT}},
    },
    **problems(404, 422, 429, *_WORKER),
}

KINDS = [
    lease_bodies.LeaseRequest, lease_bodies.LeaseAdoption, lease_bodies.LeaseBatch, lease_bodies.PrefixRequest,
    lease_bodies.ReservationRequest, lease_bodies.ReservationCommit, lease_bodies.TenantRequest,
    block_resources.OpenedLease, block_resources.LeaseList, block_resources.LeaseView, block_resources.RenewedLease,
    block_resources.GrantedBlocks, block_resources.PrefixBlocks, block_resources.FoundBlocks,
    block_resources.ReservedBlocks, block_resources.TenantList, block_resources.BlockMap, block_resources.ContentsPage,
]  # fmt: skip
"""Of bodies."""
