"""What one process has computed, another goes on with: on the same pages, without a copy, or when the first is gone."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest
import torch

import kvpage
from kvpage.client.attachment import Tensors
from kvpage.client.block_resources import GroupBlocks
from kvpage.integrations.transformers import KvpageCache, plan_request
from support import prefill_program
from support.api_service import ApiService
from support.checkout import ROOT
from support.shared_pages import memory_of_pools, page_digest
from support.tiny_models import BLOCK_SIZE, counted_tokens, generate, prompts, tiny_model

_names = itertools.count(1)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiService]:
    run_dir = tmp_path_factory.mktemp("run")
    with ApiService(run_dir) as service:
        yield service


class Prefiller:
    """A process with the model and a pool, that prefills."""

    def __init__(self, model: str, pool: str, run_dir: Path) -> None:
        command = [sys.executable, prefill_program.__file__, model, pool, str(run_dir)]
        environment = os.environ | {"PYTHONPATH": str(ROOT / "tests"), "OMP_NUM_THREADS": "1"}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._child = subprocess.Popen(command, env=environment, **pipes)
        self.memory = self._read()

    def prefill(self, tokens: list[int]) -> Any:
        assert self._child.stdin is not None
        print(json.dumps(tokens), file=self._child.stdin, flush=True)
        return self._read()

    def _read(self) -> Any:
        assert self._child.stdout is not None
        return json.loads(self._child.stdout.readline())

    def kill(self) -> None:
        self._child.kill()
        self._child.wait(60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for pipe in (self._child.stdin, self._child.stdout):
            assert pipe is not None
            pipe.close()


def make_pool(service: ApiService, model: str, strategy: str = "nested") -> str:
    name = f"{model}-{next(_names)}"
    sizes = {"block_size": BLOCK_SIZE, "num_blocks": 100, "max_model_len": 256}
    with service.client() as client:
        client.create_pool(plan_request(tiny_model(model), strategy=strategy, **sizes), device="host", name=name)
    return name


def groups_of(service: ApiService, pool: str) -> list[GroupBlocks]:
    with service.client() as client:
        blocks = client.get_pool(client.find_pool(pool).id).blocks
    assert blocks is not None
    return list(blocks.groups)


def held(service: ApiService, pool: str) -> int:
    """Blocks that somebody holds."""
    return sum(group.used for group in groups_of(service, pool))


def check_goes_on(cache: KvpageCache, model: str, prompt: list[int], prefilled: Any) -> None:
    """`cache` decodes what another process has prefilled; it computes the first token's successor, and no prompt."""
    tokens = torch.tensor([[*prompt, prefilled["token"]]])
    assert cache.take_prefix(tokens) == len(prompt)
    num_blocks = len(prompt) // BLOCK_SIZE
    for layer, table in prefilled["tables"].items():
        own = cache.blocks(int(layer))[0].tolist()
        assert own == [block if kept else 0 for block, kept in zip(table, own, strict=True)]
        if all(own):
            assert page_digest(cache, int(layer), num_blocks) == prefilled["digests"][layer]
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    with counted_tokens(tiny_model(model)) as counts:
        found = generate(tiny_model(model), inputs, cache=cache, max_new_tokens=19)
    assert counts == [1] * 19
    expected = generate(tiny_model(model), prompts(len(prompt)), max_new_tokens=20)
    assert torch.equal(found.sequences, expected.sequences)
    assert all(torch.equal(one, other) for one, other in zip(found.logits, expected.logits[1:], strict=True))


LONG = [pytest.param(name, marks=pytest.mark.long) for name in ("llama", "gemma4", "deepseek")]


@pytest.mark.parametrize("model", ["gemma3", *LONG])
def test_one_process_prefills_and_another_decodes_on_the_same_pages(
    model: str, service: ApiService, no_leaks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same memory, the same blocks, the same bytes, and no page is copied. Then kill -9 of the first: what it has
    computed stays."""
    pool, run_dir = make_pool(service, model), service.run_directory.path
    prompt = prompts(48)["input_ids"][0].tolist()
    with Prefiller(model, pool, run_dir) as prefiller:
        prefilled = prefiller.prefill(prompt)
        assert prefilled["prefix"] == 0
        with KvpageCache.open(tiny_model(model), pool, run_dir=str(run_dir)) as cache:
            assert set(prefiller.memory) & set(memory_of_pools())
            monkeypatch.setattr(Tensors, "copy", None)  # who would copy a page, fails
            check_goes_on(cache, model, prompt, prefilled)
        again = prefiller.prefill(prompt)
        assert again["prefix"] == 32  # a prefiller wants the logits of the last token: its block is computed again
        assert again["token"] == prefilled["token"]
        longer = prompts(64, seed=2)["input_ids"][0].tolist()
        prefilled_later = prefiller.prefill(longer)
        prefiller.kill()
        with KvpageCache.open(tiny_model(model), pool, run_dir=str(run_dir)) as cache:
            tokens = torch.tensor([[*longer, prefilled_later["token"]]])
            assert cache.take_prefix(tokens) == 64
            inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
            found = generate(tiny_model(model), inputs, cache=cache)
            expected = generate(tiny_model(model), prompts(64, seed=2), max_new_tokens=21)
            assert torch.equal(found.sequences, expected.sequences)
    with service.client() as client:
        client.delete_pool(client.find_pool(pool).id, wait_s=60)


@pytest.mark.parametrize("strategy", ["nested", "unify"])
def test_states_are_handed_over_with_the_keys_beside_them(service: ApiService, strategy: str) -> None:
    """A state is the one thing that is copied: whoever goes on from it changes it."""
    name, model = make_pool(service, "qwen3_next", strategy), tiny_model("qwen3_next")
    run_dir, inputs = str(service.run_directory.path), prompts(48)
    with KvpageCache.open(model, name, run_dir=run_dir) as first:
        said = generate(model, inputs, cache=first, max_new_tokens=1)
        with KvpageCache.open(model, name, run_dir=run_dir) as second, counted_tokens(model) as counts:
            assert second.take_prefix(said.sequences) == 48
            assert torch.equal(second.blocks(2), first.blocks(2))
            tokens = {"input_ids": said.sequences, "attention_mask": torch.ones_like(said.sequences)}
            found = generate(model, tokens, cache=second, max_new_tokens=19)
            assert counts == [1] * 19
    assert torch.equal(found.sequences, generate(model, inputs, max_new_tokens=20).sequences)


def test_without_blocks_in_the_pool_generation_ends_and_the_lease_is_gone(service: ApiService) -> None:
    name, model, run_dir = make_pool(service, "llama"), tiny_model("llama"), str(service.run_directory.path)
    with kvpage.open_lease(name, name="greedy", run_dir=run_dir) as lease:
        free = groups_of(service, name)[0].available
        lease.allocate(0, free - 4)
        with pytest.raises(kvpage.errors.OutOfBlocks), KvpageCache.open(model, name, run_dir=run_dir) as cache:
            generate(model, prompts(40), cache=cache, max_new_tokens=100)
        assert held(service, name) == free - 4
    with KvpageCache.open(model, name, run_dir=run_dir) as cache:
        assert torch.equal(generate(model, prompts(40), cache=cache).sequences, generate(model, prompts(40)).sequences)
    assert held(service, name) == 0
