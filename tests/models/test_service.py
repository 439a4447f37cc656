"""A model named over HTTP, with a real server and worker: planned, made a pool, mapped and written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kvpage
from kvpage.errors import NotSupported, SpecInvalid
from models.public_configs import config
from support.api_service import ApiService


def request(**model: Any) -> dict[str, Any]:
    entry = {"config": config("gemma-3n-e4b")} | model
    return {"strategy": "unify", "memory_bytes": 8 << 20, "max_model_len": 512, "model": entry}


def test_a_pool_is_made_of_a_model_and_its_tensors_are_mapped(no_leaks: None, run_dir: Path) -> None:
    with ApiService(run_dir, "--memory", "64MiB") as service, service.client() as client:
        plan = client.plan(request(tp=2))
        assert plan == kvpage.plan(request(tp=2))
        pool = client.create_pool(request(tp=2), name="gemma", plan_id=plan.plan_id)
        owner, reader = (f"language_model.model.layers.{index}.self_attn.attn" for index in (19, 34))
        with kvpage.attach("gemma", run_dir=str(run_dir)) as kv:
            kv.tensor(owner)[1].fill_(3)
            assert bool((kv.tensor(reader)[1] == 3).all())  # layer 34 reads the cache of layer 19
        client.delete_pool(pool.id, wait_s=10)


@pytest.mark.parametrize(
    ("model", "error", "pointer"),
    [
        ({"config": {"model_type": "gpt5"}}, NotSupported, "/model/config/model_type"),
        ({"config": config("llama-3.1-8b", num_hidden_layers=0)}, SpecInvalid, "/model/config/num_hidden_layers"),
        ({"draft": {"model_type": "llama", "head_dim": "wide"}}, SpecInvalid, "/model/draft/head_dim"),
        ({"tp": 7}, SpecInvalid, "/model/tp"),
    ],
)
def test_faults_come_back_with_their_place(service: ApiService, model: Any, error: Any, pointer: str) -> None:
    with service.client() as client, pytest.raises(error) as caught:
        client.plan(request(**model))
    assert [fault.pointer for fault in caught.value.errors] == [pointer]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with ApiService(tmp_path_factory.mktemp("run"), "--memory", "64MiB") as running:
        yield running
