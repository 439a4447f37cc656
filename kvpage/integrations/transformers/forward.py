"""What the call of a model's forward pass says of the tokens that it computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kvpage.integrations.transformers.batch import Coming

_CACHE = ("cache", "past_key_values")
_ASIDE = frozenset(
    {"input_ids", "attention_mask", "position_ids", "use_cache", "return_dict", "logits_to_keep", "labels"}
    | {"output_attentions", "output_hidden_states", "output_router_logits", *_CACHE}
)
"""Arguments that change no key, or of which `coming_tokens` looks at the value."""


def is_forward_of(cache: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a model's forward pass was called with this cache."""
    return any(kwargs.get(name) is cache for name in _CACHE) or any(value is cache for value in args)


def coming_tokens(args: tuple[Any, ...], kwargs: Mapping[str, Any], past: int) -> Coming | None:
    """The tokens after `past` others; None where they are not given as ids by keyword."""
    tokens = kwargs.get("input_ids")
    if args or not isinstance(tokens, torch.Tensor) or tokens.dim() != 2:
        return None
    size, count = tokens.shape
    is_plain = all(value is None or name in _ASIDE for name, value in kwargs.items())
    is_shared = torch.full((size,), is_plain, device=tokens.device)
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if mask is not None:
        is_shared &= _all_seen(mask, size, past + count)
    if positions is not None:
        is_shared &= _in_order(positions, size, past, count)
    return Coming(tokens.tolist(), is_shared.tolist())


def _all_seen(mask: Any, size: int, num_tokens: int) -> torch.Tensor:
    """By row: whether no token so far is padding. Masks of other forms say nothing that is understood here."""
    if not isinstance(mask, torch.Tensor) or mask.shape != (size, num_tokens):
        return torch.tensor(False)
    return mask.bool().all(dim=-1)


def _in_order(positions: Any, size: int, past: int, count: int) -> torch.Tensor:
    """By row: whether token i has position i."""
    if not isinstance(positions, torch.Tensor) or positions.shape not in ((size, count), (1, count)):
        return torch.tensor(False)
    return (positions == torch.arange(past, past + count, device=positions.device)).all(dim=-1)
