"""A cache of transformers over the blocks of a kvpage pool.

    with KvpageCache.open(model, pool="chat") as cache:      # a pool that other processes have too
        cache.take_prefix(input_ids)                         # what anybody has computed of it already
        model.generate(input_ids, cache=cache)

Closing gives all blocks back, however `generate` ended.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, Self, TypeAlias

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DummyLayer

from kvpage.client.attachment import Tensors
from kvpage.client.connection import attach
from kvpage.client.finding import DEFAULT_TIMEOUT_S, program_name
from kvpage.client.leasing import open_lease
from kvpage.errors import Conflict, NotFound, SpecInvalid, StaleHandle, shorten
from kvpage.integrations.transformers.batch import Batch
from kvpage.integrations.transformers.forward import coming_tokens, is_forward_of
from kvpage.integrations.transformers.layers import Attention, AttentionAndStates, States
from kvpage.integrations.transformers.pool import ModelPool
from kvpage.integrations.transformers.request import CachedLayer, cached_layers, dtype_name, kept_layers
from kvpage.pages.leased_sequences import Lease
from kvpage.plans import LayerPlan, Plan

Layer: TypeAlias = Attention | States | AttentionAndStates | DummyLayer


class KvpageCache(Cache):
    """For one batch at a time; `reset` makes it fit for the next. One thread at a time.

    The model tells it, by hooks that `close` removes, which tokens it computes: whole blocks of them are kept for
    others. What tokens do not determine (padded rows, images, embeddings, positions of one's own) nobody finds.
    """

    def __init__(
        self, model: PreTrainedModel, plan: Plan, tensors: Tensors, lease: Lease, *, salt: bytes = b"", **options: Any
    ) -> None:
        """`tensors` and `lease`: of a pool by `plan`. `salt`: what tells these weights from others whose keys the pool
        keeps too. `options`: those given to `plan_request` that say what a layer keeps (`tp`).

        Raises `NotFound`, `SpecInvalid` where the plan is not one of this model.
        """
        self.plan = plan
        self._tensors: Tensors | None = tensors
        self._batch = Batch(plan, lease, self._copy, tensors.buffer.device, salt)
        self._owned = ExitStack()
        self._is_running = False
        text = model.config.get_text_config(decoder=True)
        kept = {layer["name"]: layer for layer in kept_layers(text, dtype_name(model), **options).layers}
        check_plan(plan, kept)
        super().__init__(layers=[self._layer(layer) for layer in cached_layers(text, list(kept.values()))])
        self._owned.callback(model.register_forward_pre_hook(self._before, with_kwargs=True).remove)
        self._owned.callback(model.register_forward_hook(self._after, with_kwargs=True).remove)

    @classmethod
    def open(
        cls,
        model: PreTrainedModel,
        pool: str,
        *,
        name: str | None = None,
        tenant: str = "",
        salt: bytes = b"",
        device: str | None = None,
        run_dir: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        **options: Any,
    ) -> Self:
        """Over a pool of a running service. `name`: of the lease; None: one that nobody else has. Raises as
        `kvpage.attach`, `kvpage.open_lease` and the constructor."""
        where: dict[str, Any] = {"device": device, "run_dir": run_dir, "timeout_s": timeout_s}
        name = f"{program_name()[:64]}-{os.getpid()}-{secrets.token_hex(4)}" if name is None else name
        with ExitStack() as owned:
            kv = owned.enter_context(attach(pool, **where))
            lease = owned.enter_context(open_lease(pool, name=name, tenant=tenant, clear=kv.clear, **where))
            cache = cls(model, kv.plan, kv.tensors, lease, salt=salt, **options)
            cache._owned.push(owned.pop_all())
        return cache

    @classmethod
    def local(cls, model: PreTrainedModel, pool: ModelPool, **options: Any) -> Self:
        """Over a pool of this process."""
        with ExitStack() as owned:
            lease = owned.enter_context(pool.lease(f"cache-{secrets.token_hex(4)}"))
            cache = cls(model, pool.plan, pool.tensors, lease, **options)
            cache._owned.push(owned.pop_all())
        return cache

    @property
    def tensors(self) -> Tensors:
        """All layers' in the pool. Raises `StaleHandle` once closed."""
        if self._tensors is None:
            raise StaleHandle("the cache is closed; open another")
        return self._tensors

    def _layer(self, layer: CachedLayer) -> Layer:
        attention = states = None
        if layer.attention is not None:
            attention = self.plan.layers[layer.attention], self.tensors[layer.attention][0], layer.window
        if layer.state is not None:
            states = self.plan.layers[layer.state], self.tensors[layer.state]
        if attention and states:
            return AttentionAndStates(self._batch, attention, states)
        if attention:
            return Attention(self._batch, *attention)
        return States(self._batch, *states) if states else DummyLayer()

    def __repr__(self) -> str:
        rows, tokens = self._batch.size, self._batch.num_tokens
        return f"<KvpageCache: {rows} rows of {tokens} tokens, blocks {list(self._batch.num_held())}>"

    def _copy(self, copies: Any) -> None:
        for group, source, target in copies:
            self.tensors.copy(self.plan, group, source, target)

    # --- what a model tells -------------------------------------------------------------------------------------------

    def _before(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not is_forward_of(self, args, kwargs):
            return
        if self._is_running:
            raise Conflict("the forward pass before this one has failed and left half of a step; reset the cache")
        self._is_running = True
        self._batch.coming = coming_tokens(args, kwargs, self._batch.num_tokens)

    def _after(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if is_forward_of(self, args, kwargs):
            self._is_running = False
            self._settle()
            self._batch.finish()

    def _settle(self) -> None:
        for layer in self.layers:
            if isinstance(layer, States):
                layer.settle()

    # --- what transformers asks ---------------------------------------------------------------------------------------

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._batch.check_open()
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        self._batch.check_open()
        layer = self.layers[layer_idx]
        return layer.get_conv_state() if isinstance(layer, States) else super().get_conv_state(layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        layer = self.layers[layer_idx]
        if isinstance(layer, States):
            return layer.get_recurrent_state()
        return super().get_recurrent_state(layer_idx, state_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, by a negative number as in transformers. Raises `NotSupported` for recurrent states,
        `Conflict` where a window has given back what is looked at again."""
        if tokens_to_remove > 0:
            raise SpecInvalid(f"crop({tokens_to_remove}): give the tokens to remove as a negative number")
        if tokens_to_remove:
            self._go_to(max(0, self._batch.num_tokens + tokens_to_remove))

    def _go_to(self, num_tokens: int) -> None:
        self._batch.truncate(num_tokens)
        self._tell_layers()

    def _tell_layers(self) -> None:
        for layer in self.layers:
            if isinstance(layer, Attention | States):
                layer.go_to(self._batch.num_tokens)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Rows of a beam search share the blocks of what they have in common."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select([row for row in range(self._batch.size) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        rows = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
        self._select(rows.tolist())

    def _select(self, rows: list[int]) -> None:
        self._settle()
        self._batch.select(rows)

    # --- what is ours -------------------------------------------------------------------------------------------------

    def take_prefix(self, input_ids: torch.Tensor | list[list[int]]) -> int:
        """Begin with the longest prefix of these prompts that the pool has, and say how many tokens it has; `generate`
        then computes only the rest. Several prompts begin with as many tokens as all of them have. Prompts without
        padding only: what was computed beside padding is kept for nobody.

        Raises `Conflict` in the middle of a batch.
        """
        prompts = input_ids.tolist() if isinstance(input_ids, torch.Tensor) else input_ids
        found = self._batch.take_prefix(prompts)
        self._tell_layers()
        return found

    def blocks(self, layer_idx: int) -> torch.Tensor:
        """The block table of a layer with attention, [rows, blocks]; 0 where a block was given back."""
        layer = self.layers[layer_idx]
        if not isinstance(layer, Attention):
            raise SpecInvalid(f"layer {layer_idx} is a {type(layer).__name__}, which has no block table")
        return self._batch.table(layer.group)

    def num_held(self) -> tuple[int, ...]:
        """By group of the plan: blocks."""
        return self._batch.num_held()

    def reset(self) -> None:
        """Give all blocks back; the cache is empty, and fit for another batch."""
        self._is_running = False
        self._batch.reset()
        self._tell_layers()

    def close(self) -> None:
        """Give everything back. May be called twice."""
        try:
            self._batch.close()
        finally:  # whatever has become of the worker
            self.layers.clear()
            self._tensors = None  # else the memory stays mapped
            self._owned.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_plan(plan: Plan, kept: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises `NotFound` for a layer that the plan lacks, `SpecInvalid` for one that it keeps otherwise."""
    for name, layer in kept.items():
        planned = plan.layers.get(name)
        if planned is None:
            raise NotFound(f"the pool has no layer {shorten(name)!r}; plan it with plan_request(model)")
        wanted = tuple(layer.get("dtypes") or [layer["dtype"]])
        _check_layer(planned, layer["kind"], wanted)


def _check_layer(planned: LayerPlan, kind: str, dtypes: tuple[str, ...]) -> None:
    given = tuple(view.dtype for view in planned.tensors)
    if planned.kind != kind or given != dtypes:
        raise SpecInvalid(
            f"the pool keeps layer {shorten(planned.name)!r} as {planned.kind} in {', '.join(given)}, and the model as "
            f"{kind} in {', '.join(dtypes)}; plan it with plan_request(model)"
        )
