"""What an engine without shared slabs could do at best: a pool for each kind of growth, split by the true mean."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import islice

from kvpage.simulation.layout import Growth, SimulatedGroups, SimulatedLayout, SimulatedPool
from kvpage.simulation.streams import RequestLengths, Stream

POOLS = "pools"
_SAMPLED_REQUESTS = 2_000
_SAMPLED_STEPS = 32  # of one request, evenly over its life


def pools_layout(layout: SimulatedLayout, stream: Stream, seed: int, *, block_size: int = 16) -> SimulatedLayout:
    """The tokens and states of `layout` in separate pools, one for each growth, all layers of it side by side.

    The memory is split by the mean bytes that the running requests of the stream need of each. No engine can know that
    before; here it is estimated from 2,000 requests of the stream, at up to 32 moments of the life of each.
    """
    bytes_per_token: dict[Growth, Fraction] = {}
    for group in layout.groups:
        growth = replace(group.growth, block_size=1 if group.growth.kind == "state" else block_size)
        bytes_per_token[growth] = bytes_per_token.get(growth, Fraction(0)) + group.bytes_per_token
    block_bytes = {growth: int(each * growth.block_size) for growth, each in bytes_per_token.items()}
    means = dict(_mean_blocks(list(block_bytes), stream.make(seed)))
    total = sum(means[growth] * size for growth, size in block_bytes.items())
    return SimulatedLayout(
        name=POOLS,
        memory_bytes=layout.memory_bytes,
        pools=tuple(
            SimulatedPool(slabs=int(layout.memory_bytes * means[growth] / total), slab_bytes=size)
            for growth, size in block_bytes.items()
        ),
        groups=tuple(
            SimulatedGroups(count=1, growth=growth, blocks_per_slab=1, bytes_per_token=each, pool=index)
            for index, (growth, each) in enumerate(bytes_per_token.items())
        ),
    )


def _mean_blocks(growths: list[Growth], requests: Iterator[RequestLengths]) -> Iterator[tuple[Growth, Fraction]]:
    """Blocks that a running request holds, on average over the steps of all requests."""
    sample = list(islice(requests, _SAMPLED_REQUESTS))
    steps = sum(lengths.output_tokens for lengths in sample)
    for growth in growths:
        yield growth, sum((_blocks_times_steps(growth, lengths) for lengths in sample), Fraction(0)) / steps


def _blocks_times_steps(growth: Growth, lengths: RequestLengths) -> Fraction:
    moments = min(lengths.output_tokens, _SAMPLED_STEPS)
    done = ((2 * i + 1) * lengths.output_tokens // (2 * moments) for i in range(moments))
    blocks = sum(growth.blocks(lengths.prompt_tokens + 1 + tokens) for tokens in done)
    return Fraction(blocks * lengths.output_tokens, moments)
