"""Leases and tenants of a pool from the command line: what it says, and what it changes."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvpage
from kvpage.exit_status import DONE, FAILED, WRONG_INPUT
from support.api_service import ApiService
from support.command_line import run_here
from support.leaks import leak_guard
from support.leased_pools import LAYERS, content

REQUEST = {
    "layers": LAYERS["three"], "strategy": "nested", "allocator": "slabs", "num_blocks": 64, "max_model_len": 16,
    "max_num_batched_tokens": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def run_dir() -> Iterator[str]:
    with leak_guard(), tempfile.TemporaryDirectory(prefix="kvp-") as folder:
        with ApiService(Path(folder), "--memory", "64MiB") as service, service.client() as client:
            client.create_pool(REQUEST, name="mimo")
            yield folder


def told(run_dir: str, *arguments: str) -> Any:
    done = run_here("pools", *arguments, "--json", "--run-dir", run_dir)
    assert (done.returncode, done.stderr) == (DONE, "")
    return json.loads(done.stdout)


def test_leases_name_the_processes_that_hold_blocks(run_dir: str) -> None:
    assert run_here("pools", "leases", "mimo", "--run-dir", run_dir).stdout == "no leases\n"
    with kvpage.open_lease("mimo", name="engine-0", tenant="acme", run_dir=run_dir, client_name="vllm") as lease:
        lease.allocate(1, 5)
        shown = run_here("pools", "leases", "mimo", "--run-dir", run_dir, COLUMNS="80")
        [found] = told(run_dir, "leases", "mimo")
    [row] = [line.split() for line in shown.stdout.splitlines() if line.startswith("engine-0")]
    assert row[1:5] == ["acme", "vllm", "active", str(os.getpid())]
    assert (found["name"], found["blocks"]) == ("engine-0", [0, 5, 0])


def test_what_is_not_given_of_a_tenant_stays_as_it_is(run_dir: str) -> None:
    def settings(*options: str) -> tuple[int | None, int, int]:
        state = told(run_dir, "set-tenant", "mimo", "team-a", *options)
        [listed] = [one for one in told(run_dir, "tenants", "mimo") if one["name"] == "team-a"]
        assert state == listed
        return state["quota_bytes"], state["priority"], state["weight"]

    assert settings("--quota", "1MiB") == (1 << 20, 0, 1)
    assert settings("--weight", "3") == (1 << 20, 0, 3)
    assert settings("--priority", "-2") == (1 << 20, -2, 3)
    assert settings("--quota", "none") == (None, -2, 3)
    shown = run_here("pools", "set-tenant", "mimo", "team-a", "--quota", "2MiB", "--run-dir", run_dir)
    assert "2 MiB" in shown.stdout
    assert run_here("pools", "set-tenant", "mimo", "team-a", "-q", "--run-dir", run_dir).stdout == ""


@pytest.mark.parametrize(
    ("arguments", "status", "code"),
    [
        (["leases", "nobody"], FAILED, "pool-not-found"),
        (["set-tenant", "mimo", "team-a", "--quota", "much"], WRONG_INPUT, "spec-invalid"),
        (["set-tenant", "mimo", "team-a", "--weight", "0"], WRONG_INPUT, "spec-invalid"),
        (["set-tenant", "mimo", "x" * 65], WRONG_INPUT, "spec-invalid"),
        (["clear-prefixes", "nobody"], FAILED, "pool-not-found"),
    ],
)
def test_a_mistake_is_one_clear_error(run_dir: str, arguments: list[str], status: int, code: str) -> None:
    done = run_here("pools", *arguments, "--json", "--run-dir", run_dir)
    assert (done.returncode, done.stdout) == (status, "")
    assert json.loads(done.stderr)["code"] == code


def test_cleared_prefixes_are_gone(run_dir: str) -> None:
    with kvpage.open_lease("mimo", name="engine-0", run_dir=run_dir) as lease:
        ids = lease.allocate(1, 2)
        lease.commit(1, ids, [content(1), content(2)])
        lease.free(1, ids)
    with kvpage.Client(run_dir=run_dir) as client:
        pool = client.find_pool("mimo")
        assert len(client.contents(pool.id, 1).hashes) == 2
        assert told(run_dir, "clear-prefixes", "mimo")["cleared"] is True
        assert client.contents(pool.id, 1).hashes == []
    assert "cleared the prefixes of mimo" in run_here("pools", "clear-prefixes", "mimo", "--run-dir", run_dir).stderr
