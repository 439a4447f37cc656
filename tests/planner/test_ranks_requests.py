"""`ranks` in a request: what may be written there, what is refused and where, and what is said of memory."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

import kvpage
from kvpage.errors import CannotUnify, InternalError, KvpageError, LayoutUnsupported, NotEnoughMemory, SpecInvalid
from kvpage.ranked_plan import RankedPlan
from kvpage.request_ranks import MAX_RANK_LAYERS
from planner import build

Json = dict[str, Any]
GIB = 1 << 30
LAYERS = [build.full("a.{i}", count=2), build.sliding("b.{i}", count=2), build.encoder("c")]


def request(*ranks: Any, layers: list[Json] | None = LAYERS, **more: Any) -> Json:
    told: Json = {"strategy": "unify", "memory_bytes": GIB, "ranks": list(ranks)}
    return (told if layers is None else told | {"layers": layers}) | more


def ranked(*ranks: Any, **more: Any) -> RankedPlan:
    plans = kvpage.plan_ranks(request(*ranks, **more))
    plans.check()
    return plans


def refused(asked: Any, kind: type[KvpageError] = SpecInvalid) -> KvpageError:
    with pytest.raises(kind) as caught:
        kvpage.plan_ranks(asked)
    assert type(caught.value) is kind
    return caught.value


# --- ways to say what a rank keeps ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (["a.0", "c"], ["a.0", "c"]),
        (["c", "a.1", "a.1"], ["a.1", "c"]),  # in the order of the request, once
        (["b.{i}", "a.0"], ["a.0", "b.0", "b.1"]),
        ({"start": 1, "end": 3}, ["a.1", "b.0"]),
        ({"start": 5, "end": 5}, []),
        ([], []),
        (None, ["a.0", "a.1", "b.0", "b.1", "c"]),
    ],
)
def test_layers_are_named_or_counted_or_all(layers: Any, expected: list[str]) -> None:
    plans = ranked({}, {"layers": layers})
    assert list(plans.ranks[1].layers) == expected


def test_a_rank_without_caches_pulls_nobody_down() -> None:
    """It has the least memory of all, and needs none."""
    plans = ranked({"layers": ["c"], "memory_bytes": 1}, {"layers": {"start": 0, "end": 4}}, {"layers": []})
    assert plans.blocks_that_fit == (None, plans.num_blocks, None)
    assert plans.num_blocks == GIB // (2 * 65_536)
    idle = plans.ranks[0]
    assert (idle.num_blocks, idle.buffer_size_bytes, idle.bytes_per_block) == (plans.num_blocks, 0, 0)
    assert [group.layers for group in idle.groups] == [(), ()]
    assert (idle.capacity.request_bytes, idle.waste.unallocated_bytes) == (None, 1)
    assert plans.warnings == ()


def test_ranks_without_any_cache_have_one_block_as_a_plan_without_layers_has() -> None:
    plans = ranked({}, {"memory_bytes": 1}, layers=[build.encoder("c")])
    assert (plans.num_blocks, plans.blocks_that_fit) == (1, (None, None))


def test_a_number_of_blocks_holds_for_all_ranks() -> None:
    asked = request({"layers": ["a.{i}"]}, {"layers": ["b.{i}", "c"]}, num_blocks=77)
    del asked["memory_bytes"]
    plans = kvpage.plan_ranks(asked)
    assert [plan.num_blocks for plan in plans.ranks] == [77, 77]
    assert (plans.blocks_that_fit, plans.warnings) == ((None, None), ())


def test_layers_may_be_written_out_by_the_ranks_alone() -> None:
    halves = [{"layers": [LAYERS[0]]}, {"layers": [*LAYERS[1:]]}]
    assert ranked(*halves, layers=None) == ranked({"layers": ["a.{i}"]}, {"layers": ["b.{i}", "c"]})


def test_words_that_mean_the_same_are_no_mismatch() -> None:
    default = build.full("a", backend="flash_attn")
    short = {key: value for key, value in default.items() if key not in ("block_size", "backend")}
    assert ranked({"layers": [default]}, {"layers": [short]}, layers=None).num_blocks == GIB // 65_536


# --- what is refused ------------------------------------------------------------------------------

OTHER = build.full("a.1", heads=4)
REFUSED: list[tuple[str, Json, str, str]] = [
    ("no array", request() | {"ranks": 5}, "/ranks", "this must be an array, not 5"),
    ("no rank", request(), "/ranks", "there is no rank"),
    ("no object", request([]), "/ranks/0", "this must be an object"),
    ("another field", request({"layer": []}), "/ranks/0/layer", "not known"),
    ("no number", request({"memory_bytes": "all"}), "/ranks/0/memory_bytes", "must be an integer"),
    ("too large", request({"memory_bytes": 2**62 + 1}), "/ranks/0/memory_bytes", "less than or equal"),
    ("no layer", request({}, {"layers": ["a.0", "a.2"]}), "/ranks/1/layers/1", "'a.2' is no layer of the request; did"),
    ("no range", request({"layers": {"start": 3, "end": 6}}), "/ranks/0/layers", "no range of the request's 5 layers"),
    ("backwards", request({"layers": {"start": 3, "end": 2}}), "/ranks/0/layers", "start 3 and end 2"),
    ("half a range", request({"layers": {"start": 3}}), "/ranks/0/layers/end", "required"),
    ("a word", request({"layers": "a.0"}), "/ranks/0/layers", "this must be an array"),
    ("mixed", request({"layers": ["a.0", LAYERS[0]]}), "/ranks/0/layers/1", "this must be a string"),
    ("own beside the request's", request({"layers": LAYERS}), "/ranks/0/layers", "has layers of its own"),
    ("on no rank", request({"layers": ["a.{i}", "b.1"]}), "/ranks", "2 layers are on no rank, 'b.0' the first"),
    ("no layers at all", request({}, layers=None), "/ranks/0/layers", "say which it keeps"),
    ("names of nothing", request({"layers": ["a"]}, layers=None), "/ranks/0/layers", "write them out"),
    ("twice", request({"layers": [LAYERS[0], OTHER]}, layers=None), "/ranks/0/layers/1/name", "on rank 0 twice"),
    ("a bad layer", request({"layers": [build.full(heads=0)]}, layers=None), "/ranks/0/layers/0/num_kv_heads", "great"),
    ("all of no model", request() | {"ranks": "all"}, "/ranks", "the ranks of a model alone are known"),
    ("missing", {"strategy": "unify", "layers": LAYERS, "memory_bytes": GIB}, "/ranks", "say what each rank keeps"),
    ("blocks and bytes", request({"memory_bytes": 5}, num_blocks=9), "/ranks/0/memory_bytes", "leave one out"),
    ("no memory", request({"memory_bytes": 5}, {}, memory_bytes=None), "/ranks/1", "rank 1 has no memory_bytes"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "pointer", "words"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_what_is_wrong_is_named_with_its_place(asked: Json, pointer: str, words: str) -> None:
    error = refused(asked)
    assert [fault.pointer for fault in error.errors] == [pointer]
    assert words in error.errors[0].detail
    assert pointer in error.message


def test_a_name_that_the_request_has_twice_is_refused_before_it_is_looked_for() -> None:
    assert refused(request({"layers": ["a.1"]}, layers=[LAYERS[0], OTHER])).errors[0].pointer == "/layers/1/name"


def test_a_layer_that_two_ranks_keep_differently_is_named_with_the_ranks() -> None:
    ranks = [{"layers": [LAYERS[0]]}, {"layers": []}, {"layers": [LAYERS[2], OTHER]}]
    error = refused(request(*ranks, layers=None))
    assert [fault.pointer for fault in error.errors] == ["/ranks/2/layers/1"]
    assert "layer 'a.1' is not the same on rank 0 and rank 2: num_kv_heads 8 and 4" in error.message


def test_a_layer_of_another_kind_is_another_layer() -> None:
    ranks = [{"layers": [build.full("a")]}, {"layers": [build.sliding("a")]}]
    assert "kind full_attention and sliding_window" in refused(request(*ranks, layers=None)).message


def test_faults_of_the_merged_model_point_at_the_rank_that_wrote_the_layer() -> None:
    narrow = build.sliding("b", heads=3, backend=build.dense(build.ROW_SHAPE))
    error = refused(request({"layers": [LAYERS[0]]}, {"layers": [LAYERS[2], narrow]}, layers=None), CannotUnify)
    assert [fault.pointer for fault in error.errors] == ["/ranks/1/layers/1"]
    planes = build.full("b", backend="rocm_attn", page_size_padded=1 << 20)
    error = refused(request({"layers": [planes]}, layers=None), LayoutUnsupported)
    assert [fault.pointer for fault in error.errors] == ["/ranks/0/layers/0/backend"]


def test_a_shared_cache_stays_with_its_owner() -> None:
    reader = build.full("reader", kv_sharing_target="a.1")
    asked = request({"layers": ["a.{i}", "c"]}, {"layers": ["b.{i}", "reader"]}, layers=[*LAYERS, reader])
    error = refused(asked)
    assert [fault.pointer for fault in error.errors] == ["/layers/3/kv_sharing_target"]
    assert "'reader' is on rank 1 and reads the cache of layer 'a.1'" in error.message
    asked["ranks"][1]["layers"].append("a.1")
    assert kvpage.plan_ranks(asked).ranks[1].layers["reader"].decision == "share"


def test_memory_that_is_too_small_is_named_with_its_rank() -> None:
    error = refused(request({}, {"memory_bytes": 200_000}), NotEnoughMemory)
    assert error.message.startswith("rank 1: memory_bytes is 200000")
    assert [fault.pointer for fault in error.errors] == ["/ranks/1"]
    facts = {"needed_bytes": 2 * 2 * 65_536, "available_bytes": 200_000, "longest_request_tokens": 0, "rank": 1}
    assert error.details == facts


def test_a_number_of_blocks_too_small_for_a_request_is_refused() -> None:
    asked = request({}, num_blocks=2, memory_bytes=None, max_model_len=4096)
    error = refused(asked, NotEnoughMemory)
    assert [fault.pointer for fault in error.errors] == ["/num_blocks"]


def test_what_is_no_mapping_is_refused() -> None:
    assert "mapping" in refused([1]).message


def test_one_plan_is_not_made_of_several_ranks() -> None:
    with pytest.raises(SpecInvalid, match=r"kvpage\.plan_ranks") as caught:
        kvpage.plan(request({}))
    assert [fault.pointer for fault in caught.value.errors] == ["/ranks"]


def test_a_model_says_itself_what_its_ranks_keep() -> None:
    model = {"config": {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
                        "num_key_value_heads": 4, "torch_dtype": "bfloat16"}, "tp": 2, "pp": 2}  # fmt: skip
    asked: Json = {"strategy": "unify", "memory_bytes": GIB, "model": model}
    assert kvpage.plan_ranks(asked) == kvpage.plan_ranks(asked | {"ranks": "all"})
    assert refused(asked | {"ranks": [{"layers": ["a"]}] * 4}).errors[0].pointer == "/ranks/0/layers"
    assert "tp 2 × pp 2 are 4 ranks, not 3" in refused(asked | {"ranks": [{}] * 3}).message
    staged = asked | {"model": model | {"pp_stage": 1}}
    assert refused(staged).errors[0].pointer == "/model/pp_stage"
    many = asked | {"model": model | {"tp": 1024}}
    assert "more than 1024 ranks" in refused(many).message
    assert refused(asked | {"layers": LAYERS}).errors[0].pointer == "/model"
    assert refused(asked | {"model": 5}).errors[0].pointer == "/model"


# --- bounds ---------------------------------------------------------------------------------------


def test_1024_ranks_are_planned_and_no_more() -> None:
    assert len(ranked(*[{}] * 1024).ranks) == 1024
    assert [fault.pointer for fault in refused(request(*[{}] * 1025)).errors] == ["/ranks"]


def test_the_layers_of_all_ranks_together_are_bounded_before_they_are_made() -> None:
    many = [build.full("a.{i}", count=4096)]
    per_rank = MAX_RANK_LAYERS // 4096
    assert "add up to more than" in refused(request(*[{}] * (per_rank + 1), layers=many)).message
    written = [{"layers": many * 2}] * per_rank
    assert "add up to more than" in refused(request(*written, layers=None)).message


# --- what is said of memory -----------------------------------------------------------------------


def test_memory_left_over_is_warned_of_beyond_a_tenth() -> None:
    block = 2 * 65_536
    for blocks, warned in ((1111, False), (1112, True)):  # 1,000 of 1,111 are 90.0%
        plans = ranked({"memory_bytes": 1000 * block}, {"memory_bytes": blocks * block}, {"memory_bytes": 1000 * block})
        assert plans.num_blocks == 1000
        assert bool(plans.warnings) == warned
    assert plans.warnings[0].startswith("rank 0 holds only 1,000 blocks, so 1 of 3 ranks leave more than 10%")
    assert "rank 1 the most: 10%, as it could hold 1,112 blocks" in plans.warnings[0]


# --- memory that layers of one layout alone share -------------------------------------------------


def test_layers_that_move_together_share_memory_only_where_they_may() -> None:
    """K and V of all blocks apart in two layers, whole pages in the others: they met their like, and still do."""
    planes = {"shape": [2, "num_blocks", "block_size", "num_kv_heads", "head_size"]}
    whole = build.dense(build.ROW_SHAPE)
    layers = [
        build.full("full.0", backend=planes), build.full("full.1", backend=whole),
        build.sliding("window.0", backend=planes), build.sliding("window.1", backend=whole),
    ]  # fmt: skip
    plans = ranked({"layers": ["full.0", "window.1"]}, {"layers": ["full.1", "window.0"]}, layers=layers)
    assert [plan.bytes_per_block for plan in plans.ranks] == [2 * 65_536] * 2


# --- the answer -----------------------------------------------------------------------------------


def test_plans_of_ranks_are_read_back_and_proven() -> None:
    plans = ranked({"layers": ["a.{i}"]}, {"layers": ["b.{i}", "c"]}, {"layers": ["a.{i}"]})
    again = RankedPlan.from_json(plans.to_json())
    assert again == plans
    assert again.ranks[0] is again.ranks[2]
    for wrong in (b"", b"[]", b"{}", plans.to_json()[:-1], plans.to_json().replace(b'"group":0', b'"group":1', 1)):
        with pytest.raises(SpecInvalid):
            RankedPlan.from_json(wrong)


def test_plans_that_do_not_fit_together_are_found() -> None:
    plans = ranked({"layers": ["a.{i}"]}, {"layers": ["b.{i}", "c"]})
    more = ranked({"layers": ["a.{i}"]}, {"layers": ["b.{i}", "c"]}, memory_bytes=2 * GIB)
    mixed = msgspec.structs.replace(plans, ranks=(plans.ranks[0], more.ranks[1]))
    with pytest.raises(InternalError, match="rank 1 has other groups"):
        mixed.check()
    with pytest.raises(SpecInvalid, match="do not fit together"):
        RankedPlan.from_json(mixed.to_json())
    with pytest.raises(InternalError, match="rank 0 has other"):
        msgspec.structs.replace(plans, num_blocks=1).check()
    other = ranked({}, layers=[build.full("a", block_size=32), build.sliding("b", block_size=32)])
    with pytest.raises(InternalError, match="rank 1 has other"):
        msgspec.structs.replace(plans, ranks=(plans.ranks[0], other.ranks[0])).check()


# --- anything at all ---------------------------------------------------------------------------------

ODD: list[Any] = [
    None, 0, -1, 1.5, True, "", "a", "all", "\ud800", b"x", object(), float("nan"), 2**62, 2**63, [], {}, [[]], [{}],
    [1], [None], ["a.0"], ["\ud800"], {"start": 0}, {"start": 0, "end": 1}, {"start": 0, "end": 2**70},
    [build.full("own")], [build.full("own")] * 2,
]  # fmt: skip
USUAL: Json = {"layers": [build.full("a.{i}", count=2)], "memory_bytes": GIB, "num_blocks": 5}


def odd_request(rng: random.Random) -> Json:
    fields = ("layers", "memory_bytes", "other")
    ranks: Any = [{key: rng.choice(ODD) for key in rng.sample(fields, rng.choice((0, 1, 1, 2)))} for _ in range(2)]
    asked: Json = {"strategy": "unify", "ranks": ranks if rng.random() < 0.8 else rng.choice(ODD)}
    for key, value in USUAL.items():
        if rng.random() < 0.6:
            asked[key] = value if rng.random() < 0.9 else rng.choice(ODD)
    return asked if rng.random() < 0.9 else asked | {"model": rng.choice(ODD)}


def planned(asked: Json) -> SpecInvalid | None:
    """None, or why not."""
    try:
        kvpage.plan_ranks(asked).check()
    except SpecInvalid as error:
        return error
    return None


def test_whatever_is_written_there_is_planned_or_refused_with_a_place() -> None:
    rng = random.Random(0)
    num_planned = 0
    for _ in range(3000):
        asked = odd_request(rng)
        error = planned(asked)
        if error is None:
            num_planned += 1
            continue
        fields = [fault.pointer.split("/")[1] for fault in error.errors if fault.pointer]
        assert error.errors, asked
        assert {*fields} <= {*asked, "ranks", "layers"}, asked
    assert num_planned > 50
