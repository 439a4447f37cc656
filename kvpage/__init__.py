"""kvpage: plan one KV-cache page layout for all layers of a model, hold its memory, share it between processes.

    plan = kvpage.plan(request)              # pure, no server
    client = kvpage.Client()                 # the API process
    with kvpage.attach("mimo") as kv:        # any process on this machine
        k = kv.tensor("draft.0")

Importing kvpage loads nothing else: what a name needs is imported when the name is first used (PEP 562).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpage._version import __version__ as __version__
    from kvpage.client.async_http import AsyncClient as AsyncClient
    from kvpage.client.attachment import Attachment as Attachment
    from kvpage.client.connection import Connection as Connection
    from kvpage.client.connection import attach as attach
    from kvpage.client.connection import connect as connect
    from kvpage.client.http import Client as Client
    from kvpage.client.leasing import adopt_lease as adopt_lease
    from kvpage.client.leasing import open_lease as open_lease
    from kvpage.errors import KvpageError as KvpageError
    from kvpage.planner.planner import plan as plan
    from kvpage.planner.ranks import plan_ranks as plan_ranks
    from kvpage.plans import Plan as Plan
    from kvpage.ranked_plan import RankedPlan as RankedPlan
    from kvpage.request import PlanRequest as PlanRequest

_HOMES = {
    "AsyncClient": "kvpage.client.async_http",
    "Attachment": "kvpage.client.attachment",
    "Client": "kvpage.client.http",
    "Connection": "kvpage.client.connection",
    "KvpageError": "kvpage.errors",
    "Plan": "kvpage.plans",
    "PlanRequest": "kvpage.request",
    "RankedPlan": "kvpage.ranked_plan",
    "__version__": "kvpage._version",
    "adopt_lease": "kvpage.client.leasing",
    "attach": "kvpage.client.connection",
    "connect": "kvpage.client.connection",
    "open_lease": "kvpage.client.leasing",
    "plan": "kvpage.planner.planner",
    "plan_ranks": "kvpage.planner.ranks",
}
__all__ = [  # provided by __getattr__
    "AsyncClient",
    "Attachment",
    "Client",
    "Connection",
    "KvpageError",
    "Plan",
    "PlanRequest",
    "RankedPlan",
    "__version__",
    "adopt_lease",
    "attach",
    "connect",
    "open_lease",
    "plan",
    "plan_ranks",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'kvpage' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
