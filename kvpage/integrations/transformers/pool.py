"""A pool of this process alone, for a model whose caches no other process is to find."""

from __future__ import annotations

from functools import partial
from typing import Any, Self

import torch
from transformers import PreTrainedModel

import kvpage.planner.planner
from kvpage.client.attachment import Tensors
from kvpage.client.views import BufferViews, PlannedViews
from kvpage.integrations.transformers.request import plan_request
from kvpage.pages.leased_pool import LeasedPool
from kvpage.pages.local_lease import LocalLease
from kvpage.plans import Plan


class ModelPool:
    """Memory and blocks by one plan. One thread at a time."""

    def __init__(self, plan: Plan, device: torch.device | str = "cpu") -> None:
        buffer = torch.zeros(plan.buffer_size_bytes, dtype=torch.uint8, device=device)
        self.plan = plan
        self.tensors = Tensors(PlannedViews(plan), BufferViews(buffer))
        self.blocks = LeasedPool(plan)

    @classmethod
    def of(cls, model: PreTrainedModel, **fields: Any) -> Self:
        """Planned for `model`, on its device. `fields`: as `plan_request` takes them; raises as it does."""
        return cls(kvpage.planner.planner.plan(plan_request(model, **fields)), model.device)

    def lease(self, name: str) -> LocalLease:
        return LocalLease(self.blocks, name, clear=partial(self.tensors.clear, self.plan))

    def close(self) -> None:
        """Caches over it must be closed before."""
        self.blocks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
