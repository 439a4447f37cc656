"""Layouts and request lengths at random, small enough for the naive replay."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import strategies as st

from kvpage.simulation.layout import Growth, GrowthKind, SimulatedGroups, SimulatedLayout, SimulatedPool
from kvpage.simulation.streams import RequestLengths

SLAB_BYTES = 840  # 2^3 × 3 × 5 × 7: many block sizes divide it


@st.composite
def growths(draw: st.DrawFn) -> Growth:
    kind: GrowthKind = draw(st.sampled_from(["full", "window", "chunk", "state"]))
    if kind == "state":
        return Growth(kind="state", block_size=1)
    reach = draw(st.integers(1, 12)) if kind in ("window", "chunk") else 0
    return Growth(kind=kind, block_size=draw(st.integers(1, 6)), reach=reach)


@st.composite
def layouts(draw: st.DrawFn, pools: int = 2) -> SimulatedLayout:
    slabs = [draw(st.integers(1, 40)) for _ in range(draw(st.integers(1, pools)))]
    groups = []
    for index in range(draw(st.integers(len(slabs), 3))):
        growth, count, blocks = draw(growths()), draw(st.integers(1, 2)), draw(st.integers(1, 5))
        most = SLAB_BYTES // (blocks * growth.block_size)  # live bytes never exceed the block's
        groups.append(
            SimulatedGroups(
                count=count,
                growth=growth,
                blocks_per_slab=blocks,
                bytes_per_token=Fraction(count * draw(st.integers(1, most))),
                pool=index % len(slabs),
            )
        )
    return SimulatedLayout(
        name="random",
        memory_bytes=sum(slabs) * SLAB_BYTES,
        pools=tuple(SimulatedPool(slabs=number, slab_bytes=SLAB_BYTES) for number in slabs),
        groups=tuple(groups),
    )


request_lengths = st.lists(st.builds(RequestLengths, st.integers(1, 30), st.integers(1, 20)), min_size=1, max_size=8)
