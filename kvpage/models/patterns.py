"""Which layers of a model see a window, by `layer_types` or by the rule of the model's published config class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from kvpage.models.config import MAX_MODEL_LAYERS, MAX_TOKENS, Config

LayerType = Literal["full", "sliding", "chunked", "linear"]
FULL: LayerType = "full"
SLIDING: LayerType = "sliding"
Rule = Callable[[Config, int], tuple[LayerType, ...]]

LAYER_TYPES: dict[str, LayerType] = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "linear",
}


def layer_types(config: Config, num_layers: int, otherwise: Rule) -> tuple[LayerType, ...]:
    """One for each layer. `otherwise` decides where the config has no `layer_types`."""
    written = config.choices("layer_types", LAYER_TYPES, num_layers)
    return otherwise(config, num_layers) if written is None else written


def window(config: Config) -> int | None:
    """`sliding_window`; None where it is null or 0, which both say that there is none."""
    return config.optional_size("sliding_window", limit=MAX_TOKENS, least=0) or None


def all_alike(config: Config, num_layers: int) -> tuple[LayerType, ...]:
    """A `sliding_window` holds for every layer (vLLM 0.24.0, where a model has no `layer_types`)."""
    return (SLIDING if window(config) else FULL,) * num_layers


def when_used(config: Config, num_layers: int) -> tuple[LayerType, ...]:
    """Qwen: only with `use_sliding_window`, and then from layer `max_window_layers` on."""
    if not config.flag("use_sliding_window"):
        return (FULL,) * num_layers
    first = config.optional_size("max_window_layers", limit=MAX_MODEL_LAYERS, least=0) or 0
    first = first if window(config) else num_layers
    return (FULL,) * min(first, num_layers) + (SLIDING,) * (num_layers - first)


def every(period: int) -> Rule:
    """Each `period`-th layer is full, unless the config has a `sliding_window_pattern` that says otherwise."""

    def rule(config: Config, num_layers: int) -> tuple[LayerType, ...]:
        step = config.optional_size("sliding_window_pattern", limit=MAX_MODEL_LAYERS) or period
        return tuple(FULL if (index + 1) % step == 0 else SLIDING for index in range(num_layers))

    return rule
