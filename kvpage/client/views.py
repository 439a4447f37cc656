"""From a mapped buffer to strided torch tensors. The one place where sizes are elements and not bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

try:
    import torch
except ImportError as error:
    raise ImportError("tensors need torch: pip install 'kvpage[torch]'") from error

from kvpage.dtypes import item_size_bytes
from kvpage.errors import NotSupported, ProtocolError
from kvpage.memory.base import Mapping
from kvpage.plans import Plan, TensorView
from kvpage.strides import span

Wrap: TypeAlias = Callable[[Mapping], torch.Tensor]
"""Makes the uint8 tensor of a whole mapping; its storage keeps the memory mapped to the last view."""


def wrap_host(mapping: Mapping) -> torch.Tensor:
    """A uint8 tensor, shape (size_bytes,), over host memory. No copy."""
    return torch.frombuffer(mapping.buffer, dtype=torch.uint8)


def check_dtypes(plan: Plan) -> None:
    """Raises `NotSupported` when this torch lacks a dtype that the plan uses."""
    for dtype in sorted({view.dtype for layer in plan.layers.values() for view in layer.tensors}):
        _torch_dtype(dtype)


class Views:
    """Tensors over one uint8 tensor `base`, which must be one dense axis."""

    def __init__(self, base: torch.Tensor) -> None:
        self.base = base
        self._by_dtype: dict[str, torch.Tensor] = {}

    def tensor(self, view: TensorView) -> torch.Tensor:
        """The strided tensor of `view`: shape and strides as planned, sharing the buffer's bytes.

        Raises `ProtocolError` when it would reach outside the buffer.
        """
        item = item_size_bytes(view.dtype)
        end = view.offset_bytes + span(view.shape, view.strides_bytes, item)
        if view.offset_bytes < 0 or end > self.base.numel():
            raise ProtocolError(
                f"tensor {view.name!r} would reach from byte {view.offset_bytes} to {end} of a buffer of "
                f"{self.base.numel()} bytes; the plan is not that of this buffer"
            )
        strides_elems = [stride // item for stride in view.strides_bytes]
        return self._typed(view.dtype, item).as_strided(view.shape, strides_elems, view.offset_bytes // item)

    def _typed(self, dtype: str, item: int) -> torch.Tensor:
        typed = self._by_dtype.get(dtype)
        if typed is None:
            whole = self.base.numel() // item * item  # a buffer of an odd size still has whole elements
            typed = self._by_dtype[dtype] = self.base[:whole].view(_torch_dtype(dtype))
        return typed


def _torch_dtype(dtype: str) -> torch.dtype:
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        raise NotSupported(f"torch {torch.__version__} has no dtype {dtype}, which the plan uses; take a newer torch")
    return found
