"""The planner agrees with an independent reading of the rule on thousands of random requests."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvpage
from kvpage.errors import KvpageError
from planner import comparison, golden, layouts, one_layer, oracle, rows, view_oracle
from planner.random_requests import random_request, small_request

Json = dict[str, Any]
CHUNK = 50
FIXED_SEEDS = range(0, 400, CHUNK)
LONG_SEEDS = range(0, 10_000, 1000)


def agree(seeds: range) -> None:
    for seed in seeds:
        request = random_request(random.Random(seed))
        try:
            comparison.compare(request)
        except AssertionError as error:
            error.add_note(f"random_request(random.Random({seed})) = {json.dumps(request)}")
            raise


@pytest.mark.parametrize("first", FIXED_SEEDS)
def test_the_oracle_agrees(first: int) -> None:
    agree(range(first, first + CHUNK))


@pytest.mark.long
@pytest.mark.parametrize("first", LONG_SEEDS)
def test_the_oracle_agrees_at_length(first: int, seed: int) -> None:
    agree(range(seed + first, seed + first + 1000))


@given(st.randoms(use_true_random=False))
def test_the_oracle_agrees_on_what_hypothesis_finds(rng: random.Random) -> None:
    comparison.compare(random_request(rng))


@given(st.randoms(use_true_random=False))
def test_every_byte_of_a_small_plan_has_one_owner(rng: random.Random) -> None:
    request = small_request(rng)
    comparison.compare(request)
    try:
        plan = kvpage.plan(request)
    except KvpageError:
        return
    assert view_oracle.faults(plan, comparison.block_axes(request)) == set()


@pytest.mark.parametrize("draw", [random_request, small_request])
def test_random_requests_reach_every_outcome(draw: Callable[[random.Random], Json]) -> None:
    """The property tests are worth something only if the requests are planned and refused in every way there is."""
    outcomes: Counter[str] = Counter()
    for seed in range(1000):
        request = draw(random.Random(seed))
        facts = oracle.answer(request)
        outcomes[facts.get("refused", "planned")] += 1
        outcomes["arguable"] += facts.get("arguable", False)
        if "refused" in facts:
            continue
        for layer in facts["layers"].values():
            outcomes[layer["decision"]] += 1
        kinds = {layer["kind"] for layer in request["layers"]}
        outcomes[facts.get("sharing", "no cache")] += 1
        outcomes["latent windows"] += {"mla_attention", "sliding_window_mla"} <= kinds
        outcomes["cross attention"] += "cross_attention" in kinds
        outcomes["layered"] += request.get("layered", False)
        outcomes["compressed"] += any(layer.get("compress_ratio", 1) > 1 for layer in request["layers"])
        named = {layer["backend"] for layer in request["layers"] if layer.get("backend") in layouts.NAMED}
        outcomes.update(named | {layer.get("kv_quant") or "plain" for layer in request["layers"]})
    wanted = {"planned", "cannot-unify-page-size", "layout-unsupported", "spec-invalid", "latent windows", "packed"}
    wanted |= {"keep", "scale", "pad", "co_group", "share", "regions", "interleaved", "cross attention", "layered"}
    wanted |= {"compressed", "int4", "int8_per_token_head"}
    if draw is random_request:
        wanted |= {"scale_pad", "fp8_per_token_head", "nvfp4", "mxfp4", "fp8_ds_mla"}
    for outcome in wanted:
        assert outcomes[outcome] >= 10, outcomes
    for name in layouts.NAMED:
        assert outcomes[name] >= 5, outcomes
    assert outcomes["arguable"] < 20


# --- the oracle itself is checked against the recorded figures, so that two wrongs do not agree ---


def test_the_oracle_knows_the_recorded_plans() -> None:
    for case in golden.plan_cases():
        facts = oracle.answer(case.request)
        if "plan_error" in case.facts:
            assert facts["layer"] == case.facts["plan_error"], case.id
            continue
        expected = case.facts["plan"]
        assert facts["groups"] == expected["groups"], case.id
        assert facts["num_blocks"] == expected["num_blocks"], case.id
        assert facts["request_bytes"] == expected["request_bytes"], case.id
        assert facts["buffer_size_bytes"] == sum(buffer["size_bytes"] for buffer in expected["buffers"]), case.id


def test_the_oracle_knows_the_recorded_unification() -> None:
    for case in golden.plan_cases():
        layers = one_layer.expand(case.request)
        if "unify_error" in case.facts:
            with pytest.raises(one_layer.RefusedError) as caught:
                oracle.unify(layers)
            assert caught.value.facts["layer"] == case.facts["unify_error"], case.id
            continue
        oracle.unify(layers)
        got = [[layer["block_size"], one_layer.page_bytes(layer), layer["page_size_padded"]] for layer in layers]
        runs = zip(case.runs, case.facts["unify"], strict=True)
        assert got == [sizes for run, sizes in runs for _ in run], case.id


def test_the_view_oracle_knows_the_recorded_views() -> None:
    for case in golden.view_cases():
        facts = case.facts
        if facts["strides"] == "padding_unsupported":
            assert oracle.answer(case.request)["refused"] == "layout-unsupported", case.id
            continue
        (layer,) = one_layer.expand(case.request)
        item = rows.ITEM_SIZE_BYTES[facts["dtype"]]
        expected: dict[str, Any] = {
            "shape": tuple(facts["shape"]),
            "strides_bytes": tuple(stride * item for stride in facts["strides"]),
            "offset_bytes": 0,
        }
        views = view_oracle.expected_views(layer, one_layer.page_bytes(layer), facts["num_blocks"], 0)
        assert views == [expected], case.id
