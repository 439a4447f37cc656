"""A pool's buffer mapped into this process, and its tensors."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from collections.abc import Mapping as ReadOnlyDict
from typing import TYPE_CHECKING, Self

from kvpage.client.hold import Hold
from kvpage.client.views import BufferViews, ElementView, PlannedViews, Wrap, wrapped
from kvpage.errors import NotFound, SpecInvalid, StaleHandle, shorten
from kvpage.memory.base import Mapping
from kvpage.pages.batches import Ids, block_ids
from kvpage.pages.geometry import Places
from kvpage.pages.needs import Copy
from kvpage.plans import Plan
from kvpage.regions import BufferRegions
from kvpage.wire.messages import PoolState

if TYPE_CHECKING:
    import torch


class Attachment:
    """What `kvpage.attach` returns. Made whole or not at all.

    `close` gives up this object's claim. Tensors taken from it stay valid: the memory is unmapped, and the worker told
    so, when the last of them dies. A forked child has neither: attach again there.
    """

    def __init__(self, views: PlannedViews, pool: PoolState, mapping: Mapping, wrap: Wrap, hold: Hold) -> None:
        """Use `kvpage.attach` or `Connection.attach`."""
        self._hold = hold
        self._plan = views.plan
        self._pool = pool
        self._pid = os.getpid()
        self._mapping: Mapping | None = mapping
        self._tensors: Tensors | None = Tensors(views, BufferViews(wrapped(wrap, mapping)))

    def __repr__(self) -> str:
        return f"<Attachment to {self._pool.name!r} on {self._pool.device}, {'closed' if self.closed else 'open'}>"

    @property
    def plan(self) -> Plan:
        """The layout, proven sound before the attachment was made."""
        return self._plan

    @property
    def pool_id(self) -> str:
        return self._pool.pool_id

    @property
    def name(self) -> str:
        return self._pool.name

    @property
    def device(self) -> str:
        return self._pool.device

    @property
    def epoch(self) -> str:
        """The worker's epoch when this was attached; pass it to a later attach to refuse memory that was lost since."""
        return self._pool.epoch

    @property
    def closed(self) -> bool:
        return self._tensors is None

    @property
    def detached(self) -> bool:
        """Whether the worker knows nothing of this attachment any more: it died, the connection to it ended, or this
        was closed and the last tensor is gone.

        Before that the memory goes on to be readable and writable, and is not given back before it is unmapped here;
        but the pool can be deleted meanwhile. Attach again, naming the `epoch`, before relying on it.
        """
        return self._hold.ended

    @property
    def tensors(self) -> Tensors:
        """Tensors by layer name, always as a tuple, in plan order. Raises `StaleHandle` when closed or after a fork."""
        if os.getpid() != self._pid:
            raise StaleHandle(f"pool {self.name!r} was attached before a fork; attach again in the child")
        if self._tensors is None:
            raise StaleHandle(f"the attachment to pool {self.name!r} is closed; attach again")
        return self._tensors

    @property
    def buffer(self) -> torch.Tensor:
        """The whole buffer, all layers and their padding: uint8, shape (buffer_size_bytes,)."""
        return self.tensors.buffer

    def regions(self) -> BufferRegions:
        """Where the blocks lie in this process, by address: for what registers memory, such as an RDMA library.

        The addresses are good as long as this is open or a tensor of it lives: take them back from whoever got them
        before. Raises `StaleHandle` when closed or after a fork, and as `BufferRegions`.
        """
        return BufferRegions(self._plan, base=self.buffer.data_ptr())

    def tensor(self, layer: str) -> torch.Tensor:
        """The one tensor of an attention layer, axes in the backend's logical order.

        Raises `NotFound` for a layer the plan does not have, `SpecInvalid` for one with several tensors or none.
        """
        found = self.tensors[layer]
        if len(found) != 1:
            raise SpecInvalid(f"layer {shorten(layer)!r} has {len(found)} tensors; take them from .tensors[name]")
        return found[0]

    def clear(self, group: int, ids: Ids) -> None:
        """Write zeros to all that these blocks keep in the layers of their group; padding and other blocks stay as they
        are. For blocks that the worker says must be cleared, before they are used; on a GPU on the current stream.

        Raises `SpecInvalid` for a group, or for what can be no block of it, `StaleHandle` when closed or after a fork.
        """
        self.tensors.clear(self._plan, group, ids)

    def copy(self, copies: Iterable[Copy]) -> None:
        """Make the copies that sequences ask for, in order: all that a block keeps in the layers of its group. On a GPU
        on the current stream: say `copies_done` when that has come to its end. Raises as `clear`.
        """
        for group, source, target in copies:
            self.tensors.copy(self._plan, group, source, target)

    def close(self) -> None:
        """Give up the claim on the memory. May be called twice, and again when it was interrupted."""
        self._tensors = None
        if self._mapping is not None and os.getpid() == self._pid:
            self._mapping.close()
            if self._mapping.unmapped:
                self._hold.release()
        self._mapping = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Tensors(ReadOnlyDict[str, tuple["torch.Tensor", ...]]):
    """Layer name → its tensors. A tensor is made when it is first asked for; every reach was checked before."""

    def __init__(self, planned: PlannedViews, buffer: BufferViews) -> None:
        self._planned = planned.by_layer
        self._buffer = buffer
        self._made: dict[str, tuple[torch.Tensor, ...]] = {}

    @property
    def buffer(self) -> torch.Tensor:
        """uint8, shape (buffer_size_bytes,)."""
        return self._buffer.base

    def __getitem__(self, layer: str) -> tuple[torch.Tensor, ...]:
        made = self._made.get(layer)
        if made is None:
            made = self._made[layer] = tuple(self._buffer.tensor(view) for view in self._views_of(layer))
        return made

    def clear(self, plan: Plan, group: int, ids: Ids) -> None:
        """As `Attachment.clear`."""
        views, blocks = self._views_of_group(plan, group), self._blocks(plan, group, ids)
        for view in views if len(blocks) else ():
            self._buffer.clear(view, blocks)

    def copy(self, plan: Plan, group: int, source: int, target: int) -> None:
        """As `Attachment.copy` of one."""
        views = self._views_of_group(plan, group)
        first, second = self._blocks(plan, group, [source, target]).tolist()
        for view in views:
            self._buffer.copy(view, first, second)

    def _blocks(self, plan: Plan, group: int, ids: Ids) -> Places:
        return block_ids(ids, plan.num_blocks * plan.groups[group].blocks_per_slab)

    def _views_of_group(self, plan: Plan, group: int) -> list[ElementView]:
        """Raises `SpecInvalid` where there is no such group."""
        if not 0 <= group < len(plan.groups):
            raise SpecInvalid(f"there is no group {group}; the groups are 0 to {len(plan.groups) - 1}")
        layers = (plan.layers[name] for name in plan.groups[group].layers)
        own = [layer.name for layer in layers if layer.kv_sharing_target is None]  # else it has no memory of its own
        return [view for name in own for view in self._views_of(name)]

    def _views_of(self, layer: str) -> tuple[ElementView, ...]:
        planned = self._planned.get(layer)
        if planned is None:
            some = ", ".join(list(self._planned)[:4])
            raise NotFound(f"the plan has no layer {shorten(layer)!r}; it has {len(self._planned)}: {some}, …")
        return planned

    def __iter__(self) -> Iterator[str]:
        return iter(self._planned)

    def __len__(self) -> int:
        return len(self._planned)

    def __contains__(self, layer: object) -> bool:
        return layer in self._planned
