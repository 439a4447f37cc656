"""Keys and values in pages: gathered by block tables as attention takes them, written by slots.

    keys, values = kv_pages(plan.layers[name], kv.tensor(name), k_width=192)
    slots = keys.slots(table, start, end)          # table: [batch, blocks], ids as the pool hands them out
    keys.write(slots, rows)                        # rows: [batch, heads, tokens, width]
    keys.gather(table, 0, end)                     # [batch, heads, tokens, width], for any attention

Only strides are used, so dense, padded and slab pages, and blocks in any order, read the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from kvpage.errors import NotSupported, SpecInvalid, how_to_install, shorten

try:
    import torch
except ImportError as error:
    raise ImportError(f"tensors need torch: {how_to_install('torch')}") from error

from kvpage.backends import BACKENDS, NAMED_LAYOUTS, named_layout
from kvpage.plans import LayerPlan

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # no dtype is moved but as bits
_ORDER = ("num_blocks", "block_size", "num_kv_heads")


@dataclass(frozen=True)  # no slots: what is derived is cached
class Pages:
    """The keys, or the values, of one layer: a view of the pool's memory, never a copy."""

    rows: torch.Tensor
    """[kernel blocks, tokens of one, heads, width]."""
    block_size: int
    """Tokens of a block of the plan: one kernel block or several."""

    def __post_init__(self) -> None:
        if self.rows.dim() != 4 or self.block_size < 1 or self.block_size % self.rows.shape[1]:
            raise SpecInvalid(
                f"pages of shape {tuple(self.rows.shape)} are not [kernel blocks, tokens, heads, width] with blocks of "
                f"{self.block_size} tokens, a multiple of a kernel block"
            )

    @cached_property
    def _bits(self) -> torch.Tensor:
        return self.rows.view(_BITS[self.rows.dtype.itemsize])

    @cached_property
    def _parts(self) -> int:
        return self.block_size // self.rows.shape[1]

    def slots(self, table: torch.Tensor, start: int, end: int) -> torch.Tensor:
        """Where tokens `start` to before `end` of each row of `table` ([batch, blocks], integers) lie:
        block × block_size + place in the block, [batch, tokens]. Raises `SpecInvalid` where the table is too short.
        """
        self._check_reach(table, start, end)
        tokens = torch.arange(start, end, device=table.device)
        return table[:, tokens // self.block_size] * self.block_size + tokens % self.block_size

    def write(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """`rows` [batch, heads, tokens, width] to `slots` [batch, tokens]. Raises `SpecInvalid` where shapes or dtypes
        do not fit."""
        _, tokens, heads, width = self.rows.shape
        batch, count = slots.shape
        if rows.dtype != self.rows.dtype or rows.shape != (batch, heads, count, width):
            raise SpecInvalid(
                f"rows of {rows.dtype}, shape {tuple(rows.shape)}, do not fit {count} slots for each of {batch} "
                f"sequences in pages of {self.rows.dtype}, {heads} heads and width {width}"
            )
        self._bits[slots // tokens, slots % tokens] = rows.detach().view(self._bits.dtype).transpose(1, 2)

    def gather(self, table: torch.Tensor, start: int, end: int) -> torch.Tensor:
        """Tokens `start` to before `end` of each row of `table`, in their order: [batch, heads, tokens, width]. A copy;
        of the blocks that these tokens lie in, nothing else is read. Raises as `slots`."""
        self._check_reach(table, start, end)
        first = start // self.block_size
        chosen = table[:, first : -(-end // self.block_size)]
        if self._parts > 1:
            chosen = chosen.unsqueeze(-1) * self._parts + torch.arange(self._parts, device=table.device)
        skipped = first * self.block_size
        found = self._selected(chosen.flatten(), table.shape[0])
        return found[:, :, start - skipped : end - skipped].view(self.rows.dtype)

    def _selected(self, entries: torch.Tensor, batch: int) -> torch.Tensor:
        """Whole kernel blocks. The rows of a head follow each other in what comes out, as in a dense tensor: then what
        is computed from it is the same to the last bit."""
        _, tokens, heads, width = self.rows.shape
        if entries.device.type != "cpu":
            found = self._bits.index_select(0, entries).view(batch, -1, heads, width)
            return found.transpose(1, 2).contiguous()
        by_head = torch.empty(heads, len(entries), tokens, width, dtype=self._bits.dtype)
        for head in range(heads):  # a head at a time: to turn it over afterwards takes longer
            torch.index_select(self._bits[:, :, head], 0, entries, out=by_head[head])
        return by_head.view(heads, batch, -1, width).transpose(0, 1).contiguous()

    def _check_reach(self, table: torch.Tensor, start: int, end: int) -> None:
        if table.dim() != 2 or not 0 <= start <= end <= table.shape[1] * self.block_size:
            raise SpecInvalid(
                f"tokens {start} to {end} are not in a table of shape {tuple(table.shape)} with blocks of "
                f"{self.block_size} tokens; tables are [batch, blocks]"
            )


def kv_pages(
    layer: LayerPlan, tensor: torch.Tensor, k_width: int, axes: Sequence[str] | None = None
) -> tuple[Pages, Pages]:
    """Keys and values of an attention layer. `tensor`: the layer's, as `Attachment.tensor` gives it.

    `k_width`: elements of a key. Where K and V of a token lie one after the other, or in one latent row, the rest is
    the value. `axes`: the names of the tensor's axes as in a written-out backend; needed for one, and for no other.
    Raises `SpecInvalid` for a width that cannot be, `NotSupported` where the axes are not known.
    """
    names = [str(axis) for axis in (_axes(layer) if axes is None else axes)]
    if len(names) != tensor.dim():
        raise SpecInvalid(f"layer {shorten(layer.name)!r} has {tensor.dim()} axes, not those named {names}")
    if "num_kv_heads" not in names:  # one latent row a token: as if of one head
        names.insert(0, "num_kv_heads")
        tensor = tensor.unsqueeze(0)
    if "2" in names:
        axis = names.index("2")
        names.pop(axis)
        halves = tensor.select(axis, 0), tensor.select(axis, 1)
        least = most = tensor.shape[-1]
    else:
        halves, least, most = _split(tensor, k_width), 1, tensor.shape[-1] - 1
    if not least <= k_width <= most:
        raise SpecInvalid(f"a key of layer {shorten(layer.name)!r} has {least} to {most} elements, not {k_width}")
    order = [*map(names.index, _ORDER), len(names) - 1]
    return tuple(Pages(half.permute(order), layer.block_size) for half in halves)  # type: ignore[return-value]


def _split(tensor: torch.Tensor, k_width: int) -> tuple[torch.Tensor, torch.Tensor]:
    return tensor[..., :k_width], tensor[..., k_width:]


def _axes(layer: LayerPlan) -> tuple[str, ...]:
    """By their names, in logical order."""
    name = layer.backend or "none"
    if name in NAMED_LAYOUTS:
        return tuple(axis.text for axis in named_layout(name, has_v=True).shape)
    if name not in BACKENDS:
        raise NotSupported(
            f"the axes of layer {shorten(layer.name)!r} (backend {shorten(name)}) have no names here; pass axes, as"
            " they were written out"
        )
    return tuple(axis.text for axis in BACKENDS[name].layouts["NHD"].shape)
