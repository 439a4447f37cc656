"""Shapes of recurrent states, as vLLM 0.24.0 keeps them (`MambaStateShapeCalculator`), for one rank.

A convolution keeps the last inputs: [kernel - 1 (+ speculative tokens), channels], time outermost.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpage.models.config import Config
from kvpage.models.reading import Reading

Shapes = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2:
    """Sizes of a Mamba-2 mixer over all ranks."""

    num_heads: int
    head_size: int
    num_groups: int
    state_size: int
    kernel: int


def mamba2(reading: Reading, sizes: Mamba2, *, heads_field: str, groups_field: str, kernel_field: str) -> Shapes:
    """A single group is kept by every rank; several must be a multiple of the ranks, as in vLLM."""
    config, tp = reading.config, reading.tp
    heads = reading.split(config, heads_field, sizes.num_heads)
    groups = sizes.num_groups
    if groups % tp:
        if groups > 1:
            raise reading.ranks_fault(config, groups_field, f"is {groups}, no multiple of them; use fewer ranks")
        groups = tp
    channels = sizes.num_heads * sizes.head_size + 2 * groups * sizes.state_size
    return (
        (_rows(reading, config, kernel_field, sizes.kernel), reading.split(config, heads_field, channels)),
        (heads, sizes.head_size, sizes.state_size),
    )


def mamba1(reading: Reading, *, channels: int, state_size: int, kernel: int, field: str) -> Shapes:
    """`channels` over all ranks. There is no room for speculative tokens."""
    mine = reading.split(reading.config, field, channels)
    return (kernel - 1, mine), (mine, state_size)


def short_convolution(reading: Reading, channels_field: str, kernel_field: str) -> tuple[tuple[int, ...]]:
    """LFM2: the inputs of a convolution and nothing else. There is no room for speculative tokens."""
    config = reading.config
    kernel = _checked_kernel(config, kernel_field, config.size(kernel_field))
    return ((kernel - 1, reading.split(config, channels_field, config.size(channels_field))),)


def gated_delta_net(reading: Reading, config: Config) -> Shapes:
    """Qwen3-Next and Qwen3.5: the recurrent state is [value heads, value width, key width]."""
    key_heads, key_size = config.size("linear_num_key_heads"), config.size("linear_key_head_dim")
    value_heads, value_size = config.size("linear_num_value_heads"), config.size("linear_value_head_dim")
    reading.split(config, "linear_num_key_heads", key_heads)
    mine = reading.split(config, "linear_num_value_heads", value_heads)
    channels = 2 * key_heads * key_size + value_heads * value_size
    rows = _rows(reading, config, "linear_conv_kernel_dim", config.size("linear_conv_kernel_dim"))
    return (rows, channels // reading.tp), (mine, value_size, key_size)


def kimi_delta(reading: Reading, config: Config) -> Shapes:
    """Kimi Linear: q, k and v of one width share a convolution. There is no room for speculative tokens."""
    heads, size = config.size("num_heads"), config.size("head_dim")
    kernel = _checked_kernel(config, "short_conv_kernel_size", config.size("short_conv_kernel_size"))
    mine = reading.split(config, "num_heads", heads)
    return (kernel - 1, 3 * mine * size), (mine, size, size)


def _rows(reading: Reading, config: Config, field: str, kernel: int) -> int:
    return _checked_kernel(config, field, kernel) - 1 + reading.options.num_speculative_tokens


def _checked_kernel(config: Config, field: str, kernel: int) -> int:
    if kernel < 2:
        raise config.fault(field, f"a convolution of {kernel} step keeps no state; at least 2 are expected")
    return kernel
