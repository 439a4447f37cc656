"""A plan as a value: its id, its bytes, and what reading them back refuses."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvpage
from kvpage.errors import KvpageError, SpecInvalid
from planner import build
from planner.random_requests import random_request

Json = dict[str, Any]
MIXED = build.request(
    build.full("target.{i}", size=192, count=4),
    build.sliding("draft.{i}", count=2),
    build.encoder("encoder"),
)


def test_the_id_is_a_sha256() -> None:
    algorithm, digest = kvpage.plan(MIXED).plan_id.split(":")
    assert algorithm == "sha256"
    assert len(bytes.fromhex(digest)) == hashlib.sha256().digest_size


@given(st.randoms(use_true_random=False))
def test_a_plan_survives_the_way_through_bytes(rng: random.Random) -> None:
    try:
        plan = kvpage.plan(random_request(rng))
    except KvpageError:
        return
    encoded = plan.to_json()
    again = kvpage.Plan.from_json(encoded)
    assert again == plan
    assert again.to_json() == encoded


def test_the_same_plan_has_the_same_id_however_it_is_asked_for() -> None:
    plan = kvpage.plan(MIXED)
    one_by_one = build.request(
        *(build.full(f"target.{i}", size=192) for i in range(4)),
        *(build.sliding(f"draft.{i}") for i in range(2)),
        build.encoder("encoder"),
    )
    turned = dict(reversed(MIXED.items())) | {"align_hybrid": False, "kv_cache_layout": "NHD"}
    for request in (one_by_one, turned, json.loads(json.dumps(MIXED))):
        assert kvpage.plan(request).plan_id == plan.plan_id
        assert kvpage.plan(request).to_json() == plan.to_json()


def test_the_id_does_not_depend_on_the_process() -> None:
    code = "import json, sys, kvpage; print(kvpage.plan(json.load(sys.stdin)).plan_id)"
    ids = set()
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            input=json.dumps(MIXED),
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"PYTHONHASHSEED": seed},
        )
        ids.add(done.stdout.strip())
    assert ids == {kvpage.plan(MIXED).plan_id}


@pytest.mark.parametrize(
    "change",
    [
        {"memory_bytes": 1 << 29},
        {"max_model_len": 4096},
        {"layers": [build.full("target.{i}", size=192, count=4), build.sliding("draft.{i}", count=3)]},
        {"layers": [build.full("other.{i}", size=192, count=4), build.sliding("draft.{i}", count=2)]},
        {"layers": [build.full("target.{i}", size=192, count=4), build.sliding("draft.{i}", count=2, window=512)]},
        {"layers": [build.full("target.{i}", size=192, count=4, dtype="float16"), build.sliding("draft.{i}", count=2)]},
    ],
)
def test_a_plan_that_differs_has_another_id(change: Json) -> None:
    assert kvpage.plan(MIXED | change).plan_id != kvpage.plan(MIXED).plan_id


def tampered(edit: Any) -> bytes:
    """The bytes of a plan after `edit` changed the decoded JSON in place."""
    content = json.loads(kvpage.plan(MIXED).to_json())
    edit(content)
    return json.dumps(content).encode()


def test_words_are_not_part_of_the_id() -> None:
    """A better sentence in a later version must not make plans look different."""
    reworded = tampered(lambda plan: plan["layers"]["draft.0"].update(reason="because"))
    assert kvpage.Plan.from_json(reworded).plan_id == kvpage.plan(MIXED).plan_id


def set_view(key: str, value: Any) -> Any:
    return lambda plan: plan["layers"]["draft.0"]["tensors"][0].update({key: value})


@pytest.mark.parametrize(
    "edit",
    [
        set_view("offset_bytes", 98_304),
        set_view("strides_bytes", [65_536, 4096, 512, 2]),
        set_view("shape", [1, 16, 8, 256]),
        set_view("dtype", "float16"),
        lambda plan: plan.update(num_blocks=plan["num_blocks"] + 1),
        lambda plan: plan.update(buffer_size_bytes=plan["buffer_size_bytes"] + 98_304),
        lambda plan: plan["groups"].reverse(),
        lambda plan: plan["layers"].pop("draft.0"),
        lambda plan: plan.update(plan_id="sha256:" + "0" * 64),
        lambda plan: plan.update(plan_id="nonsense"),
        lambda plan: plan.pop("plan_id"),
    ],
)
def test_bytes_that_do_not_match_their_id_are_refused(edit: Any) -> None:
    with pytest.raises(SpecInvalid):
        kvpage.Plan.from_json(tampered(edit))


@pytest.mark.parametrize("content", [b"", b"{", b"null", b"[]", b"{}", b"\xff\xfe", b'"plan"', b"1" * 10_000])
def test_bytes_that_are_no_plan_are_refused(content: bytes) -> None:
    with pytest.raises(SpecInvalid):
        kvpage.Plan.from_json(content)
