"""A cache in kvpage blocks generates what the stock cache of transformers does, to the last bit of every logit."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV32Config, DynamicCache

import kvpage
from kvpage.errors import Conflict, NotSupported, OutOfBlocks, SpecInvalid, StaleHandle, WorkerLost
from kvpage.integrations.transformers import KvpageCache, ModelPool, plan_request
from kvpage.pages.block_lease import BlockLease
from support.checkout import ROOT
from support.markdown import page
from support.tiny_models import (
    CONFIGS,
    NEW_TOKENS,
    STATEFUL,
    counted_tokens,
    generate,
    held_blocks,
    poisoned_pool,
    prompts,
    same,
    tiny_model,
)

DTYPES = (torch.float32, torch.bfloat16)
STRATEGIES = ("unify", "slab", "nested", "scale_then_pad")
RUNS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "short": ((5,), {}),
    "long": ((53,), {}),
    "padded": ((37, 26, 7), {}),
    "sampled": ((37, 26), {"do_sample": True, "top_k": 20}),
    "in parts": ((50, 50), {"prefill_chunk_size": 24}),
}
"""Lengths of the prompts of a batch, and how it is generated."""


@cache
def stock(model: Any, run: str) -> Any:
    lengths, options = RUNS[run]
    return generate(model, prompts(*lengths), **options)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_token_and_logit_is_that_of_the_stock_cache(
    name: str, dtype: torch.dtype, strategy: str, run: str, seed: int
) -> None:
    model, (lengths, options) = tiny_model(name, dtype), RUNS[run]
    with poisoned_pool(model, strategy=strategy, seed=seed) as pool:
        with KvpageCache.local(model, pool) as cache:
            assert same(generate(model, prompts(*lengths), cache=cache, **options), stock(model, run))
            assert cache.get_seq_length() == max(lengths) + NEW_TOKENS - 1
        assert held_blocks(pool) == 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CONFIGS)
def test_beams_share_their_blocks_and_find_what_the_stock_cache_finds(name: str) -> None:
    model, inputs, beams = (
        tiny_model(name),
        prompts(37),
        {"num_beams": 3, "output_logits": False, "output_scores": True},
    )
    expected = generate(model, inputs, **beams)
    with poisoned_pool(model) as pool:
        with KvpageCache.local(model, pool) as cache:
            found = generate(model, inputs, cache=cache, **beams)
            assert sum(cache.num_held()) > held_blocks(pool)
        assert held_blocks(pool) == 0
    assert torch.equal(found.sequences, expected.sequences)
    assert torch.equal(found.sequences_scores, expected.sequences_scores)


def test_the_check_of_tokens_and_logits_sees_a_block_that_was_changed() -> None:
    model, inputs = tiny_model("llama"), prompts(40)
    first = generate(model, inputs, max_new_tokens=1)
    more = {"input_ids": first.sequences, "attention_mask": torch.ones_like(first.sequences)}
    outcomes = []
    for damage in (0.0, 1.0):
        with poisoned_pool(model) as pool, KvpageCache.local(model, pool) as cache:
            generate(model, inputs, cache=cache, max_new_tokens=1)
            block = int(cache.blocks(0)[0, 0])
            pool.tensors[next(iter(pool.plan.layers))][0][block] += damage
            outcomes.append(generate(model, more, cache=cache))
    own = DynamicCache(config=model.config)
    generate(model, inputs, cache=own, max_new_tokens=1)
    expected = generate(model, more, cache=own)
    assert [same(outcome, expected) for outcome in outcomes] == [True, False]


@pytest.mark.parametrize("name", ["llama", "mimo"])
def test_keys_and_values_lie_where_the_plan_says(name: str) -> None:
    model, length = tiny_model(name), 60
    own: Any = DynamicCache(config=model.config)
    model(**prompts(length), cache=own)
    with poisoned_pool(model, strategy="unify") as pool, KvpageCache.local(model, pool) as cache:
        model(**prompts(length), cache=cache)
        tables = [cache.blocks(layer)[0].tolist() for layer in range(len(own))]
        assert any(table != sorted(table) for table in tables)
        for layer, planned, table in zip(own.layers, pool.plan.layers.values(), tables, strict=True):
            tensor, keys, values = pool.tensors[planned.name][0], layer.keys[0], layer.values[0]
            first = length - keys.shape[1]
            for token in range(first, length):
                block, place = divmod(token, planned.block_size)
                row = tensor[table[block]].select(-3, place)  # ([2,] heads, width)
                expected = keys[:, token - first], values[:, token - first]
                joined = row.shape[-1] != keys.shape[-1]
                assert torch.equal(row, torch.cat(expected, -1) if joined else torch.stack(expected))


@pytest.mark.parametrize("name", ["gemma3", "llama4"])
def test_what_no_coming_token_looks_at_is_given_back(name: str) -> None:
    model = tiny_model(name)
    with poisoned_pool(model) as pool, KvpageCache.local(model, pool) as cache:
        generate(model, prompts(120), cache=cache)
        tables = [cache.blocks(layer)[0] for layer in range(3)]
        windows = [int((table > 0).sum()) for table, bounded in zip(tables, cache.is_sliding, strict=True) if bounded]
        assert windows == [2, 2] or windows == [3, 3]
        assert [
            int((table > 0).sum()) for table, bounded in zip(tables, cache.is_sliding, strict=True) if not bounded
        ] == [9]


@pytest.mark.parametrize("name", ["llama", "gemma3", "mimo"])
def test_drafted_tokens_that_were_rejected_leave_no_trace(name: str) -> None:
    model = tiny_model(name)
    once = prompts(9)["input_ids"]
    inputs = {"input_ids": once.repeat(1, 4), "attention_mask": torch.ones(1, 36, dtype=torch.long)}
    expected = generate(model, inputs, prompt_lookup_num_tokens=4)
    with poisoned_pool(model) as pool, KvpageCache.local(model, pool) as cache, counted_tokens(model) as counts:
        found = generate(model, inputs, prompt_lookup_num_tokens=4, cache=cache)
        assert cache.get_seq_length() < sum(counts)
    assert same(found, expected)


def test_tokens_that_are_cropped_are_computed_again_to_the_same() -> None:
    model, inputs = tiny_model("gemma3"), prompts(37)
    ids = inputs["input_ids"]
    with poisoned_pool(model) as pool, KvpageCache.local(model, pool) as cache:
        model(input_ids=ids[:, :30], cache=cache)
        first = model(input_ids=ids[:, 30:], cache=cache).logits
        cache.crop(-7)
        assert cache.get_seq_length() == 30
        assert torch.equal(model(input_ids=ids[:, 30:], cache=cache).logits, first)
        with pytest.raises(SpecInvalid, match="negative"):
            cache.crop(7)
        model(input_ids=ids, cache=cache)
        with pytest.raises(Conflict, match="given back"):
            cache.crop(-60)


@pytest.mark.parametrize("name", STATEFUL)
def test_recurrent_states_cannot_go_back_and_say_so(name: str) -> None:
    model = tiny_model(name)
    with poisoned_pool(model) as pool, KvpageCache.local(model, pool) as cache:
        model(**prompts(20), cache=cache)
        assert not cache.is_croppable
        with pytest.raises(NotSupported, match="states"):
            cache.crop(-1)


@pytest.mark.parametrize("name", ["gemma3", "falcon_h1"])
def test_a_second_turn_goes_on_where_the_first_ended(name: str) -> None:
    model, inputs = tiny_model(name), prompts(21, 21)

    def two_turns(cache: Any) -> Any:
        said = generate(model, inputs, cache=cache).sequences
        more = torch.cat([said, inputs["input_ids"][:, :6]], dim=1)
        return generate(model, {"input_ids": more, "attention_mask": torch.ones_like(more)}, cache=cache)

    with poisoned_pool(model) as pool, KvpageCache.local(model, pool) as cache:
        assert same(two_turns(cache), two_turns(DynamicCache(config=model.config)))


def test_rows_can_be_chosen_and_repeated() -> None:
    model, inputs = tiny_model("qwen3_next"), prompts(20, 20)
    ids = inputs["input_ids"]
    with poisoned_pool(model) as pool, KvpageCache.local(model, pool) as cache:
        model(input_ids=ids, cache=cache)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([3, 0, 1]))
        again = model(input_ids=ids[[1, 0, 0], :4], cache=cache).logits
        own = DynamicCache(config=model.config)
        model(input_ids=ids[[1, 0, 0]], cache=own)
        torch.testing.assert_close(again, model(input_ids=ids[[1, 0, 0], :4], cache=own).logits)
        with pytest.raises(SpecInvalid, match="no row 3"):
            cache.batch_select_indices(torch.tensor([3]))


# --- prefixes ---------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_prefix_that_is_cached_is_not_computed_again(name: str) -> None:
    model, inputs = tiny_model(name), prompts(53)
    in_parts = {"prefill_chunk_size": 32} if name in STATEFUL else {}
    expected = generate(model, inputs, **in_parts)
    with poisoned_pool(model) as pool:
        with KvpageCache.local(model, pool) as cache:
            assert cache.take_prefix(inputs["input_ids"]) == 0
            generate(model, inputs, cache=cache, **in_parts)
        with KvpageCache.local(model, pool) as cache, counted_tokens(model) as counts:
            prefix = cache.take_prefix(inputs["input_ids"])
            again = generate(model, inputs, cache=cache)
        assert prefix == (32 if in_parts else 48)
        assert counts == [53 - prefix] + [1] * (NEW_TOKENS - 1)
        assert torch.equal(again.sequences, expected.sequences)
        assert held_blocks(pool) == 0


def test_a_batch_begins_with_what_all_of_it_have_cached() -> None:
    model, inputs = tiny_model("gemma3"), prompts(53, 53)
    ids = inputs["input_ids"]
    with poisoned_pool(model) as pool:
        for row, length in ((0, 53), (1, 40)):
            with KvpageCache.local(model, pool) as cache:
                model(input_ids=ids[row : row + 1, :length], cache=cache)
        with KvpageCache.local(model, pool) as cache, counted_tokens(model) as counts:
            assert cache.take_prefix(ids) == 32
            assert torch.equal(generate(model, inputs, cache=cache).sequences, generate(model, inputs).sequences)
            assert counts[0] == 53 - 32
            cache.reset()
            assert cache.take_prefix([*ids.tolist(), [1] * 40]) == 0


def test_the_answer_is_found_in_the_next_prompt() -> None:
    model, inputs = tiny_model("llama"), prompts(30)
    with poisoned_pool(model) as pool:
        with KvpageCache.local(model, pool) as cache:
            said = generate(model, inputs, cache=cache).sequences
        with KvpageCache.local(model, pool) as cache:
            assert cache.take_prefix(torch.cat([said, inputs["input_ids"]], dim=1)) == 48


def positions(inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {"position_ids": torch.arange(100, 140)[None]}


def embeddings(inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {"input_ids": None, "inputs_embeds": tiny_model("llama").get_input_embeddings()(inputs["input_ids"])}


def padding(inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    mask = torch.ones_like(inputs["input_ids"])
    mask[:, :3] = 0
    return {"attention_mask": mask}


@pytest.mark.parametrize("change", [positions, embeddings, padding])
def test_what_tokens_do_not_determine_nobody_finds(change: Any) -> None:
    model, inputs = tiny_model("llama"), prompts(40)
    with poisoned_pool(model) as pool, torch.no_grad():
        with KvpageCache.local(model, pool) as cache:
            model(**inputs | change(inputs), cache=cache)
        with KvpageCache.local(model, pool) as cache:
            assert cache.take_prefix(inputs["input_ids"]) == 0
            model(**inputs, cache=cache)
        with KvpageCache.local(model, pool) as cache:
            assert cache.take_prefix(inputs["input_ids"]) == 32


def test_other_weights_have_a_salt_of_their_own() -> None:
    model, inputs = tiny_model("llama"), prompts(40)
    with poisoned_pool(model) as pool:
        found = []
        for salt in (b"", b"adapter", b"adapter"):
            with KvpageCache.local(model, pool, salt=salt) as cache:
                found.append(cache.take_prefix(inputs["input_ids"]))
                model(**inputs, cache=cache)
    assert found == [0, 0, 32]


def test_another_prompt_than_the_one_whose_prefix_was_taken_is_refused() -> None:
    model, inputs = tiny_model("llama"), prompts(40)
    with poisoned_pool(model) as pool, KvpageCache.local(model, pool) as cache:
        model(**inputs, cache=cache)
        with pytest.raises(Conflict, match="reset"):
            cache.take_prefix(inputs["input_ids"])
        cache.reset()
        assert cache.take_prefix(inputs["input_ids"]) == 32
        other = inputs["input_ids"].clone()
        other[0, 39] += 1
        with pytest.raises(SpecInvalid, match="same prompts"):
            generate(model, inputs | {"input_ids": other}, cache=cache)


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gemma3", "qwen3_next"])
def test_without_blocks_in_the_middle_generation_ends_and_nothing_is_held(name: str) -> None:
    model, inputs = tiny_model(name), prompts(30, 30)
    with poisoned_pool(model, strategy="unify") as pool:
        with pool.lease("another") as other:
            group = max(
                range(len(pool.plan.groups)), key=lambda group: pool.plan.groups[group].kind == "full_attention"
            )
            free = pool.blocks.blocks.available(group)
            other.allocate(group, free - 12)
            with pytest.raises(OutOfBlocks), KvpageCache.local(model, pool) as cache:
                generate(model, inputs, cache=cache, max_new_tokens=100)
            assert held_blocks(pool) == free - 12
        assert held_blocks(pool) == 0
        with KvpageCache.local(model, pool) as cache:
            assert same(generate(model, inputs, cache=cache), generate(model, inputs))


def test_after_a_forward_pass_that_failed_the_cache_must_be_reset() -> None:
    model, inputs = tiny_model("llama"), prompts(20)

    def fail(*_: Any) -> None:
        raise RuntimeError("as if memory ran out")

    with poisoned_pool(model) as pool, KvpageCache.local(model, pool) as cache:
        hook = model.model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="as if"):
            model(**inputs, cache=cache)
        hook.remove()
        with pytest.raises(Conflict, match="reset"):
            model(**inputs, cache=cache)
        cache.reset()
        assert held_blocks(pool) == 0
        assert same(generate(model, inputs, cache=cache), generate(model, inputs))


def test_inner_models_are_served_too_but_nobody_finds_what_they_computed() -> None:
    """Without the hooks nothing says which tokens these are."""
    model, inputs = tiny_model("llama"), prompts(40)
    with poisoned_pool(model) as pool, KvpageCache.local(model, pool) as cache:
        found = model.model(**inputs, cache=cache).last_hidden_state
        assert torch.equal(found, model.model(**inputs).last_hidden_state)
        cache.reset()
        assert cache.take_prefix(inputs["input_ids"]) == 0


def test_a_batch_of_another_size_is_refused() -> None:
    model = tiny_model("llama")
    with poisoned_pool(model) as pool, KvpageCache.local(model, pool) as cache:
        model(**prompts(20, 20), cache=cache)
        with pytest.raises(SpecInvalid, match="2 sequences, not 1"):
            model(**prompts(1), cache=cache)


def test_a_closed_cache_is_of_no_use_and_has_left_the_model() -> None:
    model, inputs = tiny_model("llama"), prompts(20)
    before = len(model._forward_hooks), len(model._forward_pre_hooks)
    with poisoned_pool(model) as pool:
        with KvpageCache.local(model, pool) as cache:
            model(**inputs, cache=cache)
        cache.close()
        assert (len(model._forward_hooks), len(model._forward_pre_hooks)) == before
        for use in (cache.reset, lambda: cache.take_prefix([[1]]), lambda: model(**inputs, cache=cache)):
            with pytest.raises(StaleHandle, match="closed"):
                use()


def test_a_cache_whose_lease_fails_lets_go_of_the_model_and_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    before = len(model._forward_hooks)
    with poisoned_pool(model) as pool:
        cache = KvpageCache.local(model, pool)
        model(**prompts(20), cache=cache)
        with monkeypatch.context() as broken:
            broken.setattr(BlockLease, "free", lambda *_: (_ for _ in ()).throw(WorkerLost("as if it had died")))
            with pytest.raises(WorkerLost):
                cache.close()
        assert len(model._forward_hooks) == before
        assert held_blocks(pool) == 0
        with pytest.raises(StaleHandle):
            _ = cache.tensors


def test_a_pool_of_another_model_or_dtype_is_refused() -> None:
    llama, half = tiny_model("llama"), tiny_model("llama", torch.bfloat16)
    with poisoned_pool(tiny_model("gemma3")) as pool, pytest.raises(SpecInvalid, match="plan_request"):
        KvpageCache.local(llama, pool)
    with poisoned_pool(llama) as pool:
        with pytest.raises(SpecInvalid, match="bfloat16"):
            KvpageCache.local(half, pool)
        assert held_blocks(pool) == 0
    wider = type(llama)(type(llama.config)(**llama.config.to_dict() | {"num_key_value_heads": 4}))
    with poisoned_pool(llama) as pool, KvpageCache.local(wider, pool) as cache:
        with pytest.raises(SpecInvalid, match="4"):
            wider(**prompts(5), cache=cache)


def test_layers_that_cannot_be_kept_are_refused_when_planned() -> None:
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "vocab_size": 32, "hidden_size": 32, "first_k_dense_replace": 2}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(DeepseekV32Config(**sizes))
    with pytest.raises(NotSupported, match="indexed_attention"):
        plan_request(model, num_blocks=10)


def test_a_request_is_of_the_dtype_and_the_states_of_the_model() -> None:
    request = plan_request(tiny_model("qwen3_next", torch.bfloat16), num_blocks=100, max_model_len=64)
    net, attention = request["layers"][0], request["layers"][2]
    assert (net["shapes"], net["dtypes"]) == ([[96, 4], [4, 16, 8]], ["bfloat16", "float32"])
    assert attention["dtype"] == "bfloat16"
    assert request["align_hybrid"]


def test_a_pool_of_this_process_is_planned_as_one_of_a_service() -> None:
    model = tiny_model("gemma4")
    with ModelPool.of(model, num_blocks=20, strategy="unify") as pool:
        assert pool.plan.plan_id == kvpage.plan(plan_request(model, num_blocks=20, strategy="unify")).plan_id
        assert [layer.decision for layer in pool.plan.layers.values()] == ["pad", "keep", "pad", "share"]


def test_its_document_runs() -> None:
    code = "\n".join(fence.text for fence in page(ROOT / "docs/transformers.md").fences if fence.info == "python")
    assert code.count("assert ") == 3
    exec(compile(code, "docs/transformers.md", "exec"), {})
