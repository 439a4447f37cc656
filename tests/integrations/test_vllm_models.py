"""Every public config's layers have the pages of vLLM's classes, and are the same when they come back from them."""

from __future__ import annotations

from typing import Any

import pytest

from integrations import vllm_0_24 as old
from integrations.spec_of import spec_of
from kvpage.integrations.vllm import layers_from_specs
from kvpage.models import read_model
from models.public_configs import CONFIGS, config

LAYOUT = ("backend", "kernel_block_sizes", "kv_sharing_target", "draft")


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("name", CONFIGS)
def test_layers_of_a_model_come_back_from_vllms_specs(name: str, kv_dtype: str) -> None:
    layers = {layer["name"]: layer for layer in read_model(config(name), kv_dtype=kv_dtype).layers}
    specs = {name: spec_of(layer, old, old.Dtype) for name, layer in layers.items()}
    came_back = layers_from_specs(specs)
    assert [layer["name"] for layer in came_back] == list(layers)
    for layer in came_back:
        assert without_layout(layer) == without_layout({"block_size": 64, "num_kv_heads": 1} | layers[layer["name"]])


def without_layout(layer: dict[str, Any]) -> dict[str, Any]:
    kept = {field: value for field, value in layer.items() if field not in LAYOUT}
    if layer["kind"] == "mamba":
        kept.pop("num_kv_heads", None)
    return kept
