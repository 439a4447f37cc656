"""What a process remembers of plans it has proven: enough that nobody sends or proves them again, and not more."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import kvpage
from kvpage.client import connection
from kvpage.client.known_plans import KNOWN_PLANS, KnownPlans
from kvpage.client.views import PlannedViews
from kvpage.plans import Plan
from kvpage.wire import messages
from support.worker_process import WorkerProcess


def views_of(num_blocks: int) -> PlannedViews:
    layer = {"name": "a", "kind": "full_attention", "num_kv_heads": 1, "head_size": 8, "dtype": "bfloat16"}
    return PlannedViews(kvpage.plan({"strategy": "unify", "num_blocks": num_blocks, "layers": [layer]}))


def test_a_pool_is_known_by_its_socket_and_its_name() -> None:
    known, views = KnownPlans(), views_of(1)
    known.remember("/run/a.sock", "pool", views)
    assert known.of_pool("/run/a.sock", "pool") is views
    assert known.of_pool("/run/b.sock", "pool") is None
    assert known.of_pool("/run/a.sock", "other") is None


def test_the_plan_that_was_used_least_lately_is_forgotten() -> None:
    known, all_views = KnownPlans(max_plans=2), [views_of(count) for count in (1, 2, 3)]
    for name, views in zip("abac", (all_views[0], all_views[1], all_views[0], all_views[2]), strict=True):
        known.remember("s", name, views)
    assert len(known) == 2
    assert [known.of_pool("s", name) for name in "abc"] == [all_views[0], None, all_views[2]]


def test_names_without_end_leave_no_more_than_some() -> None:
    known, views = KnownPlans(max_plans=2), views_of(1)
    for number in range(100):
        known.remember("s", str(number), views)
    assert known.of_pool("s", "99") is views
    assert sum(known.of_pool("s", str(number)) is views for number in range(100)) <= 4


def test_threads_that_remember_at_once_leave_what_is_bounded_and_right() -> None:
    known, all_views = KnownPlans(max_plans=3), [views_of(count) for count in range(1, 9)]
    wrong: list[str] = []

    def work(start: int) -> None:
        for number in range(300):
            views = all_views[(start + number) % len(all_views)]
            known.remember("s", views.plan.plan_id, views)
            found = known.of_pool("s", views.plan.plan_id)
            if found not in (None, views):
                wrong.append(views.plan.plan_id)

    threads = [threading.Thread(target=work, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(known) <= 3


def test_a_second_attachment_of_the_process_proves_nothing_again(
    no_leaks: None, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = views_of(3).plan
    proven: list[bytes] = []

    class Counting:
        @staticmethod
        def from_json(data: bytes) -> Plan:
            proven.append(data)
            return Plan.from_json(data)

    monkeypatch.setattr(connection, "Plan", Counting)
    with WorkerProcess(run_dir) as worker, worker.client() as client:
        body = messages.CreatePool(
            name="pool", plan_id=plan.plan_id, plan=plan.to_json(), buffer_size_bytes=plan.buffer_size_bytes
        )
        pool_id = client.ask(body, messages.PoolCreated).pool.pool_id
        client.ask(messages.WaitPool(pool_id=pool_id, timeout_s=60), messages.PoolState)
        for forgets, expected in ((True, 1), (False, 1), (False, 1), (True, 2)):
            if forgets:
                KNOWN_PLANS.forget()
            kvpage.attach("pool", run_dir=str(run_dir)).close()
            assert len(proven) == expected
