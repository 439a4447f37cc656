"""Plans of whole models over real memory: every layer's tensors keep what was written through them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import kvpage
from kvpage.client.views import BufferViews, PlannedViews
from kvpage.models import read_model
from models.public_configs import config

MODELS: list[tuple[str, dict[str, Any]]] = [
    ("llama-3.1-8b", {"tp": 8}),
    ("qwen3-next-80b-a3b", {"tp": 4, "ssm_dtype": "float32"}),
    ("gemma-4-26b-a4b", {}),
    ("gemma-3n-e4b", {}),
    ("gpt-oss-120b", {}),
    ("mimo-v2-flash", {"draft": config("qwen3-0.6b", num_hidden_layers=5)}),
    ("deepseek-v3.2", {"kv_dtype": "fp8"}),
    ("deepseek-v4-flash", {}),
    ("kimi-linear-48b", {"tp": 4}),
    ("nemotron-h-8b", {"tp": 8}),
    ("jamba-1.5-mini", {}),
    ("minimax-m3-like", {}),
]


@pytest.mark.parametrize(("name", "options"), MODELS, ids=[row[0] for row in MODELS])
def test_every_tensor_keeps_what_was_written_into_its_block(name: str, options: dict[str, Any]) -> None:
    """Group g owns block g + 1. Each tensor gets a number of its own there; all are written, then all are read."""
    model = read_model(config(name), **options)
    layers = {"layers": list(model.layers), "strategy": "unify", "align_hybrid": model.is_hybrid}
    num_groups = len(kvpage.plan(layers | {"num_blocks": 2}).groups)
    plan = kvpage.plan(layers | {"num_blocks": num_groups + 1})
    buffer = BufferViews(torch.zeros(plan.buffer_size_bytes, dtype=torch.uint8))
    for number, block in enumerate(blocks(plan, buffer)):
        block.fill_(number % 199 + 1)
    for number, block in enumerate(blocks(plan, buffer)):
        assert torch.all(block == number % 199 + 1)


def blocks(plan: kvpage.Plan, buffer: BufferViews) -> Iterator[torch.Tensor]:
    """The part of each tensor that is its group's block. All backends here have the block axis first."""
    views = PlannedViews(plan).by_layer
    for index, group in enumerate(plan.groups):
        owners = [layer for layer in group.layers if plan.layers[layer].decision != "share"]
        for layer in owners:
            for view in views[layer]:
                tensor = buffer.tensor(view)
                parts = tensor.shape[0] // plan.num_blocks  # kernel blocks of a block
                yield tensor[(index + 1) * parts : (index + 2) * parts]


def test_layers_that_share_have_the_tensors_of_their_owner() -> None:
    model = read_model(config("gemma-3n-e4b"))
    plan = kvpage.plan({"layers": list(model.layers), "strategy": "unify", "num_blocks": 4})
    views = {name: [view.offset_bytes for view in layer.tensors] for name, layer in plan.layers.items()}
    for layer in model.layers:
        owner = str(layer.get("kv_sharing_target", layer["name"]))
        assert views[layer["name"]] == views[owner]
    assert len(views) == 35
    assert len({tuple(offsets) for offsets in views.values()}) == 4  # 4 full and 16 windows: five groups of four
