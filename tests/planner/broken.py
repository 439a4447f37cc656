"""Plans with one number changed."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace


def with_view(plan: Any, name: str, position: int = 0, /, **changes: Any) -> Any:
    """The plan with one view changed."""
    layer = plan.layers[name]
    tensors = list(layer.tensors)
    tensors[position] = replace(tensors[position], **changes)
    return replace(plan, layers=plan.layers | {name: replace(layer, tensors=tuple(tensors))})


def with_layer(plan: Any, name: str, /, **changes: Any) -> Any:
    return replace(plan, layers=plan.layers | {name: replace(plan.layers[name], **changes)})


def changed(values: tuple[int, ...], position: int, value: int) -> tuple[int, ...]:
    return (*values[:position], value, *values[position + 1 :])
