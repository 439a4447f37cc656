"""Layers of a cache: what transformers asks of one, answered from blocks."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from kvpage.client.paging import Pages, kv_pages
from kvpage.errors import NotSupported, SpecInvalid
from kvpage.integrations.transformers.batch import Batch
from kvpage.plans import LayerPlan


class Attention(CacheLayerMixin):
    """Keys and values of one layer."""

    is_croppable = True
    supports_early_init = False

    def __init__(self, batch: Batch, layer: LayerPlan, tensor: torch.Tensor, window: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        assert layer.group is not None
        self._batch, self._kv_layer, self._kv, self.group = batch, layer, tensor, layer.group
        self.name = layer.name
        """Of the layer in the plan."""
        self._pages: tuple[Pages, Pages] | None = None
        self._window = window
        self.is_sliding = window is not None
        self.length = 0
        """Tokens that are written."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """What a key and a value is in a page, which the plan alone does not say of latent rows."""
        if key_states.dtype != self._kv.dtype or key_states.device.type != self._kv.device.type:
            raise SpecInvalid(
                f"layer {self._kv_layer.name!r} is planned in {self._kv.dtype} on {self._kv.device.type}, and the "
                f"model computes in {key_states.dtype} on {key_states.device.type}; plan with plan_request(model)"
            )
        self._pages = kv_pages(self._kv_layer, self._kv, key_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write these keys and values, and gather all that the step's queries may look at."""
        if self._pages is None:
            self.lazy_initialization(key_states, value_states)
        assert self._pages is not None
        keys, values = self._pages
        size, _, count, _ = key_states.shape
        self._batch.step(size, self.length, count)
        table, end = self._batch.table(self.group), self.length + count
        slots = keys.slots(table, self.length, end)
        keys.write(slots, key_states)
        values.write(slots, value_states)
        start = self._offset()
        self.length = end
        return self._visible(keys, table, start, end), self._visible(values, table, start, end)

    def _visible(self, pages: Pages, table: torch.Tensor, start: int, end: int) -> torch.Tensor:
        found = pages.gather(table, start, end)
        missing = self._batch.first_held(self.group) - start
        if missing > 0:  # of chunks before this one: masked, but a mask does not hide what is no number
            found[:, :, :missing] = 0
        return found

    def _offset(self) -> int:
        """The first token that the next queries may look at."""
        return 0 if self._window is None else max(self.length - self._window + 1, 0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        offset = self._offset()
        return self.length - offset + query_length, offset

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1 if self._window is None else self._window

    def go_to(self, num_tokens: int) -> None:
        """The sequences have so many tokens from now on."""
        self.length = num_tokens

    def settle(self) -> None:
        """Nothing is held back."""


class States(LinearAttentionCacheLayerMixin):
    """The inputs of a convolution and a recurrent state of one layer.

    Models change both in place. A single sequence's are views of its block; of several, which lie anywhere, they are
    gathered for a forward pass and written back after it (`settle`).
    """

    is_croppable = False  # a property there
    is_compileable = False

    def __init__(self, batch: Batch, layer: LayerPlan, tensors: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        assert layer.group is not None
        self._batch, self._state_layer, self._states, self._state_group = batch, layer, tensors, layer.group
        self._gathered: dict[int, torch.Tensor] = {}

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """There is nothing to make: the plan has made it."""

    def state(self, index: int) -> torch.Tensor:
        """0: of the convolution; 1: the recurrent one. To be changed in place."""
        blocks = self._batch.table(self._state_group)[:, 0]
        tensor = self._states[index]
        if len(blocks) == 1:
            block = int(blocks[0])
            return tensor[block : block + 1]
        if index not in self._gathered:
            self._gathered[index] = tensor.index_select(0, blocks)
        return self._gathered[index]

    def settle(self) -> None:
        """What was gathered goes back to the blocks."""
        for index, gathered in self._gathered.items():
            self._states[index][self._batch.table(self._state_group)[:, 0]] = gathered
        self._gathered.clear()

    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """Keep the last inputs, and give these with what was there before."""
        self._batch.step_if_new(conv_states.shape[0], conv_states.shape[-1])
        kept = self.state(0)
        self._check(conv_states[..., :1], kept[..., :1])
        kernel = kept.shape[-1]
        if self.has_previous_state[state_idx]:
            full = torch.cat([kept, conv_states], dim=-1)
        else:
            full = torch.nn.functional.pad(conv_states, (max(0, kernel - conv_states.shape[-1]), 0))
        kept.copy_(full[..., -kernel:].detach())
        self.has_previous_state[state_idx] = True
        return full

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        kept = self.state(1)
        self._check(recurrent_states, kept)
        kept.copy_(recurrent_states.detach())
        return kept

    def _check(self, given: torch.Tensor, kept: torch.Tensor) -> None:
        if given.shape != kept.shape or given.dtype != kept.dtype:
            raise SpecInvalid(
                f"the state of layer {self._state_layer.name!r} has shape {tuple(given.shape)} and {given.dtype}, and "
                f"is planned with shape {tuple(kept.shape)} and {kept.dtype}; plan with plan_request(model)"
            )

    def get_conv_state(self) -> torch.Tensor | None:
        return self.state(0) if self.has_previous_state[0] else None

    def get_recurrent_state(self) -> torch.Tensor | None:
        return self.state(1) if self.has_previous_state[0] and len(self._states) > 1 else None

    def activate_past_recording(self) -> None:
        """The past is not recorded: `is_croppable` says so."""

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise NotSupported("recurrent states cannot go back to fewer tokens")

    def go_to(self, num_tokens: int) -> None:
        """As of `Attention`."""
        self._gathered.clear()
        self.has_previous_state = dict.fromkeys(self.has_previous_state, num_tokens > 0)


class AttentionAndStates(States, Attention):
    """A layer that has both, side by side."""

    def __init__(
        self,
        batch: Batch,
        attention: tuple[LayerPlan, torch.Tensor, int | None],
        states: tuple[LayerPlan, tuple[torch.Tensor, ...]],
    ) -> None:
        Attention.__init__(self, batch, *attention)
        States.__init__(self, batch, *states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        Attention.lazy_initialization(self, *args, **kwargs)

    def get_max_length(self) -> int:
        return Attention.get_max_length(self)

    def go_to(self, num_tokens: int) -> None:
        Attention.go_to(self, num_tokens)
        States.go_to(self, num_tokens)
