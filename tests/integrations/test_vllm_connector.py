"""An engine of vLLM, stood in for by what a real one did, keeps its cache in a pool; each check of the connector fires.

The engine itself runs in `make test-vllm`, which records what is done again here.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kvpage
from kvpage.errors import (
    Conflict,
    DeviceUnavailable,
    KvpageError,
    LayoutUnsupported,
    NotEnoughMemory,
    NotSupported,
    SpecInvalid,
    StaleHandle,
)
from kvpage.integrations.vllm.engine_checks import TESTED_RANGE, RankAnswer, check_ranks, check_version
from kvpage.integrations.vllm.engine_plan import engine_plan
from kvpage.integrations.vllm.engine_pool import Allocation, EnginePool, PoolChoice
from support.api_service import ApiService
from support.eventually import until
from support.stand_in_vllm import MODELS, StandInEngine, config_from, standing_in, trace_of, vllm_config

Fields = dict[str, Any]
_names = itertools.count(1)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiService]:
    with ApiService(tmp_path_factory.mktemp("run")) as service:
        yield service


@pytest.fixture
def where(service: ApiService) -> Fields:
    """`kv_connector_extra_config` with a pool of its own."""
    return {"pool": f"engine-{next(_names)}", "run_dir": str(service.run_directory.path)}


@contextmanager
def engine(trace: Fields, where: Fields, *, version: str | None = None, **changes: Any) -> Iterator[StandInEngine]:
    with standing_in(trace, version=version) as connector:
        stand_in = StandInEngine(trace, connector, vllm_config(trace, where, **changes))
        try:
            yield stand_in
        finally:
            stand_in.close()


def registered(trace: Fields) -> Fields:
    [call] = [call for call in trace["calls"] if call["call"] == "register_kv_caches"]
    found: Fields = call["tensors"]
    return found


def allocated(trace: Fields) -> Fields:
    [call] = [call for call in trace["calls"] if call["call"] == "torch.zeros"]
    found: Fields = call
    return found


def refusal_of(trace: Fields, where: Fields, kind: type[KvpageError], **changes: Any) -> str:
    """What the engine is told when it starts."""
    with engine(trace, where, **changes) as stand_in, pytest.raises(kind) as refused:
        stand_in.run()
    return refused.value.message


def bytes_of(page: torch.Tensor) -> torch.Tensor:
    """A view of a page's own bytes, which follow each other."""
    return page.view(-1).view(torch.uint8)


# --- what a real engine did, done again -------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_the_cache_of_an_engine_lies_in_its_pool_and_others_see_its_bytes(model: str, where: Fields) -> None:
    trace = trace_of(model)
    with engine(trace, where) as stand_in:
        stand_in.run(until="shutdown")
        with kvpage.attach(where["pool"], run_dir=where["run_dir"]) as kv:
            assert kv.plan.buffer_size_bytes == allocated(trace)["size"]
            assert kv.plan.num_blocks == trace["config"]["num_blocks"]
            assert not kv.buffer.any()
            for block, name in enumerate(kv.plan.layers, start=1):  # each its own: groups share the bytes of a block
                cache = bytes_of(stand_in.caches[name][block])
                cache.copy_(torch.randint(256, cache.shape, dtype=torch.uint8))
                seen = torch.cat([bytes_of(tensor[block]) for tensor in kv.tensors[name]])
                assert torch.equal(seen, cache), name
                assert seen.any()


def test_the_scheduler_is_told_of_no_tokens_elsewhere(where: Fields) -> None:
    with engine(trace_of("llama"), where) as stand_in:
        stand_in.run()
        assert stand_in.answers["get_num_new_matched_tokens"] == (0, False)
        assert stand_in.answers["request_finished_all_groups"] == (False, None)
        assert stand_in.answers["build_connector_meta"] is not None


def test_an_engine_holds_its_pool_whole_until_it_ends(service: ApiService, where: Fields) -> None:
    trace = trace_of("llama")
    with engine(trace, where) as stand_in, service.client() as client:
        stand_in.run(until="shutdown")
        blocks = client.get_pool(client.find_pool(where["pool"]).id).blocks
        assert blocks is not None
        assert blocks.groups[0].used == trace["config"]["num_blocks"] - 1  # all but the null block
        stand_in.close()

        def is_free() -> bool:
            pool = client.get_pool(client.find_pool(where["pool"]).id)
            return pool.num_holders == 0 and pool.blocks is not None and pool.blocks.groups[0].used == 0

        until(is_free)


def test_a_layer_that_reads_the_cache_of_another_is_registered_with_it(where: Fields) -> None:
    """Of this model two layers do."""
    trace = trace_of("gemma4")
    planned = {name for group in trace["config"]["kv_cache_groups"] for name in group["layer_names"]}
    assert len(registered(trace).keys() - planned) == 2


def test_nobody_loads_vllm_or_torch_by_importing_the_integration() -> None:
    program = (
        "import sys, kvpage.integrations.vllm as found; found.layers_from_specs; "
        "print([name for name in ('vllm', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_without_vllm_the_connector_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    import kvpage.integrations.vllm as found

    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.delitem(sys.modules, "kvpage.integrations.vllm.connector", raising=False)
    with pytest.raises(ImportError):
        _ = found.KvpageConnector
    with pytest.raises(AttributeError):
        _ = found.Nonsense


# --- the eight checks -------------------------------------------------------------------------------------------------


def test_1_a_buffer_of_another_size_than_the_plan_is_refused(where: Fields) -> None:
    trace = trace_of("llama")
    for tensor in trace["config"]["kv_cache_tensors"]:
        tensor["size"] += 4096
    message = refusal_of(trace, where, LayoutUnsupported)
    assert str(allocated(trace)["size"]) in message
    assert str(allocated(trace)["size"] + 4096) in message


@pytest.mark.parametrize("field", ["offset", "layer_stride", "block_stride"])
def test_1_a_layer_in_another_place_than_in_the_plan_is_refused(field: str, where: Fields) -> None:
    trace = trace_of("llama")
    trace["config"]["kv_cache_tensors"][0][field] += 64
    assert "model.layers" in refusal_of(trace, where, LayoutUnsupported)


def test_1_only_an_allocation_of_the_very_size_is_answered_with_the_pool(where: Fields) -> None:
    trace = trace_of("llama")
    size = allocated(trace)["size"]
    allocated(trace)["size"] = size - 1
    message = refusal_of(trace, where, Conflict)
    assert str(size) in message
    assert str(size - 1) in message


def test_2_an_engine_that_allocates_nothing_is_refused(where: Fields) -> None:
    trace = trace_of("llama")
    trace["calls"] = [call for call in trace["calls"] if call["call"] != "torch.zeros"]
    assert "allocated none" in refusal_of(trace, where, Conflict)


def test_2_an_engine_that_allocates_twice_is_refused(where: Fields) -> None:
    trace = trace_of("llama")
    place = trace["calls"].index(allocated(trace))
    trace["calls"].insert(place, allocated(trace))
    assert "twice" in refusal_of(trace, where, Conflict)


def test_2_an_engine_that_asks_for_the_memory_twice_is_refused(where: Fields) -> None:
    with engine(trace_of("llama"), where) as stand_in:
        stand_in.run(until="shutdown")
        with pytest.raises(Conflict):
            stand_in.run_again("get_mem_pool_context")


def test_3_what_an_engine_has_left_is_zeros_for_the_next(where: Fields) -> None:
    trace = trace_of("gemma4")
    with engine(trace, where) as stand_in:
        stand_in.run()
    with kvpage.attach(where["pool"], run_dir=where["run_dir"]) as kv:
        kv.buffer.fill_(255)
    with engine(trace, where) as stand_in:
        stand_in.run(until="shutdown")
        assert all(not cache.any() for cache in stand_in.caches.values())


def test_3_a_pool_that_another_engine_has_is_not_cleared_but_refused(
    where: Fields, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpage.integrations.vllm.engine_pool._PATIENCE_S", 0.0)
    trace = trace_of("llama")
    with engine(trace, where) as first:
        first.run(until="shutdown")
        for cache in first.caches.values():
            cache.fill_(1.0)
        with engine(trace, where) as second, pytest.raises(Conflict) as refused:
            second.run()
        assert where["pool"] in refused.value.message
        assert all(torch.all(cache == 1.0) for cache in first.caches.values())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("offset_elems", 64),
        ("dtype", "int32"),
        ("shape", [64, 2, 32, 64]),
        ("strides_elems", [4096, 64, 128, 1]),
        ("strides_elems", [8192, 2048, 64, 1]),
    ],
)
def test_4_a_tensor_that_lies_otherwise_than_planned_is_refused(field: str, value: Any, where: Fields) -> None:
    trace = trace_of("llama")
    name = "model.layers.0.self_attn.attn"
    registered(trace)[name][field] = value
    assert name in refusal_of(trace, where, LayoutUnsupported)


def test_4_a_layer_that_is_not_registered_is_refused(where: Fields) -> None:
    trace = trace_of("llama")
    del registered(trace)["model.layers.1.self_attn.attn"]
    assert "model.layers.1" in refusal_of(trace, where, LayoutUnsupported)


def test_4_a_layer_that_is_in_no_plan_and_shares_no_cache_is_refused(where: Fields) -> None:
    trace = trace_of("llama")
    known = registered(trace)["model.layers.1.self_attn.attn"]
    registered(trace)["another"] = known | {"offset_elems": known["offset_elems"] + 64, "shape": [64, 2, 32, 64]}
    assert "'another'" in refusal_of(trace, where, LayoutUnsupported)


def test_4_states_in_another_place_are_refused(where: Fields) -> None:
    trace = trace_of("falcon_h1")
    registered(trace)["model.2.mixer"]["offset_elems"] += 1
    assert "model.2.mixer" in refusal_of(trace, where, LayoutUnsupported)


def test_4_the_stride_of_an_axis_with_one_entry_is_never_used(where: Fields) -> None:
    trace = trace_of("falcon_h1")
    registered(trace)["model.2.mixer"]["strides_elems"][1:3] = [7, 9]
    with engine(trace, where) as stand_in:
        stand_in.run()


@pytest.mark.parametrize("field", ["enable_sleep_mode", "enable_cumem_allocator"])
def test_5_an_engine_that_may_sleep_is_refused(field: str, where: Fields) -> None:
    assert field in refusal_of(trace_of("llama"), where, NotSupported, model_config={field: True})


def test_6_a_cache_that_another_connector_gave_is_refused(where: Fields) -> None:
    """vLLM enters one connector's context only; of this one it registers the caches all the same."""
    trace = trace_of("llama")
    trace["calls"] = [call for call in trace["calls"] if call["call"] not in ("enter", "exit")]
    assert "another connector" in refusal_of(trace, where, Conflict)


def test_6_a_tensor_outside_the_pool_is_refused(where: Fields) -> None:
    trace = trace_of("llama")
    with engine(trace, where) as stand_in:
        stand_in.run(until="register_kv_caches")
        stand_in.lose_the_buffer()
        with pytest.raises(Conflict) as refused:
            stand_in.run_again("register_kv_caches")
    assert "does not lie in pool" in refused.value.message


@pytest.mark.parametrize("version", ["0.30.0", "0.33.0", "0.33.1rc1", "0.24", "1.32.0", "0.1.dev7+gabc", "unknown", ""])
def test_7_a_version_that_was_not_tried_is_refused_with_the_range(version: str) -> None:
    with pytest.raises(NotSupported) as refused:
        check_version(version)
    assert TESTED_RANGE in refused.value.message


@pytest.mark.parametrize("version", ["0.31.0", "0.32.0", "0.32.1", "0.32.0+cpu", "0.32.2rc1"])
def test_7_releases_of_the_range_are_taken(version: str) -> None:
    check_version(version)


def test_7_an_engine_of_another_version_does_not_start(where: Fields) -> None:
    assert "0.33.0" in refusal_of(trace_of("llama"), where, NotSupported, version="0.33.0")


def test_7_the_traces_are_of_the_range() -> None:
    for model in MODELS:
        check_version(trace_of(model)["vllm"])


def test_8_ranks_with_other_blocks_are_refused() -> None:
    plan = engine_plan(config_from(trace_of("llama")["config"]), {}).plan
    mine = RankAnswer.of(0, plan)
    check_ranks([mine, RankAnswer(1, mine.num_blocks, mine.groups)])
    for other in (RankAnswer(1, mine.num_blocks - 1, mine.groups), RankAnswer(1, mine.num_blocks, (("mamba", 32),))):
        with pytest.raises(Conflict, match="rank 1"):
            check_ranks([mine, other])


def test_8_a_rank_that_cannot_go_on_stops_the_others() -> None:
    answers = [RankAnswer(0, 128, ()), RankAnswer(1, 0, (), refusal="its layers are not known")]
    with pytest.raises(Conflict, match="its layers are not known"):
        check_ranks(answers)


@pytest.mark.parametrize("theirs", [128, 127])
def test_8_an_engine_of_several_ranks_asks_all_of_them_first(
    theirs: int, where: Fields, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gathered(answers: list[Any], mine: RankAnswer, group: Any) -> None:
        assert group == "all ranks"
        answers[:] = [mine, RankAnswer(1, theirs, mine.groups)]

    trace = trace_of("llama")
    state = SimpleNamespace(get_world_group=lambda: SimpleNamespace(world_size=2, cpu_group="all ranks"))
    monkeypatch.setattr(torch.distributed, "all_gather_object", gathered)
    monkeypatch.setitem(sys.modules, "vllm.distributed.parallel_state", state)
    with engine(trace, where, parallel_config={"world_size": 2}) as stand_in:
        if theirs == trace["config"]["num_blocks"]:
            stand_in.run()
            with kvpage.attach(f"{where['pool']}-rank0", run_dir=where["run_dir"]) as kv:
                assert kv.plan.num_blocks == theirs
        else:
            with pytest.raises(Conflict):
                stand_in.run()


# --- what is said of the pool -----------------------------------------------------------------------------------------


def choice(extra: Fields, **changes: Any) -> PoolChoice:
    return PoolChoice.of(vllm_config(trace_of("llama"), extra, **changes))


def test_a_pool_is_named_for_the_engine_and_its_rank() -> None:
    assert choice({}) == PoolChoice(name="vllm", device="host", run_dir=None)
    ranks = {"rank": 3, "world_size": 4, "data_parallel_size": 2, "data_parallel_index": 1}
    assert choice({"pool": "chat"}, parallel_config=ranks).name == "chat-dp1-rank3"
    on_gpus = choice({"device": "cuda:{rank}"}, parallel_config=ranks, device_config={"device_type": "cuda"})
    assert on_gpus.device == "cuda:3"


def test_an_engine_on_a_gpu_must_name_the_device_of_the_pool() -> None:
    with pytest.raises(SpecInvalid, match="cuda:0"):
        choice({}, device_config={"device_type": "cuda"})


@pytest.mark.parametrize("extra", [{"pol": "chat"}, {"pool": 3}, {"pool": ""}, {"run_dir": None}])
def test_settings_that_are_not_known_are_refused(extra: Fields) -> None:
    with pytest.raises(SpecInvalid):
        choice(extra)


def test_a_pool_of_another_plan_is_not_taken(where: Fields) -> None:
    with engine(trace_of("llama"), where) as stand_in:
        stand_in.run()
    other = trace_of("gemma3")
    with engine(other, where) as stand_in, pytest.raises(Conflict):
        stand_in.run()


def test_an_engine_with_more_than_there_is_room_for_is_told_so(where: Fields) -> None:
    trace = trace_of("llama")
    times = 1 << 20
    trace["config"]["num_blocks"] *= times
    for tensor in trace["config"]["kv_cache_tensors"]:
        tensor["size"] *= times
        tensor["layer_stride"] *= times
    refusal_of(trace, where, NotEnoughMemory)


def test_an_engine_without_a_service_is_told_how_to_start_one(where: Fields, tmp_path: Path) -> None:
    message = refusal_of(trace_of("llama"), where | {"run_dir": str(tmp_path)}, DeviceUnavailable)
    assert "kvpage serve" in message


def test_a_model_without_a_cache_has_nothing_to_put_into_a_pool() -> None:
    with pytest.raises(NotSupported):
        engine_plan(config_from(trace_of("llama")["config"] | {"kv_cache_groups": []}), {})


def test_a_pool_that_was_given_back_is_stale(where: Fields) -> None:
    planned = engine_plan(config_from(trace_of("llama")["config"]), {})
    pool = EnginePool.open(planned, PoolChoice(name=where["pool"], device="host", run_dir=where["run_dir"]))
    pool.close()
    pool.close()
    with pytest.raises(StaleHandle):
        pool.allocation()


# --- the context ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "allocate",
    [
        lambda: torch.zeros(64, dtype=torch.int8),
        lambda: torch.zeros((64,), dtype=torch.int8),
        lambda: torch.zeros(size=(64,), dtype=torch.int8, device="cpu"),
        lambda: torch.zeros([64], dtype=torch.int8, device=torch.device("cpu")),
    ],
)
def test_every_way_to_ask_for_flat_bytes_is_answered(allocate: Any) -> None:
    memory = torch.arange(64, dtype=torch.int8)
    with Allocation("pool", memory):
        assert allocate() is memory


def test_other_allocations_go_their_way() -> None:
    memory = torch.arange(64, dtype=torch.int8)
    with Allocation("pool", memory):
        others = [
            torch.zeros(64, dtype=torch.uint8),
            torch.zeros(8, 8, dtype=torch.int8),
            torch.zeros((8, 8), dtype=torch.int8),
            torch.empty(64, dtype=torch.int8),
            torch.zeros(63, dtype=torch.int8),
        ]
        taken = torch.zeros(64, dtype=torch.int8)
    assert taken is memory
    assert all(other.data_ptr() != memory.data_ptr() for other in others)


def test_memory_on_another_device_is_not_given() -> None:
    with pytest.raises(NotSupported), Allocation("pool", torch.zeros(64, dtype=torch.int8)):
        torch.zeros(64, dtype=torch.int8, device="meta")


def test_the_error_inside_the_context_is_the_one_that_is_told() -> None:
    with pytest.raises(ZeroDivisionError), Allocation("pool", torch.zeros(64, dtype=torch.int8)):
        _ = 1 // 0
