"""Finished blocks of an engine outlive it: the next one finds those that were sealed, and no others."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvpage
from kvpage.errors import Conflict, LayoutUnsupported, SpecInvalid
from kvpage.integrations.vllm.store_choice import StoreChoice, weights_salt, why_not_stored
from kvpage.integrations.vllm.store_scheduler import MOST_AT_ONCE, StoreScheduler
from kvpage.integrations.vllm.store_values import StoreReport
from kvpage.integrations.vllm.store_worker import StoreWorker, common_runs
from support import store_program
from support.api_service import ApiService, kill_process
from support.checkout import ROOT
from support.eventually import until
from support.stand_in_vllm import StandInEngine, standing_in, trace_of, vllm_config
from support.store_engine import BLOCK_SIZE, Request, StoreEngine, choice, engine_plan, prompt_of
from support.store_program import LONG_TOKENS

Fields = dict[str, Any]

_names = itertools.count(1)
PROMPT_TOKENS = 1024
MOMENTS = 76
"""An engine that answers two prompts does 74 pieces of work; after that it dies of nothing but the test."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiService]:
    with ApiService(tmp_path_factory.mktemp("run")) as service:
        yield service


@pytest.fixture
def chosen(service: ApiService) -> StoreChoice:
    return choice(str(service.run_directory.path), f"store-{next(_names)}")


@contextmanager
def other_process(chosen: StoreChoice, *seeds: int, moment: int = 0) -> Iterator[subprocess.Popen[str]]:
    """An engine of its own that answers prompts of these seeds."""
    assert chosen.run_dir is not None
    arguments = [chosen.run_dir, chosen.name, str(moment), *map(str, seeds)]
    paths = [str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, store_program.__file__, *arguments]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def killed_after_answering(chosen: StoreChoice, *seeds: int) -> None:
    with other_process(chosen, *seeds) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "answered\n"
        child.kill()
        child.wait(60)


def num_held(service: ApiService, chosen: StoreChoice) -> int:
    with service.client() as client:
        blocks = client.get_pool(client.find_pool(chosen.name).id).blocks
    assert blocks is not None
    return sum(group.used for group in blocks.groups)


def is_free(service: ApiService, chosen: StoreChoice) -> bool | None:
    return num_held(service, chosen) == 0 or None


def test_an_engine_that_was_killed_leaves_its_blocks_to_the_next(tmp_path: Path) -> None:
    """Also when the API process is killed before that one starts, and then the worker."""
    chosen = choice(str(tmp_path / "run"), "store")
    prompt, all_but_the_last = prompt_of(1, LONG_TOKENS), LONG_TOKENS - BLOCK_SIZE  # its logits are wanted
    with ApiService(tmp_path / "run") as service:
        killed_after_answering(chosen, 1)
        with StoreEngine(chosen) as engine:
            assert engine.answer(prompt) == all_but_the_last
            assert engine.answer(prompt_of(2)) == 0
            assert engine.answer([*prompt[:1000], 7, 8, 9]) == 1000 // BLOCK_SIZE * BLOCK_SIZE
            assert num_held(service, chosen) == 0
        service.kill()
        with ApiService(tmp_path / "run", "--memory", "64MiB") as again:
            with StoreEngine(chosen) as engine:
                assert engine.answer(prompt) == all_but_the_last
                kill_process(again.worker_pid())
                assert engine.answer([*prompt, 5]) == LONG_TOKENS  # one that lives goes on
            kill_process(again.worker_pid())
            with StoreEngine(chosen) as engine:
                assert engine.answer(prompt) == all_but_the_last


@pytest.mark.sampled(1)
@pytest.mark.parametrize("moment", range(1, MOMENTS + 1))
def test_whenever_an_engine_is_killed_what_is_found_is_whole(
    moment: int, service: ApiService, chosen: StoreChoice
) -> None:
    with other_process(chosen, 1, 2, moment=moment) as child:
        assert child.stdout is not None
        child.stdout.readline()  # empty where it has died
        child.kill()
        assert child.wait(60) == -signal.SIGKILL
    until(lambda: has_pool(service, chosen) is False or is_free(service, chosen))
    with StoreEngine(chosen) as engine:
        assert engine.answer(prompt_of(1, LONG_TOKENS)) <= LONG_TOKENS - BLOCK_SIZE  # which looks at every block
        assert engine.answer([*prompt_of(2, LONG_TOKENS), 1]) <= LONG_TOKENS
        assert engine.answer(prompt_of(1, LONG_TOKENS)) == LONG_TOKENS - BLOCK_SIZE
    assert num_held(service, chosen) == 0


def has_pool(service: ApiService, chosen: StoreChoice) -> bool:
    with service.client() as client:
        return any(pool.name == chosen.name for pool in client.pools())


# --- what is refused --------------------------------------------------------------------------------------------------


def test_bytes_that_are_not_what_was_sealed_are_noticed(service: ApiService, chosen: StoreChoice) -> None:
    """The check of the tests above fires."""
    with StoreEngine(chosen) as engine:
        engine.answer(prompt_of(1))
        with kvpage.attach(chosen.name, run_dir=chosen.run_dir) as kv:
            kv.buffer.fill_(1)
        with pytest.raises(AssertionError, match="is another's"):
            engine.answer(prompt_of(1))


def test_blocks_that_are_copied_and_not_sealed_are_not_found(chosen: StoreChoice, monkeypatch: Any) -> None:
    with StoreEngine(chosen) as engine:
        step_of = engine.worker._lease.step
        monkeypatch.setattr(engine.worker._lease, "step", lambda step, wait_s=0.0: step_of(replace(step, commit={})))
        engine.answer(prompt_of(1))
        monkeypatch.undo()
        assert engine.answer(prompt_of(1)) == 0


def test_what_was_computed_before_everything_was_forgotten_is_not_kept(
    service: ApiService, chosen: StoreChoice
) -> None:
    with StoreEngine(chosen) as engine, service.client() as client:
        request = Request("begun before", prompt_of(1))
        blocks, _ = engine.begin(request)
        client.clear_prefixes(client.find_pool(chosen.name).id)
        while request.num_computed_tokens < PROMPT_TOKENS:
            engine.step(request, blocks, 256)
        engine.scheduler.finished(request)
        assert engine.answer(prompt_of(1)) == 0
        assert engine.answer(prompt_of(1)) > 0


def test_a_store_of_another_layout_is_refused(chosen: StoreChoice) -> None:
    StoreWorker.open(engine_plan(), chosen).close()
    for other in (engine_plan(dtype="bfloat16"), engine_plan(num_kv_heads=4), engine_plan(backend="LBNHC")):
        with pytest.raises((Conflict, LayoutUnsupported, SpecInvalid)):
            StoreWorker.open(other, chosen).close()
    with pytest.raises(Conflict, match="another layout or number"):
        StoreWorker.open(engine_plan(), replace(chosen, num_blocks=77)).close()


def test_a_tensor_whose_blocks_are_not_the_stores_is_refused(chosen: StoreChoice) -> None:
    worker = StoreWorker.open(engine_plan(), chosen)
    with StoreEngine(chosen) as engine:
        halves = {name: cache.narrow(-1, 0, cache.shape[-1] // 2) for name, cache in engine.caches.items()}
        with pytest.raises(LayoutUnsupported, match="in the store"):
            worker.register(halves)
    worker.close()


def test_other_weights_find_nothing(chosen: StoreChoice) -> None:
    with StoreEngine(chosen) as engine, StoreEngine(chosen, salt=b"other weights") as other:
        engine.answer(prompt_of(1))
        assert other.answer(prompt_of(1)) == 0
        assert engine.answer(prompt_of(1), cache_salt="of one user") == 0
        assert engine.answer(prompt_of(1)) > 0


def test_nothing_is_read_from_a_store_that_the_scheduler_does_not_mean(chosen: StoreChoice) -> None:
    """As after a pool was replaced by one of the same name. What is computed with what is missing is not kept."""
    with StoreEngine(chosen) as engine:
        engine.answer(prompt_of(1))
        request = Request("of another pool", [*prompt_of(1), *prompt_of(5)])
        engine.scheduler._pool_id, right = "pool-of-another", engine.scheduler._pool_id
        blocks, found = engine.begin(request)
        engine.step(request, blocks, 64)
        assert engine.worker.take_failed() == set(blocks[: found // BLOCK_SIZE])
        assert engine.worker.take_failed() == set()
        engine.scheduler._pool_id = right
        assert engine.answer([*prompt_of(7)]) == 0
        assert engine.answer([*prompt_of(7)]) == 0


@pytest.mark.parametrize("field", ["lora_request", "mm_features", "prompt_embeds"])
def test_what_tokens_do_not_tell_is_neither_kept_nor_found(field: str, chosen: StoreChoice) -> None:
    with StoreEngine(chosen) as engine:
        engine.answer(prompt_of(1))
        assert engine.answer(prompt_of(1), **{field: ["something"]}) == 0
        assert engine.answer(prompt_of(2), **{field: ["something"]}) == 0
        assert engine.answer(prompt_of(2)) == 0
        assert engine.answer(prompt_of(2), skip_reading_prefix_cache=True) == 0
        assert engine.answer(prompt_of(2)) > 0


# --- steps ------------------------------------------------------------------------------------------------------------


def test_only_blocks_whose_tokens_are_all_known_are_kept(chosen: StoreChoice) -> None:
    """An engine that schedules ahead computes a token before the scheduler is told of it."""
    with StoreEngine(chosen) as engine:
        request = Request("decodes", prompt_of(1, 40))
        blocks, _ = engine.begin(request)
        engine.step(request, blocks, 40)
        engine.step(request, blocks, 24)  # the second block is computed, and of its tokens 8 are known
        assert engine.answer(prompt_of(1, 40)) == BLOCK_SIZE
        request.all_token_ids += prompt_of(3, 25)
        engine._compute(request, blocks, 0)
        request.num_computed_tokens -= 24
        engine.step(request, blocks, 25)
        engine.check(request, blocks)
        assert engine.answer(request.all_token_ids) == 2 * BLOCK_SIZE


def test_a_step_that_does_not_say_the_blocks_of_a_request_keeps_none(chosen: StoreChoice) -> None:
    with StoreEngine(chosen) as engine:
        request = Request("untold", prompt_of(1))
        blocks, _ = engine.begin(request)
        block_state = SimpleNamespace(get_block_ids=lambda _: None)
        output = SimpleNamespace(num_scheduled_tokens={"untold": 512}, kv_connector_block_state=block_state)
        assert engine.scheduler.transfers(output).saves == ()
        engine.step(request, blocks, 1024)
        assert engine.answer([*prompt_of(1), 1]) == 1024


def test_blocks_of_the_engine_itself_are_kept_where_the_store_has_lost_them(
    service: ApiService, chosen: StoreChoice
) -> None:
    with StoreEngine(chosen) as engine:
        request = Request("first", prompt_of(1))
        blocks, _ = engine.begin(request)
        engine.step(request, blocks, 1024)
        engine.scheduler.finished(request)
        with service.client() as client:
            client.clear_prefixes(client.find_pool(chosen.name).id)
        again = Request("second", [*prompt_of(1), 1, 2])
        assert engine.scheduler.matched(again, 1024) == 0
        engine.scheduler.allocated(again, blocks, 0)
        again.num_computed_tokens = 1024
        engine.step(again, blocks, 2)
        engine.scheduler.finished(again)
        assert engine.answer(again.all_token_ids) == 1024


def test_a_request_that_waits_for_room_holds_what_it_found_until_it_goes(
    service: ApiService, chosen: StoreChoice
) -> None:
    with StoreEngine(chosen) as engine:
        engine.answer(prompt_of(1))
        request = Request("waits", prompt_of(1))
        for _ in range(3):
            assert engine.scheduler.matched(request, 0) == 31 * BLOCK_SIZE
            assert num_held(service, chosen) == 31
        assert engine.scheduler.matched(request, 8 * BLOCK_SIZE) == 23 * BLOCK_SIZE
        assert num_held(service, chosen) == 23
        engine.scheduler.finished(request)
        assert num_held(service, chosen) == 0


def test_what_is_loaded_is_held_until_the_step_is_said_to_be_done(service: ApiService, chosen: StoreChoice) -> None:
    with StoreEngine(chosen) as engine:
        engine.answer(prompt_of(1))
        request = Request("loads", prompt_of(1))
        blocks, _ = engine.begin(request)
        reported, engine.scheduler.reported = engine.scheduler.reported, lambda report: None  # type: ignore[method-assign]
        engine.step(request, blocks, BLOCK_SIZE)
        assert num_held(service, chosen) == 31
        reported(StoreReport(engine.worker.report.step).aggregate(StoreReport(0)))
        assert num_held(service, chosen) == 31
        reported(engine.worker.report)
        assert num_held(service, chosen) == 0


def test_a_prompt_longer_than_the_store_is_kept_from_its_beginning(service: ApiService, chosen: StoreChoice) -> None:
    small = replace(chosen, num_blocks=30)
    with StoreEngine(small) as engine:
        engine.answer(prompt_of(1))
        assert engine.answer(prompt_of(1)) == 29 * BLOCK_SIZE
        engine.answer(prompt_of(2, 320))
        assert engine.answer(prompt_of(1)) == 19 * BLOCK_SIZE  # the end went first


def test_an_engine_goes_on_where_the_store_has_no_room(service: ApiService, chosen: StoreChoice) -> None:
    with StoreEngine(chosen) as engine, kvpage.open_lease(chosen.name, name="x", run_dir=chosen.run_dir) as lease:
        lease.allocate(0, 299 - MOST_AT_ONCE // 4)
        engine.answer(prompt_of(1))
        assert engine.answer(prompt_of(1)) == 0


def test_an_engine_goes_on_when_the_store_is_gone(
    service: ApiService, chosen: StoreChoice, caplog: pytest.LogCaptureFixture
) -> None:
    with StoreEngine(chosen) as engine, caplog.at_level(logging.WARNING, "vllm.kvpage"):
        engine.answer(prompt_of(1))
        with service.client() as client:
            client.delete_pool(client.find_pool(chosen.name).id, force=True)
        assert engine.answer(prompt_of(1)) == 0
        assert engine.answer(prompt_of(1)) == 0
    assert next(record.message.partition(":")[0] for record in caplog.records).startswith("the store is gone")


def test_a_store_that_does_not_answer_is_left_alone_for_a_while(chosen: StoreChoice) -> None:
    now_s, asked = 100.0, 0

    def take_prefix(*_: object) -> None:
        nonlocal asked
        asked += 1
        raise kvpage.errors.WorkerLost("nobody answers")

    lease: Any = SimpleNamespace(take_prefix=take_prefix, salt=b"", era=0, free=lambda *_: None, close=lambda: None)
    scheduler = StoreScheduler(lease, engine_plan().plan, "pool", b"", clock=lambda: now_s)
    for _ in range(3):
        assert scheduler.matched(Request("first", prompt_of(1)), 0) == 0
    assert asked == 1
    now_s += 11
    assert scheduler.matched(Request("second", prompt_of(1)), 0) == 0
    assert asked == 2


def test_a_worker_that_does_not_answer_keeps_no_engine_waiting(chosen: StoreChoice, monkeypatch: Any) -> None:
    asked, now_s = 0, 100.0

    def nobody(*_: object, **__: object) -> None:
        nonlocal asked
        asked += 1
        raise kvpage.errors.WorkerLost("nobody answers")

    with StoreEngine(chosen) as engine:
        engine.worker._clock = lambda: now_s
        monkeypatch.setattr(engine.worker._lease, "allocate", nobody)
        for _ in range(3):
            assert engine.answer(prompt_of(1)) == 0
        assert asked == 1
        monkeypatch.undo()
        now_s += 11
        assert engine.answer(prompt_of(1)) == 0
        assert engine.answer(prompt_of(1)) > 0


def test_runs_that_both_have_in_common() -> None:
    assert list(common_runs([3, 4, 5, 9, 10], [1, 2, 7, 8, 9])) == [(3, 1, 2), (5, 7, 1), (9, 8, 2)]
    assert list(common_runs([], [])) == []


# --- the connector ----------------------------------------------------------------------------------------------------


def connector_config(trace: Fields, chosen: StoreChoice) -> Any:
    extra = {"pool": f"engine-of-{chosen.name}", "run_dir": chosen.run_dir, "store": chosen.name, "store_blocks": 64}
    return vllm_config(trace, extra, model_config={"model": "a/name", "compute_hash": lambda: "the model"})


def step_of(request: Request, blocks: list[int], num_tokens: int) -> Any:
    return SimpleNamespace(
        num_scheduled_tokens={request.request_id: num_tokens},
        kv_connector_block_state=SimpleNamespace(get_block_ids=lambda _: (blocks,)),
    )


def test_the_connector_has_both_sides_do_what_vllm_asks(service: ApiService, chosen: StoreChoice) -> None:
    trace = trace_of("llama")
    config, blocks, request = connector_config(trace, chosen), [5, 6, 7], Request("request", prompt_of(1, 96))
    with standing_in(trace) as connector:
        for expected in (0, 2 * BLOCK_SIZE):  # the second engine begins with zeros
            engine = StandInEngine(trace, connector, config)
            engine.run(until="set_host_xfer_buffer_ops")
            worker, scheduler = engine.by_role["worker"], engine.make("scheduler")
            found, is_later = scheduler.get_num_new_matched_tokens(request, 0)
            assert (found, is_later) == (expected, False)
            scheduler.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: (blocks,)), found)
            request.num_computed_tokens = found
            worker.bind_connector_metadata(scheduler.build_connector_meta(step_of(request, blocks, 96 - found)))
            worker.start_load_kv(None)
            for cache in engine.caches.values():
                assert (cache[blocks[:2]] == (7.0 if found else 0.0)).all()
                cache[blocks] = 7.0
            worker.wait_for_save()
            assert worker.get_block_ids_with_load_errors() == set()
            output = SimpleNamespace(kv_connector_worker_meta=worker.build_connector_worker_meta())
            assert num_held(service, chosen) == found // BLOCK_SIZE
            scheduler.update_connector_output(output)
            assert scheduler.request_finished_all_groups(request, (blocks,)) == (False, None)
            assert num_held(service, chosen) == 0
            engine.close()


def test_a_model_whose_blocks_are_not_kept_runs_without_a_store(
    chosen: StoreChoice, caplog: pytest.LogCaptureFixture
) -> None:
    trace = trace_of("gemma3")
    with standing_in(trace) as connector, caplog.at_level(logging.WARNING, "vllm.kvpage"):
        engine = StandInEngine(trace, connector, connector_config(trace, chosen))
        engine.run()
        engine.close()
    assert "finished blocks are not kept: the model has 3 groups" in caplog.text


# --- what is asked for ------------------------------------------------------------------------------------------------


def config(extra: dict[str, Any], **changes: Any) -> Any:
    parallel = {"world_size": 1, "data_parallel_size": 1} | changes.pop("parallel", {})
    model = SimpleNamespace(model=changes.pop("model", "a/name"), compute_hash=lambda: "the model")
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
        parallel_config=SimpleNamespace(**parallel),
        model_config=model,
        load_config=SimpleNamespace(load_format="auto"),
        **{"speculative_config": None} | changes,
    )


def groups(*specs: Any) -> Any:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])


def spec(name: str, **fields: Any) -> Any:
    return type(name, (), fields)()


FULL = spec("FullAttentionSpec")


@pytest.mark.parametrize(
    ("vllm_config", "specs", "why"),
    [
        (config({}, parallel={"world_size": 2}), [FULL], "several ranks"),
        (config({}, parallel={"data_parallel_size": 2}), [FULL], "several ranks"),
        (config({}, speculative_config=object()), [FULL], "speculated"),
        (config({}), [FULL, FULL], "2 groups"),
        (config({}), [spec("SlidingWindowSpec")], "SlidingWindowSpec"),
        (config({}), [spec("FullAttentionSpec", sliding_window=64)], "attend to a part"),
        (
            config({}),
            [spec("UniformTypeKVCacheSpecs", kv_cache_specs={"a": FULL, "b": spec("MambaSpec")})],
            "MambaSpec",
        ),
    ],
)
def test_models_and_engines_whose_blocks_are_not_kept(vllm_config: Any, specs: list[Any], why: str) -> None:
    assert why in (why_not_stored(vllm_config, groups(*specs)) or "")
    assert why_not_stored(config({}), groups(FULL)) is None


def test_a_store_is_asked_for_by_its_name_and_size() -> None:
    assert StoreChoice.of(config({"pool": "p"})) is None
    said = StoreChoice.of(config({"store": "s", "store_blocks": 10, "run_dir": "/r", "store_salt": "v1"}))
    assert said == StoreChoice(name="s", num_blocks=10, run_dir="/r", salt="v1")


@pytest.mark.parametrize(
    "extra",
    [
        {"store_blocks": 10},
        {"store": "s"},
        {"store": "", "store_blocks": 10},
        {"store": "s", "store_blocks": 1},
        {"store": "s", "store_blocks": True},
        {"store": "s", "store_blocks": "many"},
        {"store": "s", "store_blocks": 10, "store_salt": 5},
    ],
)
def test_a_store_that_cannot_be_is_refused(extra: dict[str, Any]) -> None:
    with pytest.raises(SpecInvalid, match="kv_connector_extra_config"):
        StoreChoice.of(config(extra))


def test_other_weights_have_another_salt(tmp_path: Path) -> None:
    chosen = choice("/r", "s")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    local = config({}, model=str(tmp_path))
    salts = [
        weights_salt(config({}), "0.32.0", chosen),
        weights_salt(config({}), "0.32.1", chosen),
        weights_salt(config({}), "0.32.0", replace(chosen, salt="step 2")),
        weights_salt(local, "0.32.0", chosen),
    ]
    assert weights_salt(local, "0.32.0", chosen) == salts[-1]
    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    salts.append(weights_salt(local, "0.32.0", chosen))
    assert len(set(salts)) == 5
