"""The store in the process that schedules: which tokens of a request are kept there, and which of its blocks to keep.

What a request is to load is held from when it was looked for until the workers say that it was loaded, so that nobody
evicts it. Nothing here waits for bytes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from kvpage.client.connection import attach
from kvpage.client.leasing import open_lease
from kvpage.client.socket_lease import SocketLease
from kvpage.errors import Conflict, KvpageError, StaleHandle
from kvpage.integrations.vllm.store_choice import STORE_DEVICE, StoreChoice
from kvpage.integrations.vllm.store_names import GROUP, PATIENCE_S, PAUSE_S, lease_name
from kvpage.integrations.vllm.store_values import Load, Save, StoreReport, Transfers
from kvpage.pages.hashing import TokenHashes
from kvpage.plans import Plan

log = logging.getLogger("vllm.kvpage")

MOST_AT_ONCE = 64
"""Blocks that are sealed together."""
_Answer = TypeVar("_Answer")


@dataclass(slots=True)
class _Known:
    """A request of the scheduler."""

    request: Any
    hashes: TokenHashes
    num_local: int = 0
    """Blocks that the engine had of it when it was looked for."""
    num_kept: int = 0
    """Blocks from its start that the store has, or was told to keep."""
    held: list[int] = field(default_factory=list)
    """Blocks of the store that are to be loaded, after the local ones."""
    era: int | None = None


class StoreScheduler:
    """One thread. A store that fails costs cached tokens, and never the engine."""

    def __init__(
        self, lease: SocketLease, plan: Plan, pool_id: str, salt: bytes, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._lease, self._pool_id, self._clock = lease, pool_id, clock
        self._block_size, self._num_blocks = plan.groups[GROUP].block_size, plan.num_blocks
        self._salt = lease.salt + salt
        self._known: dict[str, _Known] = {}
        self._step = 0
        self._loads: list[Load] = []
        self._loading: list[tuple[int, list[int]]] = []
        """Blocks of the store that are held until the step is done."""
        self._owed: list[int] = []
        """Blocks of the store that are to be given back."""
        self._paused_until_s = 0.0

    @classmethod
    def open(cls, choice: StoreChoice, salt: bytes) -> Self:
        """Of the pool that the worker of this engine has made, before. Raises as `attach` and `open_lease`."""
        with attach(choice.name, device=STORE_DEVICE, run_dir=choice.run_dir) as kv:
            plan, pool_id = kv.plan, kv.pool_id
            lease = open_lease(
                choice.name,
                name=lease_name("reader"),
                device=STORE_DEVICE,
                run_dir=choice.run_dir,
                timeout_s=PATIENCE_S,
            )
        return cls(lease, plan, pool_id, salt)

    # --- a request that waits -----------------------------------------------------------------------------------------

    def matched(self, request: Any, num_local_tokens: int) -> int:
        """Tokens after the local ones that the store has; they are held from now on. One token at least is left."""
        if not _is_told_by_tokens(request):
            return 0
        known = self._known.get(request.request_id)
        if known is None:
            hashes = TokenHashes((self._block_size,), salt=self._salt + _cache_salt(request))
            known = self._known[request.request_id] = _Known(request, hashes)
        num_local = num_local_tokens // self._block_size
        if not known.held or known.num_local != num_local:  # else it waits for room, and nothing has changed
            self._release(known)
            known.num_local = num_local
            self._take(known, 0 if request.skip_reading_prefix_cache else (request.num_tokens - 1) // self._block_size)
        return len(known.held) * self._block_size

    def _take(self, known: _Known, most: int) -> None:
        """Hold the blocks after the local ones, of the first `most`. With none, the era is asked for all the same."""
        hashes = self._hashes(known, most)
        taken = self._asked(lambda: self._lease.take_prefix([hashes], most * self._block_size))
        if taken is None:
            return
        blocks = taken.ids[GROUP].tolist()
        known.era, known.num_kept = self._lease.era, len(blocks)
        known.held = blocks[known.num_local :]
        self._free(blocks[: known.num_local])

    def allocated(self, request: Any, engine_blocks: Sequence[int], num_tokens: int) -> None:
        """The request is scheduled, and `num_tokens` of what was found are to be loaded. `engine_blocks`: all of it."""
        known = self._known.get(request.request_id)
        if known is None:
            return
        count = num_tokens // self._block_size
        if count:
            wanted, blocks = known.held[:count], list(engine_blocks)[known.num_local : known.num_local + count]
            self._loads.append(Load(store_blocks=tuple(wanted), engine_blocks=tuple(blocks)))
            self._loading.append((self._step + 1, known.held))
            known.held = []
        self._release(known)

    # --- a step -------------------------------------------------------------------------------------------------------

    def transfers(self, output: Any) -> Transfers:
        """What the workers are to do in the step that `output`, vLLM's `SchedulerOutput`, describes."""
        self._step += 1
        loads, self._loads = tuple(self._loads), []
        saves: list[Save] = []
        for name, num_tokens in output.num_scheduled_tokens.items():
            known = self._known.get(name)
            if known is not None and not self._is_paused:
                tables = output.kv_connector_block_state.get_block_ids(name)
                if tables is not None:  # else vLLM says them in a later step, and these blocks wait for it
                    saves += self._saves(known, num_tokens, tables[GROUP])
        return Transfers(step=self._step, pool_id=self._pool_id, loads=loads, saves=tuple(saves))

    def _saves(self, known: _Known, num_tokens: int, table: Sequence[int]) -> list[Save]:
        """Of the blocks that are whole once `num_tokens` more are computed, those that are not kept. Tokens that are
        scheduled and not known yet wait for a later step."""
        request = known.request
        num_whole = min(request.num_computed_tokens + num_tokens, request.num_tokens) // self._block_size
        first, end = known.num_kept, min(num_whole, self._num_blocks - 1)
        if end <= first:
            return []
        known.num_kept = end
        hashes = self._hashes(known, end)
        cuts = [(start, min(start + MOST_AT_ONCE, end)) for start in range(first, end, MOST_AT_ONCE)]
        return [
            Save(engine_blocks=tuple(table[start:stop]), hashes=tuple(hashes[start:stop]), era=known.era)
            for start, stop in cuts
        ]

    def reported(self, report: StoreReport) -> None:
        """What was loaded by then is held no longer."""
        done = [blocks for step, blocks in self._loading if step <= report.step]
        self._loading = [(step, blocks) for step, blocks in self._loading if step > report.step]
        for blocks in done:
            self._free(blocks)

    def finished(self, request: Any) -> None:
        """What is kept of it counts as used now, its end first to be evicted."""
        known = self._known.pop(request.request_id, None)
        if known is None:
            return
        self._release(known)
        if known.num_kept and not self._is_paused:
            hashes = self._hashes(known, known.num_kept)
            tokens = known.num_kept * self._block_size
            taken = self._asked(lambda: self._lease.take_prefix([hashes], tokens))
            self._free([] if taken is None else taken.ids[GROUP].tolist())

    def close(self) -> None:
        """May be called twice."""
        self._known.clear()
        self._lease.close()

    # --- the store ----------------------------------------------------------------------------------------------------

    def _hashes(self, known: _Known, num_blocks: int) -> list[bytes]:
        hashes = known.hashes
        hashes.append(known.request.all_token_ids[len(hashes) : num_blocks * self._block_size])
        return hashes.of(GROUP, num_blocks)[:num_blocks]

    def _release(self, known: _Known) -> None:
        held, known.held = known.held, []
        self._free(held)

    def _free(self, blocks: Sequence[int]) -> None:
        """Now, or once the store answers again."""
        self._owed += blocks
        owed = self._owed
        if not owed:
            return
        is_done = self._asked(lambda: self._give_back(owed))
        if is_done:
            self._owed = []

    def _give_back(self, blocks: Sequence[int]) -> bool:
        with suppress(Conflict):  # they were freed, and the answer was lost
            self._lease.free(GROUP, blocks)
        return True

    @property
    def _is_paused(self) -> bool:
        return self._clock() < self._paused_until_s

    def _asked(self, ask: Callable[[], _Answer]) -> _Answer | None:
        """None where the store does not answer, or is paused."""
        if self._is_paused:
            return None
        try:
            return ask()
        except StaleHandle as error:
            self._paused_until_s = float("inf")
            log.warning("the store is gone, and nothing is looked for in it any more: %s", error.message)
        except KvpageError as error:
            self._paused_until_s = self._clock() + PAUSE_S
            log.warning("the store does not answer, and is left alone for %d s: %s", PAUSE_S, error.message)
        return None


def _is_told_by_tokens(request: Any) -> bool:
    """Whether what is computed for it depends on its tokens alone."""
    return not (request.lora_request or request.mm_features or request.prompt_embeds is not None)


def _cache_salt(request: Any) -> bytes:
    salt = request.cache_salt
    return b"" if salt is None else b"\0" + str(salt).encode()
