"""A second opinion on the searches: what a plan holds of a workload, and the best layout there is, by trying them all.

Plain dicts and loops over every request length; nothing imported from kvpage. `held_over_live` reads a finished plan
and the request it was made of. `best_slab` and `best_nested` try every slab size, every way to deal layers out to
groups and every block size that kernels name, for models of a few layers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from planner import layouts
from planner.one_layer import ceil_div, data_bytes, expand, is_state, page_multiple, state_bytes
from planner.oracle import life
from planner.rows import is_latent, row_bytes

Json = dict[str, Any]

ALIGNMENT_BYTES = 128  # of a block's stride in slabs
FINE_SHARE = 256  # slabs that a pool has at least before they are counted one by one
LEAST_BLOCK_TOKENS = 16
GROUP_PRICE = 1e-5  # of a nested layout, in held over live


# --- requests and what they need ------------------------------------------------------------------


def lengths_of(workload: Iterable[Json]) -> Iterator[tuple[int, float]]:
    """(tokens, share) of every request."""
    parts = [(range_of(part), part["weight"]) for part in workload]
    total = sum(weight for _, weight in parts)
    for lengths, weight in parts:
        for tokens in lengths:
            yield tokens, weight / total / len(lengths)


def range_of(part: Json) -> range:
    if part.get("tokens") is not None:
        return range(part["tokens"], part["tokens"] + 1)
    return range(part["min_tokens"], part["max_tokens"] + 1)


def live_bytes(layers: Iterable[Json], request: Json, tokens: int) -> float:
    """Bytes whose content one request of `tokens` tokens needs."""
    return sum(needed_bytes(layer, request, tokens) for layer in layers)


def needed_bytes(layer: Json, request: Json, tokens: int) -> float:
    if is_state(layer):
        return float(sum(state_bytes(layer)) * (1 + layer["num_speculative_blocks"]))
    token: float = data_bytes(layer) / layer["block_size"]
    if layer["kind"] == "cross_attention":
        return float(token * request["max_num_encoder_input_tokens"])
    window = window_of(layer)
    return float(token * (tokens if window is None else min(tokens, window)))


def window_of(layer: Json) -> int | None:
    """Tokens after which the layer frees the oldest; a full layer with a window keeps them all."""
    if layer["kind"] in ("sliding_window", "sliding_window_mla"):
        return int(layer["sliding_window"])
    return int(layer["attention_chunk_size"]) if layer["kind"] == "chunked_local_attention" else None


def blocks_held(layer: Json, block_size: int, request: Json, tokens: int) -> int:
    """Blocks of `block_size` tokens that one request holds once its prompt is done."""
    if is_state(layer):
        return int(1 + layer["num_speculative_blocks"])
    if layer["kind"] == "cross_attention":
        return ceil_div(request["max_num_encoder_input_tokens"], block_size)
    window = window_of(layer)
    if window is None or tokens <= window:
        return ceil_div(tokens, block_size)
    return ceil_div(window - 1, block_size) + 1


def owners(request: Json) -> list[Json]:
    """Layers with a cache of their own."""
    return [
        layer
        for layer in expand(request)
        if layer["kind"] != "encoder_only_attention" and layer["kv_sharing_target"] is None
    ]


# --- a finished plan ------------------------------------------------------------------------------


def held_over_live(plan: Any, request: Json, workload: Iterable[Json]) -> float:
    """Mean over `workload` of (bytes held / bytes needed), from the groups of the plan alone."""
    layers = {layer["name"]: layer for layer in owners(request)}
    groups = []
    for group in plan.groups:
        owned, rest = divmod(plan.slab_bytes, group.blocks_per_slab)
        assert rest == 0
        groups.append((owned, group.block_size, layers[group.layers[0]]))
    mean = 0.0
    for tokens, share in lengths_of(workload):
        held = sum(owned * blocks_held(layer, size, request, tokens) for owned, size, layer in groups)
        mean += share * held / live_bytes(layers.values(), request, tokens)
    return charged(mean, plan.slab_bytes, [group.blocks_per_slab for group in plan.groups], request, plan)


def charged(mean: float, slab: int, blocks_per_slab: Iterable[int], request: Json, plan: Any = None) -> float:
    """`mean` with what the pool wastes beside: the null slab, the rest, slabs that kernels do not reach, half a slab
    for each group that cuts slabs."""
    pool: int | None = request.get("memory_bytes")
    if pool is None:
        return mean
    slabs = pool // slab
    usable = slabs if plan is None else plan.num_blocks
    idle = sum(slab / pool / 2 for blocks in blocks_per_slab if blocks > 1)
    if usable == slabs >= FINE_SHARE:
        return mean + idle
    return math.inf if usable < 2 else float(mean * pool / ((usable - 1) * slab) + idle)


# --- every layout of a few layers -----------------------------------------------------------------


class Deal(NamedTuple):
    """A bucket in groups: for each block size the bytes of the widest group's block."""

    num_groups: int
    bytes_of: dict[int, int]
    held: dict[int, float]
    """Blocks that the workload holds of one group, each over the bytes its request needs."""
    is_growing: bool
    is_dense: bool
    """Kernels know no stride of blocks, so a block is a layer's page and fills the slab."""
    step: int

    def fits(self, size: int, slab: int) -> bool:
        return self.bytes_of[size] == slab if self.is_dense else self.bytes_of[size] <= slab


class Best(NamedTuple):
    cost: float
    slab: int
    deals: tuple[tuple[int, int, int], ...]
    """(groups, block size, blocks in a slab) of each bucket."""


def best_slab(request: Json, most_slab: int) -> Best | None:
    """The least held over live of all layouts in which a slab is one block."""
    found: Best | None = None
    for buckets in bucketings(owners(request)):
        choices = [list(deals(bucket, request)) for bucket in buckets]
        step = math.lcm(ALIGNMENT_BYTES, *(deal.step for of in choices for deal in of))
        for slab in range(step, min(most_slab, request.get("max_block_stride_bytes", most_slab)) + 1, step):
            offers = [
                [(deal, size) for deal in of for size in deal.bytes_of if deal.fits(size, slab)] for of in choices
            ]
            least = sum(min((d.num_groups * d.held[size] for d, size in of), default=math.inf) for of in offers)
            if slab * least > (math.inf if found is None else found.cost):
                continue
            for chosen in itertools.product(*offers):
                if not within_bounds(chosen, slab, request):
                    continue
                mean = slab * sum(deal.num_groups * deal.held[size] for deal, size in chosen)
                cost = charged(mean, slab, (), request)
                if found is None or cost < found.cost - 1e-12:
                    found = Best(cost, slab, tuple((deal.num_groups, size, 1) for deal, size in chosen))
    return found


def best_nested(request: Json, most_slab: int) -> Best | None:
    """The least held over live, the price of groups included, of all layouts that cut slabs into smallest blocks."""
    found: Best | None = None
    for buckets in bucketings(owners(request)):
        choices = [list(deals(bucket, request)) for bucket in buckets]
        for slab in range(ALIGNMENT_BYTES, most_slab + 1, ALIGNMENT_BYTES):
            offers = [[one for deal in of for one in cuts(deal, slab, request)] for of in choices]
            least = sum(
                min((slab // q * d.num_groups * d.held[size] for d, size, q in of), default=math.inf) for of in offers
            )
            if least > (math.inf if found is None else found.cost):
                continue
            for chosen in itertools.product(*offers):
                groups = sum(deal.num_groups for deal, _, _ in chosen)
                if groups > request["max_groups"]:
                    continue
                cost = GROUP_PRICE * groups + sum(
                    slab // count * deal.num_groups * deal.held[size] for deal, size, count in chosen
                )
                if found is None or cost < found.cost - 1e-12:
                    found = Best(cost, slab, tuple((deal.num_groups, size, count) for deal, size, count in chosen))
    return found


def cuts(deal: Deal, slab: int, request: Json) -> Iterator[tuple[Deal, int, int]]:
    """The most blocks that fit, of the smallest size; fewer only cost more."""
    size = min(deal.bytes_of)
    step = math.lcm(ALIGNMENT_BYTES, deal.step)
    for count in range(slab // max(1, deal.bytes_of[size]), 0, -1):
        if slab % (count * step) == 0 and deal.fits(size, slab // count):
            if slab // count <= request.get("max_block_stride_bytes", slab):
                yield deal, size, count
            return


def within_bounds(chosen: tuple[tuple[Deal, int], ...], slab: int, request: Json) -> bool:
    groups = sum(deal.num_groups for deal, _ in chosen)
    common = math.lcm(*(size for deal, size in chosen if deal.is_growing))
    return bool(
        groups <= request["max_groups"]
        and common <= request["max_block_lcm"]
        and groups * slab <= request.get("max_one_token_bytes", groups * slab)
    )


def bucketings(layers: list[Json]) -> Iterator[list[list[Json]]]:
    """Layers of one life together, and each such set split by what its layers are."""
    lives: dict[Any, list[Json]] = {}
    for layer in layers:
        lives.setdefault(life(layer), []).append(layer)
    ways = []
    for members in lives.values():
        sorts: dict[Any, list[Json]] = {}
        for layer in members:
            sorts.setdefault(sort_of(layer), []).append(layer)
        ways.append([[members], list(sorts.values())] if len(sorts) > 1 else [[members]])
    for chosen in itertools.product(*ways):
        yield [bucket for way in chosen for bucket in way]


def sort_of(layer: Json) -> str:
    return repr({key: value for key, value in layer.items() if key != "name"})


def deals(layers: list[Json], request: Json) -> Iterator[Deal]:
    """Every number of groups, each with the narrowest widest group, by trying all ways to hand the layers out."""
    sizes = block_sizes(layers, request["max_block_size"])
    requests = list(lengths_of(request["workload"]))
    everything = owners(request)
    live = {tokens: live_bytes(everything, request, tokens) for tokens, _ in requests}
    held = {
        size: sum(share * blocks_held(layers[0], size, request, tokens) / live[tokens] for tokens, share in requests)
        for size in sizes
    }
    step = math.lcm(*(math.lcm(page_multiple(layer), row_step(layer)) for layer in layers))
    is_dense = not all(strides(layer, sizes[0]) for layer in layers)
    for num_groups in range(len(layers) if is_dense else 1, len(layers) + 1):
        widest = {size: narrowest(layers, size, num_groups) for size in sizes}
        yield Deal(num_groups, widest, held, not is_state(layers[0]), is_dense, step)


def strides(layer: Json, size: int) -> bool:
    """Whether blocks may be farther apart than their data is long."""
    if is_state(layer):
        return True
    wide = math.lcm(page_multiple(layer), row_step(layer)) * (1 + data_bytes(layer))
    return layouts.reads_pages_of(layer | {"block_size": size}, wide)


def row_step(layer: Json) -> int:
    """Kernels of a named layout count latent rows from the first page on."""
    return row_bytes(layer, layer["head_size"]) if layer["layout"]["named"] and is_latent(layer) else 1


def block_sizes(layers: list[Json], most: int) -> list[int]:
    """What all kernels read as one block, from 16 tokens on."""
    if is_state(layers[0]):
        return [layers[0]["block_size"]]
    return [
        size
        for size in range(LEAST_BLOCK_TOKENS, most + 1)
        if all(size % layer["compress_ratio"] == 0 and is_read_as_one(layer, size) for layer in layers)
    ]


def is_read_as_one(layer: Json, size: int) -> bool:
    rows, sizes = size // layer["compress_ratio"], layer["layout"]["kernel_block_sizes"]
    return not sizes or any(
        rows % one["multiple_of"] == 0 and rows <= one.get("max", rows) if isinstance(one, dict) else rows == one
        for one in sizes
    )


def narrowest(layers: list[Json], size: int, num_groups: int) -> int:
    """Bytes of the widest group's block, at best. Layers of a sort are side by side, the sorts in a fixed order."""
    sorts: dict[Any, list[Json]] = {}
    for layer in layers:
        sorts.setdefault(sort_of(layer), []).append(layer)
    samples = [of[0] | ({} if is_state(of[0]) else {"block_size": size}) for of in sorts.values()]
    pages = [data_bytes(layer) + -data_bytes(layer) % page_multiple(layer) for layer in samples]
    aligned = [page_multiple(layer) for layer in samples]
    counts = [len(of) for of in sorts.values()]
    return min(max(end_of(share, pages, aligned) for share in way) for way in hands(counts, num_groups))


def end_of(share: tuple[int, ...], pages: list[int], aligned: list[int]) -> int:
    end = 0
    for count, page, step in zip(share, pages, aligned, strict=True):
        end += (-end % step if count else 0) + count * page
    return end


def hands(counts: list[int], num_groups: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every way to hand so many layers of each sort to groups that cannot be told apart, none of them empty."""
    shares = [share for share in itertools.product(*(range(count + 1) for count in counts)) if any(share)]
    for way in itertools.combinations_with_replacement(shares, num_groups):
        if [sum(column) for column in zip(*way, strict=True)] == counts:
            yield way
