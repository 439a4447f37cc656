"""Pools through a real server and a real worker."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

import kvpage
from kvpage.client.http import Client
from kvpage.errors import Draining
from kvpage.wire import messages
from kvpage.wire.client import WorkerClient
from support.api_service import ApiService
from support.eventually import until
from support.plan_requests import small_request
from support.pools import attach_pool
from support.problems import assert_problem

WAIT = {"Prefer": "wait=30"}


@pytest.fixture
def http(shared_service: ApiService) -> Iterator[httpx.Client]:
    """The shared server without a pool; none is left to the next test."""
    transport = httpx.HTTPTransport(uds=str(shared_service.run_directory.api_socket))
    with httpx.Client(transport=transport, base_url="http://kvpage", timeout=60) as client:
        yield client
        for pool in client.get("/v1/pools").json()["pools"]:
            assert client.delete(f"/v1/pools/{pool['id']}").status_code == 204


def body(name: str = "mimo", **changes: object) -> dict[str, object]:
    return {"name": name, "request": small_request(), **changes}


def test_a_pool_is_created_shown_listed_and_deleted(http: httpx.Client) -> None:
    plan = kvpage.plan(small_request())
    created = http.post("/v1/pools", json=body(plan_id=plan.plan_id), headers=WAIT)
    assert created.status_code == 201
    pool = created.json()
    assert created.headers["location"] == f"/v1/pools/{pool['id']}"
    assert created.headers["preference-applied"] == "wait=30"
    assert pool == {
        "id": pool["id"], "name": "mimo", "device": "host", "state": "ready", "plan_id": plan.plan_id,
        "epoch": pool["epoch"], "buffer_size_bytes": plan.buffer_size_bytes, "committed_bytes": plan.buffer_size_bytes,
        "num_holders": 0, "holders": [],
    }  # fmt: skip
    shown = http.get(created.headers["location"]).json()
    assert shown.pop("blocks")["num_leases"] == 0
    assert shown == pool
    assert http.get("/v1/pools").json() == {"pools": [pool]}
    assert http.get("/v1/pools", params={"name": "mimo", "device": "host"}).json() == {"pools": [pool]}
    assert http.get("/v1/pools", params={"name": "other"}).json() == {"pools": []}
    assert_problem(http.get("/v1/pools", params={"device": "cuda:7"}), "spec-invalid")
    deleted = http.delete(created.headers["location"])
    assert (deleted.status_code, deleted.content) == (204, b"")
    assert_problem(http.get(created.headers["location"]), "pool-not-found")
    assert_problem(http.delete(created.headers["location"]), "pool-not-found")
    assert http.get("/v1/pools").json() == {"pools": []}


def test_without_waiting_the_answer_says_where_to_look(http: httpx.Client) -> None:
    begun = http.post("/v1/pools", json=body(request=small_request(memory_bytes=32 << 20)))
    assert begun.status_code == 202
    assert begun.json()["state"] == "creating"
    ready = http.get(begun.headers["location"], params={"wait": "30"}).json()
    assert ready["state"] == "ready"
    assert ready["committed_bytes"] == ready["buffer_size_bytes"]


def test_the_same_name_and_plan_is_the_same_pool(http: httpx.Client) -> None:
    first = http.post("/v1/pools", json=body(), headers=WAIT)
    again = http.post("/v1/pools", json=body(), headers=WAIT)
    assert (first.status_code, again.status_code) == (201, 200)
    assert again.json() == first.json()


def test_a_name_taken_by_another_plan_is_a_conflict(http: httpx.Client) -> None:
    http.post("/v1/pools", json=body(), headers=WAIT)
    other = body(request=small_request(memory_bytes=1 << 20))
    problem = assert_problem(http.post("/v1/pools", json=other, headers=WAIT), "conflict")
    assert problem["details"]["plan_id"] == kvpage.plan(small_request()).plan_id


def test_an_unexpected_plan_is_a_conflict_that_names_both(http: httpx.Client) -> None:
    expected = "sha256:" + "0" * 64
    problem = assert_problem(http.post("/v1/pools", json=body(plan_id=expected)), "conflict")
    plan_id = kvpage.plan(small_request()).plan_id
    assert problem["details"] == {"expected_plan_id": expected, "plan_id": plan_id}
    assert http.get("/v1/pools").json() == {"pools": []}


def test_a_pool_over_the_budget_is_refused_with_both_sizes(http: httpx.Client) -> None:
    problem = assert_problem(
        http.post("/v1/pools", json=body(request=small_request(memory_bytes=1 << 40))), "not-enough-memory"
    )
    assert problem["details"]["needed_bytes"] > problem["details"]["available_bytes"] > 0
    [device] = http.get("/v1/devices").json()["devices"]
    assert (device["reserved_bytes"], device["num_pools"]) == (0, 0)


def test_the_tensors_are_those_of_the_plan(http: httpx.Client) -> None:
    plan = kvpage.plan(small_request())
    pool = http.post("/v1/pools", json=body(), headers=WAIT).json()
    answer = http.get(f"/v1/pools/{pool['id']}/tensors").json()
    tensors = answer.pop("tensors")
    assert answer == {
        "pool_id": pool["id"], "plan_id": plan.plan_id, "epoch": pool["epoch"], "device": "host",
        "buffer_size_bytes": plan.buffer_size_bytes,
    }  # fmt: skip
    views = {(layer.name, view.name): view for layer in plan.layers.values() for view in layer.tensors}
    assert {(tensor["layer"], tensor["name"]) for tensor in tensors} == views.keys()
    for tensor in tensors:
        view = views[tensor["layer"], tensor["name"]]
        assert tuple(tensor["shape"]) == view.shape
        assert tuple(tensor["strides_bytes"]) == view.strides_bytes
        assert (tensor["offset_bytes"], tensor["dtype"]) == (view.offset_bytes, view.dtype)
        assert 0 < math.prod(tensor["shape"]) <= plan.buffer_size_bytes


def test_a_held_pool_is_not_deleted_and_its_holders_are_named(shared_service: ApiService, http: httpx.Client) -> None:
    pool = http.post("/v1/pools", json=body(), headers=WAIT).json()
    path = f"/v1/pools/{pool['id']}"
    with WorkerClient(shared_service.run_directory.worker_socket("host"), client_name="engine 0") as worker:
        _, mapping = attach_pool(worker)
        mapping.close()
        shown = http.get(path).json()
        assert shown["num_holders"] == 1
        assert [holder["client_name"] for holder in shown["holders"]] == ["engine 0"]
        problem = assert_problem(http.delete(path), "conflict")
        assert [holder["client_name"] for holder in problem["details"]["holders"]] == ["engine 0"]
    assert http.delete(path, params={"wait": "30"}).status_code == 204


def test_a_deletion_waits_for_holders_as_long_as_it_is_told_to(shared_service: ApiService, http: httpx.Client) -> None:
    pool = http.post("/v1/pools", json=body(), headers=WAIT).json()
    path = f"/v1/pools/{pool['id']}"
    with ThreadPoolExecutor(1) as threads:
        with WorkerClient(shared_service.run_directory.worker_socket("host"), client_name="engine 0") as worker:
            attach_pool(worker)[1].close()
            problem = assert_problem(http.delete(path, params={"wait": "0.05"}), "conflict")
            assert problem["details"]["holders"] == [
                {"pid": os.getpid(), "uid": os.geteuid(), "client_name": "engine 0"}
            ]
            deleting = threads.submit(http.delete, path, params={"wait": "30"})
            until(lambda: worker.ask(messages.DescribeDevice(), messages.DeviceState).num_clients == 3)
            assert http.get(path).json()["state"] == "ready"
            assert not deleting.done()
        assert deleting.result().status_code == 204
    assert_problem(http.delete(path, params={"wait": "30"}), "pool-not-found")


def test_deletions_that_wait_keep_nobody_else_from_the_worker(shared_service: ApiService, http: httpx.Client) -> None:
    paths = []
    for number in range(12):  # more than the threads that ask workers
        request = small_request(memory_bytes=1 << 20)
        pool = http.post("/v1/pools", json=body(f"p{number}", request=request), headers=WAIT).json()
        paths.append(f"/v1/pools/{pool['id']}")
    with ThreadPoolExecutor(12) as threads:
        with WorkerClient(shared_service.run_directory.worker_socket("host")) as worker:
            for number in range(12):
                attach_pool(worker, f"p{number}")[1].close()
            deleting = [threads.submit(http.delete, path, params={"wait": "30"}) for path in paths]
            until(lambda: worker.ask(messages.DescribeDevice(), messages.DeviceState).num_clients == 14)
            assert len(http.get("/v1/pools").json()["pools"]) == 12
            assert not any(waiting.done() for waiting in deleting)
        assert {waiting.result().status_code for waiting in deleting} == {204}


def test_a_server_that_ends_waits_for_no_holder(no_leaks: None, run_dir: Path) -> None:
    with ApiService(run_dir) as service, service.client() as client, ThreadPoolExecutor(1) as threads:
        pool = client.create_pool(small_request(), name="mimo")
        with WorkerClient(service.run_directory.worker_socket("host")) as worker:
            attach_pool(worker)[1].close()
            deleting = threads.submit(client.delete_pool, pool.id, wait_s=30)
            until(lambda: worker.ask(messages.DescribeDevice(), messages.DeviceState).num_clients == 3)
            service.terminate()
            with pytest.raises(Draining) as raised:
                deleting.result()
            assert raised.value.details["num_holders"] == 1


def test_deleting_gives_the_memory_back_in_every_process(shared_service: ApiService, http: httpx.Client) -> None:
    pool = http.post("/v1/pools", json=body(), headers=WAIT).json()
    assert num_memfds(shared_service.pid) == 2  # buffer and control block
    assert num_memfds(shared_service.worker_pid()) == 2
    http.delete(f"/v1/pools/{pool['id']}")
    assert num_memfds(shared_service.pid) == 0
    assert num_memfds(shared_service.worker_pid()) == 0
    [device] = http.get("/v1/devices").json()["devices"]
    assert device["reserved_bytes"] == 0


def num_memfds(pid: int) -> int:
    return sum("/memfd:" in str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir())


def test_a_device_describes_itself(shared_service: ApiService, http: httpx.Client) -> None:
    [device] = http.get("/v1/devices").json()["devices"]
    assert device["device"] == "host"
    assert device["state"] == "ready"
    assert device["handle_kinds"] == ["memfd"]
    assert device["memory_limit_bytes"] == 64 << 20
    assert device["worker_pid"] != shared_service.pid
    verbose = http.get("/readyz", params={"verbose": ""}).json()
    assert verbose["status"] == "ready"
    assert all(check["ok"] for check in verbose["checks"])


@pytest.mark.parametrize("wait", ["-1", "x", "nan", ""])
def test_a_wait_must_be_a_number_of_seconds(http: httpx.Client, wait: str) -> None:
    pool = http.post("/v1/pools", json=body(), headers=WAIT).json()
    for method in ("GET", "DELETE"):
        assert_problem(http.request(method, f"/v1/pools/{pool['id']}", params={"wait": wait}), "spec-invalid")


def test_over_tcp_without_a_token_plans_are_served_and_pools_are_not(shared_service: ApiService) -> None:
    with Client(shared_service.url) as client:
        assert client.plan(small_request()) == kvpage.plan(small_request())
        assert client.health().status == "ready"
        with pytest.raises(kvpage.KvpageError) as raised:
            client.pools()
    assert raised.value.code == "permission-denied"
    with httpx.Client(base_url=shared_service.url, headers={"Host": "evil.example"}) as rebound:
        assert_problem(rebound.get("/v1/devices"), "permission-denied")


def test_a_pool_is_made_from_one_of_several_ranks(http: httpx.Client) -> None:
    ranks = [{"layers": ["target.{i}"]}, {"layers": ["draft.{i}"]}]
    request = small_request(ranks=ranks)
    plans = kvpage.plan_ranks(request)
    created = http.post("/v1/pools", json=body(request=request, rank=1, plan_id=plans.ranks[1].plan_id), headers=WAIT)
    assert created.status_code == 201
    assert created.json()["plan_id"] == plans.ranks[1].plan_id
    assert created.json()["buffer_size_bytes"] == plans.ranks[1].buffer_size_bytes


@pytest.mark.parametrize(
    ("rank", "ranks", "words"),
    [
        (None, [{}, {}], "the request has 2 ranks, and a pool is of one"),
        (2, [{}, {}], "rank is 2, but the request has 2 ranks, from 0"),
        (0, None, "rank is 0, but the request is of one rank"),
        (-1, [{}], ">= 0"),
        (1024, [{}], "<= 1023"),
    ],
)
def test_which_rank_a_pool_is_for_is_said_just_where_there_are_several(
    http: httpx.Client, rank: int | None, ranks: object, words: str
) -> None:
    asked = body(request=small_request(ranks=ranks), rank=rank)
    problem = assert_problem(http.post("/v1/pools", json=asked), "spec-invalid")
    assert words in problem["detail"]
    assert problem["errors"][0]["pointer"] == "/rank"


def test_memory_that_a_request_lacks_is_pointed_at_inside_the_body(http: httpx.Client) -> None:
    asked = body(request=small_request(ranks=[{}, {"memory_bytes": 9}]), rank=0)
    problem = assert_problem(http.post("/v1/pools", json=asked), "not-enough-memory")
    assert problem["errors"][0]["pointer"] == "/request/ranks/1"
