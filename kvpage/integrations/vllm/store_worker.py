"""The store in the process that computes: blocks are copied to it and from it, and sealed once their bytes are there.

The lease on the blocks that are being written is this process's own: they go back to nobody before it is gone, and what
it had not sealed by then, nobody finds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple, Self

import numpy as np
import torch

from kvpage.client.attachment import Attachment
from kvpage.client.connection import attach
from kvpage.client.http import Client
from kvpage.client.leasing import open_lease
from kvpage.client.socket_lease import SocketLease
from kvpage.errors import Conflict, KvpageError, LayoutUnsupported, OutOfBlocks, StaleHandle, shorten
from kvpage.integrations.vllm.engine_plan import EnginePlan
from kvpage.integrations.vllm.store_choice import STORE_DEVICE, StoreChoice
from kvpage.integrations.vllm.store_names import GROUP, MAKING_S, PATIENCE_S, PAUSE_S, lease_name
from kvpage.integrations.vllm.store_values import Save, StoreReport, Transfers
from kvpage.pages.steps import Content, Step
from kvpage.planner.planner import plan as make_plan
from kvpage.plans import LayerPlan, Plan

log = logging.getLogger("vllm.kvpage")

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Layer(NamedTuple):
    """The same layer in the engine's memory and in the store's, as bits, kernel blocks outermost."""

    engine: torch.Tensor
    store: torch.Tensor
    parts: int
    """Kernel blocks of a block."""


class StoreWorker:
    """Made by `open`; `close` gives back what is not sealed."""

    def __init__(self, attachment: Attachment, run_dir: str | None, owned: ExitStack) -> None:
        self._attachment, self._plan, self._owned = attachment, attachment.plan, owned
        self._lease = owned.enter_context(_writing_lease(attachment, run_dir))
        self._layers: list[_Layer] = []
        self._step = 0
        self._failed: set[int] = set()
        self._is_sound = True
        """False once a load has failed, or the store is gone: what is computed after that is not kept."""
        self._clock, self._paused_until_s = time.monotonic, 0.0

    @classmethod
    def open(cls, planned: EnginePlan, choice: StoreChoice) -> Self:
        """The store of that name, made if there is none. Raises as `Client.create_pool`, `attach` and `open_lease`, and
        `Conflict` where the pool of that name has another layout or size."""
        request = planned.request | {"num_blocks": choice.num_blocks}
        plan = make_plan(request)
        _check_same_blocks(planned.plan, plan)
        with Client(run_dir=choice.run_dir) as client:
            try:
                client.create_pool(
                    request, name=choice.name, device=STORE_DEVICE, plan_id=plan.plan_id, wait_s=MAKING_S
                )
            except Conflict as error:
                raise Conflict(
                    f"pool {shorten(choice.name)!r} holds blocks of another layout or number, and this engine can read "
                    f"none of them: {error.message}; delete it, or name another store"
                ) from error
        with ExitStack() as owned:
            found = attach(choice.name, plan_id=plan.plan_id, device=STORE_DEVICE, run_dir=choice.run_dir)
            store = cls(owned.enter_context(found), choice.run_dir, owned)
            store._owned = owned.pop_all()
        return store

    @property
    def pool_id(self) -> str:
        return self._attachment.pool_id

    def register(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The engine's tensors, which are as the plan of its pool says."""
        layers = (layer for layer in self._plan.layers.values() if layer.tensors)
        self._layers = [_pair(layer, tensors[layer.name], self._attachment.tensor(layer.name)) for layer in layers]

    # --- a step -------------------------------------------------------------------------------------------------------

    def load(self, transfers: Transfers) -> None:
        """Before the step is computed. What cannot be loaded is said by `take_failed`."""
        if transfers.step <= self._step:
            return
        self._step = transfers.step
        if not transfers.loads:
            return
        if why := self._unreadable(transfers):
            log.warning("blocks are not loaded, and no more are kept: %s", why)
            self._failed.update(block for load in transfers.loads for block in load.engine_blocks)
            self._is_sound = False
            return
        for load in transfers.loads:
            self._copy(load.store_blocks, load.engine_blocks, to_store=False)

    def _unreadable(self, transfers: Transfers) -> str:
        if transfers.pool_id != self.pool_id:
            return f"the scheduler means store {transfers.pool_id}, and this worker has {self.pool_id}"
        return ""

    def take_failed(self) -> set[int]:
        """Blocks of the engine that were to be loaded and were not."""
        failed, self._failed = self._failed, set()
        return failed

    def save(self, transfers: Transfers) -> None:
        """After the step is computed. Where there is no room, or no worker answers, less is kept."""
        if not self._is_sound or transfers.pool_id != self.pool_id or self._clock() < self._paused_until_s:
            return
        try:
            for save in transfers.saves:
                self._save(save)
        except OutOfBlocks:
            log.debug("the store has no room: others hold its blocks")
        except StaleHandle as error:
            self._is_sound = False
            log.warning("the store is gone, and no more blocks are kept: %s", error.message)
        except KvpageError as error:
            self._paused_until_s = self._clock() + PAUSE_S
            log.warning("no blocks are kept for %d s: %s", PAUSE_S, error.message)

    def _save(self, save: Save) -> None:
        lease, count = self._lease, len(save.engine_blocks)
        blocks = lease.allocate(GROUP, count).tolist()
        try:
            self._copy(blocks, save.engine_blocks, to_store=True)
            content = Content(blocks, save.hashes, save.era)  # the bytes are there: from now on others may read them
            lease.step(Step(key=lease.new_key(), commit={GROUP: content}, free={GROUP: blocks}))
        except BaseException:
            with suppress(KvpageError):
                lease.free(GROUP, blocks)
            raise

    def _copy(self, store_blocks: Sequence[int], engine_blocks: Sequence[int], *, to_store: bool) -> None:
        runs = list(common_runs(store_blocks, engine_blocks))
        for layer in self._layers:
            for ours, theirs, count in runs:
                kept = layer.store.narrow(0, ours * layer.parts, count * layer.parts)
                used = layer.engine.narrow(0, theirs * layer.parts, count * layer.parts)
                _copy_bits(*((used, kept) if to_store else (kept, used)))

    @property
    def report(self) -> StoreReport:
        return StoreReport(self._step)

    def close(self) -> None:
        """May be called twice."""
        self._layers = []
        self._owned.close()


def _writing_lease(attachment: Attachment, run_dir: str | None) -> SocketLease:
    return open_lease(
        attachment.name,
        name=lease_name("writer"),
        clear=attachment.clear,
        device=attachment.device,
        run_dir=run_dir,
        timeout_s=PATIENCE_S,
    )


def _pair(layer: LayerPlan, engine: torch.Tensor, store: torch.Tensor) -> _Layer:
    """Raises `LayoutUnsupported` where a block of one does not fit the other."""
    view = layer.tensors[0]
    ours, theirs = (_by_block(tensor, view.block_axis) for tensor in (store, engine))
    if ours.shape[1:] != theirs.shape[1:] or store.dtype != engine.dtype:
        raise LayoutUnsupported(
            f"blocks of layer {shorten(layer.name)!r} are {engine.dtype} {list(theirs.shape[1:])} in the engine and "
            f"{store.dtype} {list(ours.shape[1:])} in the store"
        )
    return _Layer(theirs, ours, view.kernel_blocks_per_block)


def _by_block(tensor: torch.Tensor, axis: int) -> torch.Tensor:
    return tensor.view(_BITS[tensor.dtype.itemsize]).movedim(axis, 0)


def _check_same_blocks(engine: Plan, store: Plan) -> None:
    """Raises `LayoutUnsupported` unless a block is the same in both: the plans differ in the number of blocks only."""
    for name, layer in engine.layers.items():
        kept = store.layers[name]
        if (layer.block_size, layer.real_page_size_bytes) != (kept.block_size, kept.real_page_size_bytes):
            raise LayoutUnsupported(f"blocks of layer {shorten(name)!r} are other ones in a store of this size")


def _copy_bits(source: torch.Tensor, target: torch.Tensor) -> None:
    """Returns when the bytes are there."""
    if source.device.type == target.device.type == "cpu":
        np.copyto(target.numpy(), source.numpy())  # torch wakes its threads each time: on a busy machine 10 ms
    else:
        target.copy_(source)


def common_runs(first: Sequence[int], second: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Where both go on by one: beginnings in both and how many."""
    start = 0
    for end in range(1, len(first) + 1):
        is_next = end < len(first) and (first[end] - first[end - 1], second[end] - second[end - 1]) == (1, 1)
        if not is_next:
            yield first[start], second[start], end - start
            start = end
