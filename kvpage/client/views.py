"""From a mapped buffer to strided torch tensors. The one place where sizes are elements and not bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvpage.errors import InternalError, NotSupported, ProtocolError, SpecInvalid, how_to_install

try:
    import torch
except ImportError as error:
    raise ImportError(f"tensors need torch: {how_to_install('torch')}") from error

from kvpage.dtypes import item_size_bytes
from kvpage.memory.base import Mapping
from kvpage.memory.cuda_mapping import CudaMapping
from kvpage.plans import Plan, TensorView
from kvpage.strides import span

Wrap: TypeAlias = Callable[[Mapping], torch.Tensor]
"""Makes the uint8 tensor of a whole mapping; its storage keeps the memory mapped to the last view."""

_KDL_CUDA = 2  # kDLCUDA, dlpack.h
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def wrap_mapping(mapping: Mapping) -> torch.Tensor:
    """A uint8 tensor, shape (size_bytes,), on the device where the memory is. No copy."""
    if isinstance(mapping, CudaMapping):
        return _wrap_cuda(mapping)
    return torch.frombuffer(mapping.claim, dtype=torch.uint8)


def _wrap_cuda(mapping: CudaMapping) -> torch.Tensor:
    """Through DLPack, whose capsule keeps `owner` to the last view and whose end at exit is safe."""
    try:
        from cuda.core import Buffer
    except ImportError as error:
        raise NotSupported(f"tensors over CUDA memory need cuda-core: {how_to_install('cuda')}") from error
    with mapping.context():
        buffer = Buffer.from_handle(mapping.address, mapping.size_bytes, owner=mapping.claim)
        where = buffer.__dlpack_device__()
        if (int(where[0]), where[1]) != (_KDL_CUDA, mapping.device.ordinal):
            raise InternalError(
                f"the driver places memory of {mapping.device.uuid} on device {where}, not on (2, "
                f"{mapping.device.ordinal}); torch would take it for other memory"
            )
        if not torch.cuda.is_available():
            raise NotSupported(
                f"torch {torch.__version__} cannot use {mapping.device.uuid}: it is a build without CUDA, or sees no"
                " device"
            )
        return torch.utils.dlpack.from_dlpack(buffer).view(torch.uint8)  # it comes as int8


@dataclass(frozen=True, slots=True)
class ElementView:
    """A planned view in elements of its dtype."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides_elems: tuple[int, ...]
    offset_elems: int
    block_axis: int
    kernel_blocks_per_block: int
    """Block i is so many entries of the block axis, from i × this on."""


class PlannedViews:
    """A plan in torch's terms, made and checked once, for every buffer of that plan."""

    def __init__(self, plan: Plan) -> None:
        """Raises `NotSupported` when this torch lacks a dtype, `ProtocolError` when a view leaves the buffer."""
        self.plan = plan
        patterns: dict[_PatternKey, _Pattern] = {}  # hundreds of layers differ in nothing but where they begin
        self.by_layer = {
            name: tuple(_element_view(name, view, plan.buffer_size_bytes, patterns) for view in layer.tensors)
            for name, layer in plan.layers.items()
        }


class _Pattern(NamedTuple):
    """What is true of a view wherever it begins."""

    dtype: torch.dtype
    item_bytes: int
    strides_elems: tuple[int, ...]
    span_bytes: int


_PatternKey: TypeAlias = tuple[str, tuple[int, ...], tuple[int, ...]]


def _element_view(
    layer: str, view: TensorView, buffer_size_bytes: int, patterns: dict[_PatternKey, _Pattern]
) -> ElementView:
    key = (view.dtype, view.shape, view.strides_bytes)
    pattern = patterns.get(key)
    if pattern is None:
        pattern = patterns[key] = _pattern(view)
    end = view.offset_bytes + pattern.span_bytes
    if view.offset_bytes < 0 or end > buffer_size_bytes:
        raise ProtocolError(
            f"tensor {view.name!r} of layer {layer!r} reaches from byte {view.offset_bytes} to {end} of a buffer of "
            f"{buffer_size_bytes} bytes"
        )
    return ElementView(
        dtype=pattern.dtype,
        shape=view.shape,
        strides_elems=pattern.strides_elems,
        offset_elems=view.offset_bytes // pattern.item_bytes,
        block_axis=view.block_axis,
        kernel_blocks_per_block=view.kernel_blocks_per_block,
    )


def _pattern(view: TensorView) -> _Pattern:
    item = item_size_bytes(view.dtype)
    return _Pattern(
        dtype=_torch_dtype(view.dtype),
        item_bytes=item,
        strides_elems=tuple(stride // item for stride in view.strides_bytes),
        span_bytes=span(view.shape, view.strides_bytes, item),
    )


def wrapped(wrap: Wrap, mapping: Mapping) -> torch.Tensor:
    """What `wrap` makes of `mapping`. Raises `SpecInvalid` unless that is the uint8 tensor of all of it."""
    base: object = wrap(mapping)
    if not isinstance(base, torch.Tensor):
        raise SpecInvalid(f"wrap returned {type(base).__name__}; it must return a uint8 tensor over the mapping")
    if base.dtype != torch.uint8 or tuple(base.shape) != (mapping.size_bytes,) or not base.is_contiguous():
        raise SpecInvalid(
            f"wrap returned a tensor of {base.dtype}, shape {tuple(base.shape)}; it must be torch.uint8, shape"
            f" ({mapping.size_bytes},), contiguous"
        )
    return base


class BufferViews:
    """Tensors over `base`, the uint8 tensor of a whole buffer."""

    def __init__(self, base: torch.Tensor) -> None:
        self.base = base
        self._by_dtype: dict[torch.dtype, torch.Tensor] = {}

    def tensor(self, view: ElementView) -> torch.Tensor:
        """The strided tensor of `view`, sharing the buffer's bytes."""
        typed = self._by_dtype.get(view.dtype)
        if typed is None:
            typed = self._by_dtype[view.dtype] = self._as(view.dtype)
        return typed.as_strided(view.shape, view.strides_elems, view.offset_elems)

    def clear(self, view: ElementView, ids: npt.NDArray[np.intp]) -> None:
        """Zeros to every byte that these blocks have in `view`, on the device's current stream."""
        parts = view.kernel_blocks_per_block
        entries = torch.from_numpy((ids[:, None] * parts + np.arange(parts)).ravel()).to(self.base.device)
        bits = replace(view, dtype=_BITS[view.dtype.itemsize])  # not every dtype can be filled by index
        self.tensor(bits).index_fill_(view.block_axis, entries, 0)

    def _as(self, dtype: torch.dtype) -> torch.Tensor:
        whole = self.base.numel() // dtype.itemsize * dtype.itemsize  # a buffer of odd size has whole elements too
        return self.base[:whole].view(dtype)

    def copy(self, view: ElementView, source: int, target: int) -> None:
        """Every byte that block `source` has in `view` to block `target`, on the device's current stream."""
        tensor = self.tensor(replace(view, dtype=_BITS[view.dtype.itemsize]))
        axis, parts = view.block_axis, view.kernel_blocks_per_block
        tensor.narrow(axis, target * parts, parts).copy_(tensor.narrow(axis, source * parts, parts))


def _torch_dtype(dtype: str) -> torch.dtype:
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        raise NotSupported(f"torch {torch.__version__} has no dtype {dtype}, which the plan uses; take a newer torch")
    return found
