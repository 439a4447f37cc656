"""Buckets: layers that need the same token slots for the same time, and what a search may choose for them.

Layers of a bucket share block ids, side by side, whatever their page sizes (co-groups); none is padded against another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import lcm

from kvpage.errors import LayoutUnsupported, SpecInvalid
from kvpage.layers import BackendLayout, Layer
from kvpage.planner.partition import Composition, compositions
from kvpage.specs import LayerSpec, ceil_div

LEAST_BLOCK_SIZE = 16  # tokens; a kernel may take fewer, but every lookup would pay for it
_MOST_TOKENS = 2**20  # of a block that kernels ask for
_MOST_PAGES = 2**13  # sizes times kin that buckets are looked at with; of more, an even choice of sizes
_MOST_BLOCKS = 2**18  # kinds of blocks that ways to deal a bucket out are looked at with; of more, ever wider steps


@dataclass(frozen=True)
class Kin:
    """Layers of one bucket that are alike."""

    layers: tuple[Layer, ...]
    spec: LayerSpec
    """Without padding."""
    backend: BackendLayout | None

    def sized(self, block_size: int) -> LayerSpec:
        """Their spec for blocks of `block_size` tokens."""
        return self.spec.with_block_size(block_size) if self.spec.is_attention else self.spec

    def page_bytes(self, block_size: int) -> int:
        """`sized(block_size).page_size_bytes`: a page's data grows evenly with its rows."""
        spec = self.spec
        if not spec.is_attention:
            return spec.page_size_bytes
        real = spec.real_page_size_bytes * block_size // spec.block_size
        return ceil_div(real, spec.page_alignment) * spec.page_alignment

    @cached_property
    def stride_alignment_bytes(self) -> int:
        """What a block stride must be a multiple of."""
        return stride_alignment(self.spec, self.backend)

    def may_stride(self, block_size: int) -> bool:
        """Whether blocks of `block_size` tokens may be farther apart than their data is long."""
        if self.backend is None:
            return True  # recurrent states: each a tensor of its own
        spec, step = self.sized(block_size), self.stride_alignment_bytes
        return self.backend.can_pad(spec, ceil_div(spec.page_size_bytes, step) * step)


@dataclass(frozen=True)
class Bucket:
    """One life cycle. `block_sizes`: what all its kernels take, ascending; one entry, of no meaning, for states."""

    kin: tuple[Kin, ...]
    block_sizes: tuple[int, ...]
    names: tuple[str, ...]
    """Of all its layers, as the request orders them."""

    @property
    def spec(self) -> LayerSpec:
        """Stands for all where blocks are counted."""
        return self.kin[0].spec

    @property
    def num_layers(self) -> int:
        return len(self.names)

    @cached_property
    def must_be_dense(self) -> bool:
        """Pages must follow each other without a gap, so that a block is a page, and a layer a group."""
        return not all(kin.may_stride(self.block_sizes[0]) for kin in self.kin)

    @cached_property
    def stride_alignment_bytes(self) -> int:
        return lcm(*(kin.stride_alignment_bytes for kin in self.kin))

    @cached_property
    def pages_bytes(self) -> tuple[tuple[int, ...], ...]:
        """The page of each kin, for each block size."""
        return tuple(tuple(kin.page_bytes(size) for kin in self.kin) for size in self.block_sizes)

    def splits(self, most_groups: int) -> tuple[Split, ...]:
        """Ways to deal the layers out, the fewest groups for each width."""
        if most_groups not in self._splits:  # several searches of one request ask
            self._splits[most_groups] = tuple(self._dealt(most_groups))
        return self._splits[most_groups]

    @cached_property
    def _splits(self) -> dict[int, tuple[Split, ...]]:
        return {}

    def _dealt(self, most_groups: int) -> Iterator[Split]:
        counts = tuple(len(kin.layers) for kin in self.kin)
        narrowest = None
        for num_groups in self._group_numbers(most_groups):
            dealt = compositions(counts, self.pages_bytes[0], num_groups)
            distinct = set(dealt)
            sizes = tuple(max(self._block_bytes(pages, one) for one in distinct) for pages in self.pages_bytes)
            if narrowest is None or sizes[0] < narrowest:
                narrowest = sizes[0]
                yield Split(self, dealt, sizes, num_groups)

    def _group_numbers(self, most_groups: int) -> Iterator[int]:
        """Of a bucket without strides only one, even where that is more than `most_groups`."""
        if self.must_be_dense:
            yield self.num_layers
            return
        end = min(most_groups, self.num_layers)
        pages = len(self.kin) * len(self.block_sizes)
        slope = 0 if len(self.kin) * end * end * len(self.block_sizes) <= _MOST_BLOCKS else pages / 2**12
        num_groups = 1
        while num_groups <= end:
            yield num_groups
            num_groups += 1 + int(num_groups * slope / 4)

    def _block_bytes(self, pages: tuple[int, ...], composition: Composition) -> int:
        return self.offsets_bytes(pages, composition)[-1]

    def offsets_bytes(self, pages: tuple[int, ...], composition: Composition) -> tuple[int, ...]:
        """Where the pages of each kin begin in a block, each where its items may; and where the block's data ends."""
        offsets, end = [], 0
        for page, count, kin in zip(pages, composition, self.kin, strict=True):
            end += -end % kin.spec.page_alignment if count else 0
            offsets.append(end)
            end += count * page
        return (*offsets, end)


@dataclass(frozen=True, eq=False)
class Split:
    """A bucket dealt out to groups: what each has, and the bytes of a block of the widest for each block size."""

    bucket: Bucket
    dealt: tuple[Composition, ...]
    sizes_bytes: tuple[int, ...]
    num_groups: int


def stride_alignment(spec: LayerSpec, backend: BackendLayout | None) -> int:
    """Bytes that a block stride must be a multiple of: items, an alignment asked for, rows where kernels count them."""
    return lcm(spec.page_alignment, backend.row_step_bytes(spec) if backend is not None else 1)


def make_buckets(layers: Sequence[Layer], max_block_size: int | None, default_max: int) -> tuple[Bucket, ...]:
    """The life cycles of `layers`, in order of their first layers.

    Block sizes up to `max_block_size`, or up to `default_max` where that is None and kernels take any so small. Raises
    `SpecInvalid` or `LayoutUnsupported` naming the layer.
    """
    members: dict[tuple[object, ...], list[Layer]] = {}
    for layer in layers:
        if layer.spec is not None:
            members.setdefault(layer.spec.lifecycle, []).append(layer)
    most_pages = max(1, _MOST_PAGES // max(1, len(members)))
    return tuple(_bucket(alike, max_block_size, default_max, most_pages) for alike in members.values())


def taken_apart(bucket: Bucket, max_block_size: int | None, default_max: int) -> tuple[Bucket, ...]:
    """A bucket for each kin: block sizes need not be equal then."""
    most_pages = max(1, _MOST_PAGES // len(bucket.kin))
    return tuple(_bucket(kin.layers, max_block_size, default_max, most_pages) for kin in bucket.kin)


def _kin(layers: Sequence[Layer]) -> list[Kin]:
    alike: dict[tuple[int, int], list[Layer]] = {}
    for layer in layers:
        # By identity, as equal layers of a request share these objects.
        alike.setdefault((id(layer.spec), id(layer.backend)), []).append(layer)
    found: dict[tuple[LayerSpec, BackendLayout | None], list[Layer]] = {}
    for members in alike.values():
        first = members[0]
        assert first.spec is not None
        if first.spec.page_size_padded is not None:
            detail = (
                f"layer {first.name!r} asks for page_size_padded {first.spec.page_size_padded}, but this strategy "
                f"places pages itself; leave it out, or use strategy unify"
            )
            raise SpecInvalid(detail, errors=[first.fault(detail, "page_size_padded")])
        found.setdefault((first.spec, first.backend), []).extend(members)
    return [Kin(tuple(members), spec, backend) for (spec, backend), members in found.items()]


def _bucket(layers: Sequence[Layer], max_block_size: int | None, default_max: int, most_pages: int) -> Bucket:
    kin, names = tuple(_kin(layers)), tuple(layer.name for layer in layers)
    if not kin[0].spec.is_attention:
        return Bucket(kin, (kin[0].spec.block_size,), names)
    limit = max_block_size or default_max
    common = _sizes_in_common(kin, limit, most_pages)
    if not common and max_block_size is None:
        limit = min(_MOST_TOKENS, lcm(*(min(_sizes(one, _MOST_TOKENS), default=_MOST_TOKENS) for one in kin)))
        common = _sizes_in_common(kin, limit, most_pages)
    if not common:
        layer = kin[0].layers[0]
        detail = (
            f"no block size up to {limit} tokens suits the kernels of layer {layer.name!r} and of the layers that "
            f"share its blocks; {'raise max_block_size, or ' if max_block_size is not None else ''}choose backends "
            f"whose kernel block sizes have more in common"
        )
        raise LayoutUnsupported(detail, errors=[layer.fault(detail)])
    return Bucket(kin, common, names)


def _sizes_in_common(kin: Sequence[Kin], most: int, most_pages: int) -> tuple[int, ...]:
    first, *others = (_sizes(one, most) for one in kin)
    common = sorted(set(first).intersection(*others))
    step = max(1, ceil_div(len(common) * len(kin), most_pages))
    return tuple(common[::step])


def _sizes(kin: Kin, most: int) -> tuple[int, ...]:
    """Block sizes up to `most` tokens that the kernels read as one block, ascending, from 16 tokens up where they take
    so many."""
    assert kin.backend is not None  # every attention layer has one
    ratio = kin.spec.block_size // kin.spec.storage_block_size
    rows = kin.backend.kernel_block_sizes.from_to(ceil_div(LEAST_BLOCK_SIZE, ratio), most // ratio)
    return tuple(size * ratio for size in rows)
