"""An engine finds its rank by the record in the run directory, and is refused where something does not fit."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

import kvpage.fleet
from kvpage.client.fleet_resources import Place
from kvpage.errors import Conflict, DeviceUnavailable, PoolNotFound, SpecInvalid, StaleHandle
from kvpage.fleet import messages
from kvpage.fleet.allocator import Allocator
from kvpage.fleet.planning import plan_fleet
from kvpage.fleet.record_store import RecordFiles
from kvpage.fleet.records import FleetRecord, NodeReport, ServiceOptions
from kvpage.fleet.service import LocalService, serving_pid
from kvpage.run_directory import RunDirectory
from support.api_service import ApiService
from support.plan_requests import small_request

ID = "fleet-0123456789abcdef"


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    """A service of which rank 0 of two is on this node; rank 1 is on another, which there is not."""
    with tempfile.TemporaryDirectory(prefix="kvp-") as folder, ApiService(Path(folder), "--memory", "64MiB") as service:
        yield Node(service.run_directory)


class Node:
    def __init__(self, runs: RunDirectory) -> None:
        self.runs = runs
        self.records = RecordFiles(runs, "here")
        options = ServiceOptions(is_external=True)
        self._allocator = Allocator("here", LocalService(runs, options), self.records, options)

    def ask(self, message: messages.Message) -> messages.Answer:
        return messages.decode_answer(self._allocator.handle(messages.encode(message)))

    def report(self) -> NodeReport:
        answer = self.ask(messages.Look())
        assert isinstance(answer, messages.Report)
        return answer.report

    def record(self) -> FleetRecord:
        here = self.report()
        places = [Place(node="here", device="host"), Place(node="there", device="host")]
        reports = {"here": here, "there": msgspec.structs.replace(here, node="there")}
        request = small_request(ranks=[{}, {}])
        return plan_fleet(request, plan_id=ID, name="mimo", reports=reports, places=places)

    def attach(self, timeout_s: float = 0.0, environ: Mapping[str, str] | None = None, **ranks: int) -> Any:
        return kvpage.fleet.attach(
            "mimo", run_dir=str(self.runs.path), environ=environ or {}, timeout_s=timeout_s, **ranks
        )


@pytest.fixture
def committed(node: Node) -> Iterator[FleetRecord]:
    record = node.record()
    assert node.ask(messages.Reserve(record=record)) == messages.Done()
    assert node.ask(messages.Commit(id=ID)) == messages.Done()
    yield record
    assert node.ask(messages.Release(record=record, force=True)) == messages.Done()
    assert node.ask(messages.Drop(id=ID)) == messages.Done()
    assert list(node.runs.path.glob("fleet-*")) == []


@pytest.mark.parametrize(
    ("environ", "ranks"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, {}),
        ({"LOCAL_RANK": "0"}, {}),
        ({}, {}),  # the one rank of this node
        ({"RANK": "1"}, {"rank": 0}),
    ],
)
def test_the_rank_of_this_process_is_attached(
    no_leaks: None, node: Node, committed: FleetRecord, environ: dict[str, str], ranks: dict[str, int]
) -> None:
    with node.attach(environ=environ, **ranks) as kv:
        assert kv.name == committed.pool_name(0)
        assert (kv.plan.plan_id, kv.plan.num_blocks) == (committed.plan_ids[0], committed.num_blocks)


@pytest.mark.parametrize(
    ("environ", "error", "said"),
    [
        ({"RANK": "1"}, Conflict, "on node there, device host"),
        ({"RANK": "0", "WORLD_SIZE": "4"}, Conflict, "one of 4 ranks"),
        ({"RANK": "2"}, SpecInvalid, "rank 2 is not among the 2"),
        ({"LOCAL_RANK": "1"}, SpecInvalid, "local rank 1"),
        ({"RANK": "-1"}, SpecInvalid, "RANK is -1"),
        ({"RANK": "one"}, SpecInvalid, "RANK is one"),
    ],
)
def test_a_rank_that_does_not_fit_is_told_why(
    no_leaks: None, node: Node, committed: FleetRecord, environ: dict[str, str], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        node.attach(environ=environ)


def altered(**changes: Any) -> Callable[[FleetRecord], FleetRecord]:
    return lambda record: msgspec.structs.replace(record, **changes)


@pytest.mark.parametrize(
    ("alter", "said"),
    [
        (altered(plan_ids=("sha256:" + 64 * "0",) * 2), "plan"),
        (altered(num_blocks=7), "the fleet's plan 7"),
    ],
)
def test_a_pool_of_another_plan_or_number_of_blocks_is_refused(
    no_leaks: None, node: Node, committed: FleetRecord, alter: Callable[[FleetRecord], FleetRecord], said: str
) -> None:
    node.records.put(msgspec.structs.replace(alter(committed), phase="committed"))
    try:
        with pytest.raises((Conflict, StaleHandle), match=said):
            node.attach()
    finally:
        node.records.put(msgspec.structs.replace(committed, phase="committed"))


def test_what_is_reserved_is_waited_for_and_what_is_not_there_is_said(no_leaks: None, node: Node) -> None:
    with pytest.raises(PoolNotFound, match="no plan 'mimo'"):
        node.attach()
    record = node.record()
    node.ask(messages.Reserve(record=record))
    with pytest.raises(DeviceUnavailable, match="not committed yet"):
        node.attach()
    assert node.ask(messages.Abort(id=ID)) == messages.Done()
    assert node.report().plans == ()
    assert node.report().devices[0].reserved_bytes == 0


def test_a_record_that_is_none_is_named(no_leaks: None, node: Node) -> None:
    path = node.runs.path / f"{ID}.json"
    path.write_text(json.dumps({"node": "here"}))
    try:
        with pytest.raises(DeviceUnavailable, match=path.name):
            node.attach()
    finally:
        path.unlink()


def test_an_allocator_answers_what_is_no_message_with_an_error(node: Node) -> None:
    answer = messages.decode_answer(node._allocator.handle(b"{}"))
    assert isinstance(answer, messages.Failed)
    assert answer.code == "protocol-error"


def test_whoever_listens_on_a_socket_is_known(no_leaks: None, node: Node, run_dir: Path) -> None:
    assert serving_pid(node.runs.api_socket) is not None
    assert serving_pid(run_dir / "nobody.sock") is None
