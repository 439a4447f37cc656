"""What clients ask of the API process about leases, tenants and contents, as `calls` has it for pools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar
from urllib.parse import quote

import msgspec

from kvpage.client.arguments import checked_optional, checked_seconds, checked_text
from kvpage.client.block_resources import (
    BlockMap,
    ContentsPage,
    FoundBlocks,
    GrantedBlocks,
    HeldPage,
    LeaseList,
    LeaseState,
    LeaseView,
    OpenedLease,
    PrefixBlocks,
    RenewedLease,
    ReservedBlocks,
    TenantList,
    TenantState,
)
from kvpage.client.calls import Call, Request, encode, get, segment
from kvpage.errors import ProtocolError

_Kind = TypeVar("_Kind", bound=msgspec.Struct)
Groups = Mapping[int, Sequence[int]]


def pool_path(pool_id: str, rest: str) -> str:
    return f"/v1/pools/{segment('pool_id', pool_id)}/{rest}"


def _post(path: str, body: object, kind: type[_Kind], *, key: int | None = None, wait_s: float = 0.0) -> Call[_Kind]:
    headers = {} if key is None else {"Idempotency-Key": str(key)}
    request = Request(method="POST", path=path, body=encode(body), headers=headers, wait_s=wait_s)
    return (yield from get(request, kind))


def _done(method: str, path: str) -> Call[None]:
    answer = yield Request(method=method, path=path)
    answer.checked()


# --- leases ----------------------------------------------------------------------------------------------------------


def create_lease(pool_id: str, *, name: str, ttl_s: float, tenant: str, token: str | None) -> Call[OpenedLease]:
    body = {
        "name": checked_text("name", name),
        "ttl_s": checked_seconds("ttl_s", ttl_s),
        "tenant": checked_text("tenant", tenant),
        "token": checked_optional("token", token),
    }
    return (yield from _post(pool_path(pool_id, "leases"), body, OpenedLease))


def adopt_lease(pool_id: str, *, name: str, token: str, ttl_s: float, generation: int | None) -> Call[OpenedLease]:
    body = {
        "name": checked_text("name", name),
        "token": checked_text("token", token),
        "ttl_s": checked_seconds("ttl_s", ttl_s),
        "generation": generation,
    }
    return (yield from _post(pool_path(pool_id, "leases:adopt"), body, OpenedLease))


def leases(pool_id: str) -> Call[list[LeaseState]]:
    return (yield from get(Request(method="GET", path=pool_path(pool_id, "leases")), LeaseList)).leases


class LeaseCalls:
    """Of one lease."""

    def __init__(self, pool_id: str, lease_id: str) -> None:
        self._path = pool_path(pool_id, f"leases/{segment('lease_id', lease_id)}")

    def renew(self) -> Call[RenewedLease]:
        return (yield from get(Request(method="POST", path=f"{self._path}/renew"), RenewedLease))

    def close(self) -> Call[None]:
        return (yield from _done("DELETE", self._path))

    def state(self) -> Call[LeaseState]:
        return (yield from get(Request(method="GET", path=self._path), LeaseView)).state

    def held(self, group: int) -> Call[list[HeldPage]]:
        """All pages."""
        pages: list[HeldPage] = []
        while not pages or pages[-1].next_page_token is not None:
            query = {"group": str(group), **({"page_token": str(pages[-1].next_page_token)} if pages else {})}
            page = (yield from get(Request(method="GET", path=self._path, query=query), LeaseView)).held
            if page is None:
                raise ProtocolError("the server told nothing of the blocks that the lease holds")
            pages.append(page)
        return pages

    def batch(self, body: object, *, key: int, wait_s: float) -> Call[GrantedBlocks]:
        return (yield from _post(f"{self._path}/blocks:batch", body, GrantedBlocks, key=key, wait_s=wait_s))

    def find_prefix(self, hashes: Sequence[Sequence[bytes]], at_most_tokens: int) -> Call[FoundBlocks]:
        return (yield from _post(f"{self._path}/prefix:find", _prompt(hashes, at_most_tokens), FoundBlocks))

    def take_prefix(self, hashes: Sequence[Sequence[bytes]], at_most_tokens: int, *, key: int) -> Call[PrefixBlocks]:
        return (yield from _post(f"{self._path}/prefix:take", _prompt(hashes, at_most_tokens), PrefixBlocks, key=key))

    def reserve(self, blocks: Mapping[int, int], *, wait_s: float, ttl_s: float) -> Call[ReservedBlocks]:
        body = {"blocks": blocks, "wait_s": wait_s, "ttl_s": checked_seconds("ttl_s", ttl_s)}
        return (yield from _post(f"{self._path}/reservations", body, ReservedBlocks, wait_s=wait_s))

    def commit_reservation(
        self, reservation_id: str, blocks: Mapping[int, int] | None, *, key: int
    ) -> Call[GrantedBlocks]:
        path = f"{self._path}/reservations/{segment('reservation_id', reservation_id)}:commit"
        return (yield from _post(path, {"blocks": blocks}, GrantedBlocks, key=key))

    def end_reservation(self, reservation_id: str) -> Call[None]:
        return (yield from _done("DELETE", f"{self._path}/reservations/{segment('reservation_id', reservation_id)}"))


def _prompt(hashes: Sequence[Sequence[bytes]], at_most_tokens: int) -> dict[str, object]:
    return {"hashes": [[one.hex() for one in some] for some in hashes], "at_most_tokens": at_most_tokens}


# --- tenants and contents --------------------------------------------------------------------------------------------


def tenants(pool_id: str) -> Call[list[TenantState]]:
    return (yield from get(Request(method="GET", path=pool_path(pool_id, "tenants")), TenantList)).tenants


def block_map(pool_id: str, max_cells: int) -> Call[BlockMap]:
    query = {"cells": str(max_cells)}
    return (yield from get(Request(method="GET", path=pool_path(pool_id, "block-map"), query=query), BlockMap))


def set_tenant(pool_id: str, name: str, *, quota_bytes: int | None, priority: int, weight: int) -> Call[TenantState]:
    path = pool_path(pool_id, f"tenants/{quote(checked_text('name', name), safe='')}")
    body = encode({"quota_bytes": quota_bytes, "priority": priority, "weight": weight})
    return (yield from get(Request(method="PUT", path=path, body=body), TenantState))


def clear_prefixes(pool_id: str) -> Call[None]:
    return (yield from _done("POST", pool_path(pool_id, "prefixes:clear")))


def contents(pool_id: str, group: int, page_token: str | None) -> Call[ContentsPage]:
    query = {"group": str(group), **({} if page_token is None else {"page_token": page_token})}
    return (yield from get(Request(method="GET", path=pool_path(pool_id, "contents"), query=query), ContentsPage))
