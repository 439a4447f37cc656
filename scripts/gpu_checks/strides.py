"""What a wide block stride costs a kernel that reads pages through a block table, as the attention of a decode step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from gpu_checks.gpu import Gpu
from gpu_checks.layouts import (
    ITEM_BYTES,
    KIB,
    MAX_EXTENT_BYTES,
    NUM_KV_HEADS,
    NUM_SEQUENCES,
    PASS_BYTES,
    Layout,
    layouts,
)
from gpu_checks.tensors import bytes_of, torch_on
from gpu_checks.trial import Failed, Trial, expect, percentile
from gpu_checks.views import captured
from kvpage.memory.cuda import CudaVmmMemory

TABLE = "Reading pages by block stride"
NUM_REPEATS = 25
NUM_WARM_UP = 3
_TOLERANCE = 1e-2  # of bfloat16 results; other pages give results as far apart as they are large
NUM_QUERY_HEADS = 4 * NUM_KV_HEADS

Read: TypeAlias = Callable[[Any], Any]
"""Reads all pages of one layer, given as a view, and returns a tensor made of everything it read."""

Reader: TypeAlias = Callable[["Scene", Layout], Read]
"""Prepares for one layout. Raises ValueError when it cannot read pages of that size."""


class Scene:
    """Memory of kvpage's with a strided layout at its beginning and its dense twin behind it, and what reads them."""

    def __init__(self, torch: Any, memory: Any, strided_bytes: int = MAX_EXTENT_BYTES) -> None:
        """`memory`: uint8; its first `strided_bytes` are for the strided layouts, the others for their dense twins."""
        self.torch = torch
        elements = memory.view(torch.bfloat16)
        self._strided, self._dense = elements[: strided_bytes // ITEM_BYTES], elements[strided_bytes // ITEM_BYTES :]
        elements.normal_()

    def views(self, layout: Layout) -> list[Any]:
        """Of a strided layout."""
        return layout.views(self._strided)

    def dense_views(self, layout: Layout) -> list[Any]:
        """Of its dense twin, with the same values."""
        dense = layout.dense().views(self._dense)
        for to, source in zip(dense, self.views(layout), strict=True):
            to.copy_(source)
        return dense

    def block_table(self, layout: Layout) -> Any:
        """A permutation of all blocks, int64, a row for each sequence."""
        generator = self.torch.Generator(device="cpu").manual_seed(layout.num_blocks)
        order = self.torch.randperm(layout.num_blocks, generator=generator)
        return order.view(NUM_SEQUENCES, -1).to(self._dense.device)

    def query(self, layout: Layout) -> Any:
        """One token of each sequence: (sequences, query heads, 1, elements)."""
        shape = (NUM_SEQUENCES, NUM_QUERY_HEADS, 1, layout.head_size)
        return self.torch.randn(shape, device=self._dense.device, dtype=self.torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Of passes over all layers, in microseconds."""

    strided_us: list[float]
    dense_us: list[float]


def sweep(trial: Trial) -> None:
    """Gathering blocks and torch's attention over them; and pages read in place by a kernel of Triton's."""
    gpu = Gpu(trial.device_uuid)
    torch = torch_on(gpu.uuid)
    readers: dict[str, Reader] = {"gather, SDPA": gather_and_attend}
    try:
        from gpu_checks.direct import read_in_place
    except ImportError as error:
        trial.saw(f"no kernel that reads pages in place: {error}")
    else:
        readers["Triton, in place"] = read_in_place
    compare(trial, gpu, torch, readers)


def compare(trial: Trial, gpu: Gpu, torch: Any, readers: dict[str, Reader]) -> None:
    """A row for every reader and layout. Raises `Failed` when a reader reads other values through other strides."""
    with CudaVmmMemory(gpu.uuid).create(MAX_EXTENT_BYTES + PASS_BYTES) as chunk, chunk.map() as mapping:
        scene = Scene(torch, bytes_of(mapping))
        for how, reader in readers.items():
            ratios, refusals = [], Counter[str]()
            for layout in layouts():
                try:
                    times = measure(scene, layout, reader(scene, layout))
                except Failed:
                    raise
                except Exception as error:  # noqa: BLE001 - of this layout; the others are measured all the same
                    refusals[first_line(error)] += 1
                else:
                    ratios.append(_tell(trial, how, layout, times))
            for refusal, num_layouts in refusals.items():
                trial.saw(f"{how}, {num_layouts} layouts: {refusal}")
            expect(bool(ratios), f"{how} could read no layout")
            trial.saw(f"{how}: {min(ratios):.2f} to {max(ratios):.2f} times the dense layout's time")
        del scene


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def gather_and_attend(scene: Scene, layout: Layout) -> Read:
    torch = scene.torch
    table, query = scene.block_table(layout).flatten(), scene.query(layout)
    shape = (NUM_SEQUENCES, -1, NUM_KV_HEADS, layout.head_size)

    def read(view: Any) -> Any:
        keys, values = (view[:, part][table].view(shape).transpose(1, 2) for part in (0, 1))
        return torch.nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)

    return read


def measure(scene: Scene, layout: Layout, read: Read) -> Times:
    """Passes over the strided and the dense layout in turn, so that whatever drifts is the same for both."""
    torch = scene.torch
    dense, strided = scene.dense_views(layout), scene.views(layout)
    for one, other in zip(dense, strided, strict=True):
        expect(same(read(one), read(other)), f"{layout}: other values than in the dense layout")
    passes = [captured(torch, lambda views=views: [read(view) for view in views]) for views in (strided, dense)]
    times: tuple[list[float], list[float]] = ([], [])
    for repeat in range(NUM_WARM_UP + NUM_REPEATS):
        for (graph, _), times_us in zip(passes, times, strict=True):
            took_us = _timed_us(torch, graph)
            if repeat >= NUM_WARM_UP:
                times_us.append(took_us)
    del passes, graph
    torch.cuda.empty_cache()  # each graph had memory of its own
    return Times(strided_us=times[0], dense_us=times[1])


def same(one: Any, other: Any) -> bool:
    """Integers exactly, floats up to what another order of additions changes."""
    if not one.is_floating_point():
        return bool((one == other).all())
    return bool((one.float() - other.float()).norm() <= _TOLERANCE * other.float().norm())


def _timed_us(torch: Any, graph: Any) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1000


def _tell(trial: Trial, how: str, layout: Layout, times: Times) -> float:
    """The ratio."""
    strided_us, dense_us = percentile(times.strided_us, 50), percentile(times.dense_us, 50)
    ratio = strided_us / dense_us
    trial.row(
        TABLE,
        how=how,
        layout=layout.name,
        block_stride_KiB=layout.block_stride_bytes // KIB,
        page_KiB=layout.page_bytes // KIB,
        blocks=layout.num_blocks,
        layers=layout.num_layers,
        ns_per_cached_token=round(strided_us * 1000 / layout.num_tokens, 3),
        dense_ns=round(dense_us * 1000 / layout.num_tokens, 3),
        ratio_to_dense=round(ratio, 3),
        spread_percent=spread_percent(times.strided_us),
        dense_spread_percent=spread_percent(times.dense_us),
        n=len(times.strided_us),
    )
    return ratio


def spread_percent(times_us: list[float]) -> float:
    """From the 10th to the 90th percentile, of the median."""
    return round((percentile(times_us, 90) - percentile(times_us, 10)) / percentile(times_us, 50) * 100, 1)
