"""Leases through a real server and a real worker."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from support.api_service import ApiService
from support.eventually import until
from support.http_leases import NUM_BLOCKS, Lease, Pool, http_client
from support.problems import assert_problem

HASH = "000102030405060708090a0b0c0d0e0f"
NO_LEASE = "lease-0123456789abcdef"


@pytest.fixture
def pool(shared_service: ApiService) -> Iterator[Pool]:
    """Of the shared server; it goes with all its leases."""
    with http_client(shared_service) as http:
        pool = Pool(http)
        yield pool
        pool.delete()


@pytest.fixture
def lease(pool: Pool) -> Lease:
    return pool.lease()


def test_a_lease_is_opened_shown_and_given_back(pool: Pool) -> None:
    answer = pool.http.post(f"{pool.path}/leases", json={"name": "a", "tenant": "team", "ttl_s": 50})
    assert answer.status_code == 201
    opened = answer.json()
    lease = Lease(pool, opened)
    assert answer.headers["location"] == lease.path
    assert (opened["generation"], opened["expires_in_s"], opened["blocks"]) == (1, 50, [0, 0, 0])
    assert len(bytes.fromhex(opened["salt"])) == 16
    ids = lease.take(3)
    state = pool.http.get(lease.path).json()["state"]
    assert (state["name"], state["tenant"], state["blocks"], state["state"]) == ("a", "team", [3, 0, 0], "active")
    assert pool.blocks()["groups"][0]["leased"] == 3
    assert lease.held() == ids
    assert pool.http.delete(lease.path).status_code == 204
    assert pool.blocks()["groups"][0]["used"] == 0
    for gone in (pool.http.delete(lease.path), pool.http.get(lease.path), lease.post("renew"), lease.batch()):
        assert_problem(gone, "stale-handle")


def test_nobody_is_told_the_secrets_of_others(shared_service: ApiService, pool: Pool) -> None:
    lease = pool.lease(token="a-secret-of-my-own")
    lease.take(1)
    pool.adopt(name="scheduler", token="a-secret-of-my-own")
    everywhere = [pool.http.get(path).text for path in (pool.path, f"{pool.path}/leases", "/v1/pools", lease.path)]
    for secret in ("a-secret-of-my-own", "lease-"):
        assert not any(secret in text.replace(lease.id, "") for text in everywhere)
        assert secret not in shared_service.log()


def test_a_batch_is_done_whole_or_not_at_all(pool: Pool, lease: Lease) -> None:
    ids = lease.take(4)
    before = pool.blocks()
    too_many = lease.batch(free={"0": ids[:2]}, allocate={"1": 10_000})
    assert assert_problem(too_many, "out-of-blocks")["retryable"]
    assert_problem(lease.batch(free={"0": ids[:2], "1": [5]}, allocate={"0": 1}), "conflict")
    assert (lease.held(), pool.blocks()["groups"]) == (ids, before["groups"])
    swapped = lease.batch(free={"0": ids[:2]}, allocate={"0": 1, "1": 2}).json()
    assert len(lease.held()) == 3
    assert lease.held(1) == swapped["ids"]["1"]
    assert swapped["clear"] == {}


def test_what_is_committed_is_found_and_can_be_taken(pool: Pool, lease: Lease) -> None:
    other = pool.lease("other")
    for group in range(3):
        [block] = lease.take(1, group)
        assert lease.batch(commit={str(group): {"ids": [block], "hashes": [HASH]}}).is_success
    prompt = {"hashes": [[HASH]] * 3, "at_most_tokens": 16}
    found = other.post("prefix:find", prompt).json()
    assert (found["num_tokens"], found["num_revived"]) == (16, [0, 0, 0])
    taken = other.post("prefix:take", prompt, key="a").json()
    assert taken == {"num_tokens": 16, "ids": found["ids"]} == other.post("prefix:take", prompt, key="a").json()
    pool.http.delete(lease.path)
    assert pool.blocks()["groups"][0]["used"] == 1
    contents = pool.http.get(f"{pool.path}/contents", params={"group": 0}).json()
    assert contents["hashes"] == [HASH]
    assert pool.http.post(f"{pool.path}/prefixes:clear").status_code == 204
    assert other.post("prefix:find", prompt).json()["num_tokens"] == 0


def test_a_reservation_is_used_in_parts_and_given_back(pool: Pool, lease: Lease) -> None:
    reserved = lease.post("reservations", {"blocks": {"0": 5}, "ttl_s": 3600})
    assert (reserved.status_code, reserved.json()["expires_in_s"]) == (201, 3600)
    path = f"reservations/{reserved.json()['reservation_id']}"
    assert (lease.held(), pool.leases()[0]["reserved"]) == ([], [5, 0, 0])
    used = lease.post(f"{path}:commit", {"blocks": {"0": 2}}, key="a").json()
    assert lease.post(f"{path}:commit", {"blocks": {"0": 2}}, key="a").json() == used
    assert lease.held() == used["ids"]["0"]
    assert_problem(lease.post(f"{path}:commit", {"blocks": {"0": 4}}), "out-of-blocks")
    assert pool.http.delete(f"{lease.path}/{path}").status_code == 204
    assert_problem(pool.http.delete(f"{lease.path}/{path}"), "not-found")
    assert_problem(lease.post("reservations/mine:commit", {}), "not-found")
    assert pool.leases()[0]["reserved"] == [0, 0, 0]


def test_the_same_key_is_done_once_and_another_request_with_it_is_refused(pool: Pool, lease: Lease) -> None:
    first = lease.batch(key="a", allocate={"0": 2})
    assert lease.batch(key="a", allocate={"0": 2}).json() == first.json()
    assert lease.held() == first.json()["ids"]["0"]
    assert_problem(lease.batch(key="a", allocate={"0": 3}), "spec-invalid")
    assert_problem(lease.post("prefix:take", {"hashes": [[]] * 3, "at_most_tokens": 1}, key="a"), "spec-invalid")
    lease.take(1)
    assert_problem(lease.batch(key="a", allocate={"0": 2}), "conflict")  # not done a second time
    assert len(lease.held()) == 3


def test_a_refused_request_has_not_used_its_key(lease: Lease) -> None:
    assert_problem(lease.batch(key="a", allocate={"0": 1000}), "out-of-blocks")
    assert lease.batch(key="a", allocate={"0": 1}).is_success


@pytest.mark.parametrize("key", ["", "x" * 201])
def test_keys_have_a_length(lease: Lease, key: str) -> None:
    assert "Idempotency-Key" in assert_problem(lease.batch(key=key, allocate={"0": 1}), "spec-invalid")["detail"]


def test_an_adopted_lease_is_another_owners(pool: Pool) -> None:
    old = pool.lease(token="a-secret-of-my-own", ttl_s=60)
    ids = old.take(2)
    again = {"name": "scheduler", "token": "a-secret-of-my-own"}
    new = pool.adopt(**again, ttl_s=20, generation=1)
    assert (new.opened["generation"], new.opened["blocks"], new.opened["expires_in_s"]) == (2, [2, 0, 0], 20)
    assert "token" not in new.opened
    assert new.held() == ids
    assert_problem(old.batch(allocate={"0": 1}), "stale-handle")
    adopt = f"{pool.path}/leases:adopt"
    assert_problem(pool.http.post(adopt, json={**again, "generation": 1}), "stale-handle")
    assert_problem(pool.http.post(adopt, json={**again, "token": "not-the-right-one"}), "permission-denied")
    assert_problem(pool.http.post(adopt, json={**again, "name": "nobody"}), "not-found")
    assert_problem(pool.http.post(f"{pool.path}/leases", json={"name": "scheduler"}), "conflict")


def test_a_lease_ends_when_nobody_renews_it(pool: Pool) -> None:
    lease = pool.lease(ttl_s=0.05)
    until(lambda: pool.leases() == [])
    assert_problem(lease.batch(allocate={"0": 1}), "stale-handle")


def test_each_request_but_looking_renews_it(pool: Pool) -> None:
    lease = pool.lease(ttl_s=60)

    def left_s() -> float:
        seconds: float = pool.http.get(lease.path).json()["state"]["expires_in_s"]
        return seconds

    until(lambda: left_s() < 59.98)
    before = left_s()
    lease.take(1)
    assert left_s() > before
    until(lambda: left_s() < 59.98)
    assert lease.post("renew").json() == {"expires_in_s": 60}


def test_tenants_have_settings_and_what_they_hold_counts(pool: Pool) -> None:
    path = f"{pool.path}/tenants/team/a"
    assert_problem(pool.http.get(path), "not-found")
    block_bytes = pool.blocks()["groups"][0]["block_bytes"]
    settings = {"quota_bytes": 2 * block_bytes, "priority": -3, "weight": 7}
    put = pool.http.put(path, json=settings)
    assert settings.items() <= put.json().items()
    lease = pool.lease(tenant="team/a")
    lease.take(2)
    assert_problem(lease.batch(allocate={"0": 1}), "out-of-blocks")
    assert pool.http.get(path).json()["used_bytes"] == 2 * block_bytes
    assert pool.http.put(path, json={}).json()["quota_bytes"] is None
    lease.take(1)
    assert pool.http.put(f"{pool.path}/tenants/", json={"weight": 3}).json()["name"] == ""
    assert [tenant["name"] for tenant in pool.http.get(f"{pool.path}/tenants").json()["tenants"]] == ["", "team/a"]
    assert_problem(pool.http.put(f"{pool.path}/tenants/{'x' * 65}", json={}), "spec-invalid")


# --- waiting ----------------------------------------------------------------------------------------------------------


def num_waiting(pool: Pool) -> int:
    waiting: int = sum(tenant["num_waiting"] for tenant in pool.blocks()["tenants"])
    return waiting


def test_a_batch_waits_for_room_and_its_lease_lives_meanwhile(pool: Pool) -> None:
    holder, waiter = pool.lease("holder"), pool.lease("waiter", ttl_s=1.0)
    ids = holder.take(NUM_BLOCKS)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(waiter.batch, allocate={"0": 2}, wait_s=60)
        until(lambda: num_waiting(pool) == 1)
        longer = pool.lease("longer", ttl_s=1.1)  # ends after the waiter would have
        until(lambda: pool.http.get(longer.path).status_code == 410)
        assert holder.batch(free={"0": ids[:2]}).is_success
        granted = waiting.result(60).json()["ids"]["0"]
    assert sorted(granted) == waiter.held() == sorted(ids[:2])


def test_the_wait_ends_when_its_time_is_over(pool: Pool, lease: Lease) -> None:
    pool.lease("holder").take(NUM_BLOCKS)
    assert_problem(lease.batch(allocate={"0": 1}, wait_s=0.05), "out-of-blocks")
    assert_problem(lease.post("reservations", {"blocks": {"0": 1}, "wait_s": 0.05}), "out-of-blocks")
    assert num_waiting(pool) == 0


def test_a_client_that_leaves_gives_its_wait_up(shared_service: ApiService, pool: Pool, lease: Lease) -> None:
    pool.lease("holder").take(NUM_BLOCKS)
    with waiting_connection(shared_service, lease):
        until(lambda: num_waiting(pool) == 1)
    until(lambda: num_waiting(pool) == 0, timeout_s=20)  # the wait itself would be over after 60 s
    assert lease.batch().is_success  # which is still there


def waiting_connection(service: ApiService, lease: Lease) -> socket.socket:
    """On which a batch has been asked for that waits."""
    body = json.dumps({"allocate": {"0": 1}, "wait_s": 60}).encode()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(service.run_directory.api_socket))
    head = f"POST {lease.path}/blocks:batch HTTP/1.1\r\nHost: kvpage\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


def test_many_who_wait_keep_nobody_from_being_answered(shared_service: ApiService, pool: Pool) -> None:
    pool.lease("holder").take(NUM_BLOCKS)
    leases = [pool.lease(f"waiter {number}") for number in range(40)]  # more than there are threads
    connections = [waiting_connection(shared_service, lease) for lease in leases]
    try:
        until(lambda: num_waiting(pool) == len(leases))
        assert pool.http.get("/v1/devices").is_success
        assert Pool(pool.http, "another").http.get("/v1/pools").is_success
        assert not select.select(connections, [], [], 0)[0]
    finally:
        for connection in connections:
            connection.close()
    until(lambda: num_waiting(pool) == 0)
    Pool(pool.http, "another").delete()


# --- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({"allocate": {"x": 1}}, "/allocate"),
        ({"allocate": {"0": -1}}, "/allocate"),
        ({"commit": {"0": {"ids": [1], "hashes": ["XY"]}}}, "/commit"),
        ({"as_runs": "yes"}, "/as_runs"),
        ({"wait_s": 61}, "/wait_s"),
        ({"other": 1}, ""),
    ],
)
def test_a_faulty_batch_is_refused_with_a_pointer(lease: Lease, body: dict[str, Any], pointer: str) -> None:
    [fault] = assert_problem(lease.batch(**body), "spec-invalid")["errors"]
    assert fault["pointer"] == pointer


@pytest.mark.parametrize(
    "body",
    [
        {"name": ""}, {"name": "a", "ttl_s": 0}, {"name": "a", "ttl_s": 61}, {"name": "a", "token": "short"},
        {"name": "a\n"}, {"name": "a", "tenant": "t" * 65}, {},
    ],
)  # fmt: skip
def test_a_faulty_lease_is_refused(pool: Pool, body: dict[str, object]) -> None:
    assert_problem(pool.http.post(f"{pool.path}/leases", json=body), "spec-invalid")
    assert pool.leases() == []


def test_what_is_not_there_is_not_found(pool: Pool, lease: Lease) -> None:
    http, nowhere = pool.http, "/v1/pools/pool-0123456789abcdef"
    named = {"name": "a", "token": "a-secret-of-my-own"}
    for path, body in [("leases", named), ("leases:adopt", named), (f"leases/{NO_LEASE}/blocks:batch", {})]:
        assert_problem(http.post(f"{nowhere}/{path}", json=body), "pool-not-found")
    for path in ("leases", "tenants", "tenants/a", "contents?group=0", f"leases/{NO_LEASE}"):
        assert_problem(http.get(f"{nowhere}/{path}"), "pool-not-found")
    assert_problem(http.get(f"{pool.path}/leases/{NO_LEASE}"), "stale-handle")
    for missing in ("lease", "lease-0123456789abcdeF"):
        assert_problem(http.get(f"{pool.path}/leases/{missing}"), "not-found")
    assert_problem(http.get(lease.path, params={"group": 3}), "spec-invalid")
    assert_problem(http.get(lease.path, params={"group": "x"}), "spec-invalid")
    assert_problem(http.get(lease.path, params={"group": 0, "page_token": "x"}), "spec-invalid")
    assert_problem(http.get(f"{pool.path}/contents"), "spec-invalid")
    assert_problem(http.get(f"{pool.path}/contents", params={"group": 0, "page_token": "x"}), "spec-invalid")


def test_a_lease_of_another_pool_is_none(pool: Pool, lease: Lease) -> None:
    other = Pool(pool.http, "other")
    try:
        assert_problem(pool.http.get(f"{other.path}/leases/{lease.id}"), "stale-handle")
    finally:
        other.delete()


def test_over_tcp_leases_need_a_token(shared_service: ApiService, pool: Pool, lease: Lease) -> None:
    with httpx.Client(base_url=shared_service.url, timeout=60) as http:
        paths = [lease.path, f"{pool.path}/leases", f"{pool.path}/tenants", f"{pool.path}/contents?group=0"]
        for path in [*paths, "/v1/events"]:
            assert_problem(http.get(path), "permission-denied")
        assert_problem(http.post(f"{lease.path}/blocks:batch", json={"allocate": {"0": 1}}), "permission-denied")
