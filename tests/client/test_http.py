"""Both clients against a real server: every answer a frozen value, every problem the error it names."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec.structs import replace

import kvpage
from kvpage.client.http import Client
from kvpage.client.resources import Device, Pool
from kvpage.errors import (
    Conflict,
    DeviceUnavailable,
    NotEnoughMemory,
    PlanNotFound,
    PoolNotFound,
    SpecInvalid,
    StaleHandle,
)
from kvpage.request import PlanRequest
from kvpage.wire import messages
from kvpage.wire.client import WorkerClient
from support.api_service import ApiService
from support.blocking_client import BOTH_CLIENTS
from support.eventually import until
from support.leaks import leak_guard
from support.plan_requests import small_request
from support.pools import attach_pool

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture(scope="module")
def service() -> Iterator[ApiService]:
    with leak_guard(), tempfile.TemporaryDirectory(prefix="kvp-") as folder:
        with ApiService(Path(folder), "--memory", "64MiB") as service:
            yield service


@pytest.fixture(params=BOTH_CLIENTS, ids=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> type[Client]:
    found: type[Client] = request.param
    return found


@pytest.fixture
def client(service: ApiService, kind: type[Client]) -> Iterator[Client]:
    """A client of a server without pools; none is left behind."""
    with kind(run_dir=str(service.run_directory.path), timeout_s=60) as client:
        yield client
        for pool in client.pools():
            client.delete_pool(pool.id)


def test_a_plan_is_that_of_the_library(client: Client) -> None:
    plan = client.plan(small_request())
    assert plan == kvpage.plan(small_request())
    assert client.get_plan(plan.plan_id) == plan


def test_plans_of_ranks_are_those_of_the_library_and_a_pool_is_of_one(client: Client) -> None:
    request = small_request(ranks=[{"layers": ["target.{i}"]}, {"layers": ["draft.{i}"]}])
    plans = client.plan_ranks(request)
    assert plans == kvpage.plan_ranks(request)
    assert client.create_pool(request, name="draft", rank=1).plan_id == plans.ranks[1].plan_id
    with pytest.raises(SpecInvalid, match="plan_ranks"):
        client.plan(request)


def test_all_ranks_of_a_model_are_planned_where_the_request_names_none(client: Client) -> None:
    config = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "torch_dtype": "bfloat16",
    }  # fmt: skip
    request = {"strategy": "unify", "memory_bytes": 4 << 20, "model": {"config": config, "tp": 2, "pp": 2}}
    assert client.plan_ranks(request) == kvpage.plan_ranks(request)
    with pytest.raises(SpecInvalid, match="say what each rank keeps"):
        client.plan_ranks(small_request())


def test_a_request_may_be_a_validated_one(client: Client) -> None:
    request = PlanRequest.parse(small_request())
    assert client.plan(request) == kvpage.plan(request)
    assert client.create_pool(request, name="mimo").plan_id == kvpage.plan(request).plan_id


@pytest.mark.parametrize("request_", [None, "layers", 7, [small_request()]])
def test_anything_else_is_a_mistake_of_the_program(client: Client, request_: object) -> None:
    with pytest.raises(SpecInvalid, match="mapping or a PlanRequest"):
        client.plan(request_)


def test_a_pool_comes_and_goes(client: Client) -> None:
    pool = client.create_pool(small_request(), name="mimo", device="host")
    assert isinstance(pool, Pool)
    assert (pool.state, pool.name, pool.device, pool.holders) == ("ready", "mimo", "host", [])
    assert client.create_pool(small_request(), name="mimo") == pool
    assert client.pools() == [client.find_pool("mimo")] == [pool]
    assert replace(client.get_pool(pool.id), blocks=None) == pool
    assert client.find_pool("mimo", "host") == pool
    client.delete_pool(pool.id)
    assert client.pools() == []
    for ask in (client.get_pool, client.delete_pool, client.pool_tensors):
        with pytest.raises(PoolNotFound):
            ask(pool.id)


def test_a_deletion_waits_for_holders_and_then_names_them(service: ApiService, client: Client) -> None:
    pool = client.create_pool(small_request(), name="mimo")
    with ThreadPoolExecutor(1) as threads:
        with WorkerClient(service.run_directory.worker_socket("host"), client_name="engine 0") as worker:
            _, mapping = attach_pool(worker)
            mapping.close()
            with pytest.raises(Conflict) as raised:
                client.delete_pool(pool.id, wait_s=0.05)
            [holder] = raised.value.details["holders"]
            assert holder == {"pid": os.getpid(), "uid": os.geteuid(), "client_name": "engine 0"}
            deleting = threads.submit(client.delete_pool, pool.id, wait_s=30)
            # The server, the engine, and the connection on which the server waits.
            until(lambda: worker.ask(messages.DescribeDevice(), messages.DeviceState).num_clients == 3)
            assert not deleting.done()
        deleting.result()
    assert client.pools() == []


def test_a_creation_need_not_be_waited_for(client: Client) -> None:
    pool = client.create_pool(small_request(memory_bytes=32 << 20), name="large", wait_s=0)
    assert client.get_pool(pool.id, wait_s=30).state == "ready"


def test_tensors_are_those_of_the_plan(client: Client) -> None:
    pool = client.create_pool(small_request(), name="mimo")
    tensors = client.pool_tensors(pool.id)
    plan = kvpage.plan(small_request())
    assert (tensors.pool_id, tensors.plan_id, tensors.epoch) == (pool.id, plan.plan_id, pool.epoch)
    [view] = plan.layers["draft.0"].tensors
    [tensor] = [tensor for tensor in tensors.tensors if tensor.layer == "draft.0"]
    assert (tensor.shape, tensor.strides_bytes, tensor.offset_bytes) == (
        view.shape,
        view.strides_bytes,
        view.offset_bytes,
    )


def test_holders_are_shown_and_keep_the_pool(service: ApiService, client: Client) -> None:
    pool = client.create_pool(small_request(), name="mimo")
    with WorkerClient(service.run_directory.worker_socket("host"), client_name="engine 0") as worker:
        _, mapping = attach_pool(worker)
        mapping.close()
        [holder] = client.get_pool(pool.id).holders
        assert holder.client_name == "engine 0"
        with pytest.raises(Conflict) as raised:
            client.delete_pool(pool.id)
        assert raised.value.details["holders"][0]["client_name"] == "engine 0"
    client.delete_pool(pool.id, wait_s=60)


def test_problems_are_the_errors_they_name(client: Client) -> None:
    with pytest.raises(SpecInvalid) as invalid:
        client.plan(small_request(memory_bytes="1"))
    assert [error.pointer for error in invalid.value.errors] == ["/memory_bytes"]
    with pytest.raises(PlanNotFound):
        client.get_plan("sha256:" + "0" * 64)
    with pytest.raises(PoolNotFound):
        client.find_pool("nobody")
    with pytest.raises(NotEnoughMemory) as short:
        client.create_pool(small_request(memory_bytes=1 << 40), name="huge")
    assert short.value.details["needed_bytes"] > short.value.details["available_bytes"]
    with pytest.raises(Conflict) as unexpected:
        client.create_pool(small_request(), name="mimo", plan_id="sha256:" + "0" * 64)
    assert unexpected.value.details["plan_id"] == kvpage.plan(small_request()).plan_id
    with pytest.raises(SpecInvalid) as elsewhere:
        client.create_pool(small_request(), name="mimo", device="cuda:7")
    assert [error.pointer for error in elsewhere.value.errors] == ["/device"]


@pytest.mark.parametrize("identifier", ["..", "a/b", "a?b=c", "%2e%2e", "x y", "é", ""])
def test_identifiers_cannot_reach_other_paths(client: Client, identifier: str) -> None:
    with pytest.raises(kvpage.KvpageError) as raised:
        client.get_pool(identifier)
    assert raised.value.code in ("pool-not-found", "not-found", "spec-invalid", "protocol-error")


def test_devices_and_health_are_values(client: Client) -> None:
    [device] = client.devices()
    assert isinstance(device, Device)
    assert (device.device, device.state, device.memory_limit_bytes) == ("host", "ready", 64 << 20)
    health = client.health()
    assert health.status == "ready"
    assert {check.name for check in health.checks} == {"serving", "worker:host", "pools:host"}
    with pytest.raises(AttributeError):
        device.state = "lost"  # type: ignore[misc]


def test_threads_may_share_a_client(client: Client) -> None:
    start = threading.Barrier(8)

    def plan_id(_: int) -> str:
        start.wait()
        return client.plan(small_request()).plan_id

    with ThreadPoolExecutor(8) as threads:
        assert len(set(threads.map(plan_id, range(8)))) == 1


def test_eight_creations_at_once_make_one_pool(client: Client) -> None:
    with ThreadPoolExecutor(8) as threads:
        pools = list(threads.map(lambda _: client.create_pool(small_request(), name="mimo"), range(8)))
    assert len({pool.id for pool in pools}) == 1
    assert {pool.state for pool in pools} == {"ready"}


def test_closing_twice_is_fine_and_ends_it(service: ApiService, kind: type[Client]) -> None:
    with kind(run_dir=str(service.run_directory.path)) as client:
        assert not client.closed
        assert "open" in repr(client)
        client.close()
        client.close()
        assert client.closed
        assert "closed" in repr(client)
        with pytest.raises(StaleHandle, match="closed"):
            client.pools()


def test_a_server_that_ended_is_reported_and_its_successor_is_found(
    no_leaks: None, run_dir: Path, kind: type[Client]
) -> None:
    with ApiService(run_dir) as service, kind(run_dir=str(run_dir), timeout_s=60) as client:
        assert client.health().status == "ready"
        service.terminate()
        with pytest.raises(DeviceUnavailable):
            client.pools()
        with ApiService(run_dir):
            assert client.health().status == "ready"
