"""A lease on blocks of a pool, held over its worker's socket."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from msgspec.structs import replace

from kvpage.client.arguments import checked_seconds
from kvpage.client.finding import SHORTEST_ANSWER_S, served_socket
from kvpage.client.patience import Patience
from kvpage.errors import DeviceUnavailable, Draining, KvpageError, NotFound, StaleHandle, WorkerLost, shorten
from kvpage.pages.arrays import Ints
from kvpage.pages.batches import Ids, block_ids, whole_number
from kvpage.pages.block_lease import BlockLease, Clear, FoundPrefix, Reservation
from kvpage.pages.leased_pool import HeldBlocks
from kvpage.pages.steps import Content, Counts, Grant, Step, new_key
from kvpage.run_directory import RunDirectory
from kvpage.wire import leasing, messages
from kvpage.wire.plain_client import PlainClient

_Body = TypeVar("_Body", bound=messages.Body)


class Door:
    """The way to the worker of a device, and to its successors."""

    def __init__(self, runs: RunDirectory, device: str, client_name: str, timeout_s: float) -> None:
        self._runs, self._device, self._client_name = runs, device, client_name
        self.timeout_s = timeout_s

    def open(self, answer_s: float) -> PlainClient:
        path = served_socket(self._device, self._runs, answer_s)
        return PlainClient(path, client_name=self._client_name, timeout_s=self.timeout_s)


class SocketLease(BlockLease):
    """Made by `open_lease` and `adopt_lease`. It ends with `close`; if its process dies before, its blocks are given
    back when that is known to be gone.
    """

    _client: PlainClient | None = None

    def __init__(
        self,
        door: Door,
        client: PlainClient,
        asked: leasing.OpenLease | leasing.AdoptLease,
        opened: leasing.LeaseOpened,
        token: str,
        clear: Clear | None,
    ) -> None:
        super().__init__(clear)
        self._door, self._client = door, client
        self._asked, self._opened, self._token = asked, opened, token
        self._pid, self._era = os.getpid(), 0
        self._adoption_key = new_key()

    def __repr__(self) -> str:
        return f"<SocketLease {self.name} of {self._opened.pool_id}, {'closed' if self.closed else 'open'}>"

    @property
    def name(self) -> str:
        return self._asked.name

    @property
    def token(self) -> str:
        return self._token

    @property
    def salt(self) -> bytes:
        return self._opened.salt

    @property
    def generation(self) -> int:
        """How often the lease has had an owner, this one included."""
        return self._opened.generation

    @property
    def clears_on_reuse(self) -> Sequence[bool]:
        """By group: whether its blocks are to be cleared each time they are used anew."""
        return self._opened.clears_on_reuse

    @property
    def era(self) -> int:
        """How often everything cached had been forgotten when a prefix was looked for last."""
        return self._era

    @property
    def num_blocks(self) -> Sequence[int]:
        """By group: blocks that it held when this owner got it."""
        return self._opened.blocks

    @property
    def closed(self) -> bool:
        return self._client is None

    def close(self) -> None:
        if self._client is None:
            return
        try:
            self._end()
        except BaseException:
            with contextlib.suppress(Exception):  # an interruption must not leave it open: nobody asks again
                self._end()
            raise
        finally:
            self._leave()

    def _end(self) -> None:
        with contextlib.suppress(StaleHandle):  # another has it, or it has ended
            self._ask(leasing.CloseLease(lease_id=self._opened.lease_id), leasing.LeaseClosed)

    def _leave(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def __del__(self, _at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        client, self._client = self._client, None
        if client is not None and not _at_exit() and os.getpid() == self._pid:
            client.close_with(leasing.CloseLease(lease_id=self._opened.lease_id))

    # --- asking -------------------------------------------------------------------------------------------------------

    def _ask(self, body: Any, kind: type[_Body], wait_s: float = 0.0) -> _Body:
        """As often as it takes: of a worker that ends, its successor is asked."""
        client = self._client
        if client is None:
            raise StaleHandle(f"lease {self.name} is closed; open another")
        try:
            return client.ask(body, kind, wait_s=wait_s)
        except (WorkerLost, Draining) as error:
            return self._ask_again(body, kind, error, wait_s)

    def _ask_again(self, body: Any, kind: type[_Body], lost: KvpageError, wait_s: float) -> _Body:
        patience = Patience(self._door.timeout_s)
        error = lost
        while True:
            patience.wait(error)
            try:
                if self._client is None or self._client.closed:
                    self._connect_again(patience)
                assert self._client is not None
                return self._client.ask(replace(body, lease_id=self._opened.lease_id), kind, wait_s=wait_s)
            except (WorkerLost, Draining, DeviceUnavailable) as again:  # the last: there is no socket for a moment
                error = again

    def _connect_again(self, patience: Patience) -> None:
        """Go on with the worker that serves the pool now. Raises `StaleHandle` where the lease has ended."""
        if os.getpid() != self._pid:
            raise StaleHandle(f"lease {self.name} was opened before a fork, and is the parent's; open another")
        client = self._door.open(max(patience.left_s, SHORTEST_ANSWER_S))
        with contextlib.ExitStack() as undo:
            undo.callback(client.close)
            body = leasing.AdoptLease(
                pool_id=self._opened.pool_id,
                name=self.name,
                token=self._token,
                generation=self._opened.generation,
                keep_s=self._asked.keep_s,
                key=self._adoption_key,  # the same one until it is known to be done
            )
            try:
                self._opened = client.ask(body, leasing.LeaseOpened)
            except NotFound as error:
                raise StaleHandle(
                    f"lease {self.name} has ended: {error.message}; open another", details=error.details
                ) from error
            undo.pop_all()
        self._adoption_key = new_key()
        self._leave()
        self._client = client

    # --- what one does with it ----------------------------------------------------------------------------------------

    def allocate_one(self, group: int) -> int:
        """One block, sooner than by `allocate`; sooner still from a `BlockStock`. Raises as `allocate`."""
        key = next(self._keys)
        body = leasing.TakeStep(lease_id=self._opened.lease_id, key=key, allocate={group: 1})
        granted = self._ask(body, leasing.Granted)
        if granted.clear:
            return int(self._ready(Step(key=key, allocate={group: 1}), 0.0)[group][0])  # the same step: the same block
        return int.from_bytes(granted.ids[group], "little")

    def free_one(self, group: int, block: int) -> None:
        """As `free` of one."""
        ids = {group: _packed([block])}
        body = leasing.TakeStep(lease_id=self._opened.lease_id, key=next(self._keys), free=ids)
        self._ask(body, leasing.Granted)

    def _take(self, step: Step, wait_s: float) -> Grant:
        body = leasing.TakeStep(
            lease_id=self._opened.lease_id,
            key=step.key or self.new_key(),
            commit={group: _computed(content) for group, content in step.commit.items()},
            retain={group: _packed(ids) for group, ids in step.retain.items()},
            free={group: _packed(ids) for group, ids in step.free.items()},
            allocate=_checked(step.allocate),
            as_runs=step.as_runs,
            wait_s=checked_seconds("wait_s", wait_s),
        )
        return _grant(self._ask(body, leasing.Granted, wait_s))

    def held(self) -> dict[int, HeldBlocks]:
        found = {}
        for group in range(len(self._opened.blocks)):
            ids, times, after, is_last = b"", b"", 0, False
            while not is_last:
                body = leasing.ListHeld(lease_id=self._opened.lease_id, group=group, after=after)
                part = self._ask(body, leasing.HeldList)
                ids, times, is_last = ids + part.ids, times + part.times, part.is_last
                after = int(_unpacked(part.ids)[-1]) if part.ids else after
            if ids:
                found[group] = HeldBlocks(_unpacked(ids), _unpacked(times))
        return found

    def inspect(self, group: int, ids: Ids) -> tuple[Ints, Ints]:
        """How often each block is held, by all leases together, and whether (1, 0) others find its content."""
        body = leasing.InspectBlocks(lease_id=self._opened.lease_id, group=group, ids=_packed(ids))
        inspected = self._ask(body, leasing.BlocksInspected)
        return _unpacked(inspected.times), np.frombuffer(inspected.is_cached, np.uint8).astype(np.int32)

    def find_contents(self, group: int, hashes: Sequence[bytes]) -> Ints:
        """The block that holds each of these contents, 0 where there is none; holds nothing."""
        body = leasing.FindContents(lease_id=self._opened.lease_id, group=group, hashes=b"".join(hashes))
        return _unpacked(self._ask(body, leasing.ContentsFound).ids)

    def find_prefix(self, hashes: Sequence[Sequence[bytes]], at_most_tokens: int) -> FoundPrefix:
        body = leasing.FindPrefix(
            lease_id=self._opened.lease_id, hashes=[b"".join(some) for some in hashes], at_most_tokens=at_most_tokens
        )
        found = self._ask(body, leasing.PrefixFound)
        self._era = found.era
        return FoundPrefix(found.num_tokens, tuple(map(_unpacked, found.ids)), tuple(found.num_revived))

    def take_prefix(self, hashes: Sequence[Sequence[bytes]], at_most_tokens: int) -> FoundPrefix:
        body = leasing.TakePrefix(
            lease_id=self._opened.lease_id,
            key=self.new_key(),
            hashes=[b"".join(some) for some in hashes],
            at_most_tokens=at_most_tokens,
        )
        taken = self._ask(body, leasing.PrefixTaken)
        self._era = taken.era
        return FoundPrefix(taken.num_tokens, tuple(map(_unpacked, taken.ids)))

    def reserve(self, counts: Counts, *, wait_s: float = 0.0, ttl_s: float = 60.0) -> SocketReservation:
        body = leasing.Reserve(
            lease_id=self._opened.lease_id,
            blocks=_checked(counts),
            wait_s=checked_seconds("wait_s", wait_s),
            ttl_s=checked_seconds("ttl_s", ttl_s),
        )
        return SocketReservation(self, self._ask(body, leasing.Reserved, wait_s).reservation_id)

    def _commit_reservation(self, reservation_id: str, counts: Counts | None) -> Grant:
        body = leasing.CommitReservation(
            lease_id=self._opened.lease_id,
            key=self.new_key(),
            reservation_id=reservation_id,
            blocks=None if counts is None else _checked(counts),
        )
        return self._cleared(_grant(self._ask(body, leasing.Granted)))

    def _end_reservation(self, reservation_id: str) -> None:
        body = leasing.EndReservation(lease_id=self._opened.lease_id, reservation_id=reservation_id)
        self._ask(body, leasing.ReservationEnded)


class SocketReservation(Reservation):
    """Made by `SocketLease.reserve`. It is lost, and its blocks with it, when the worker dies."""

    def __init__(self, lease: SocketLease, reservation_id: str) -> None:
        self._lease, self._reservation_id = lease, reservation_id

    def __repr__(self) -> str:
        return f"<SocketReservation {shorten(self._reservation_id)} of {self._lease.name}>"

    def commit(self, counts: Counts | None = None) -> Grant:
        return self._lease._commit_reservation(self._reservation_id, counts)

    def give_back(self) -> None:
        self._lease._end_reservation(self._reservation_id)


def _packed(ids: Ids) -> bytes:
    """Raises `SpecInvalid` for what can be no block ids."""
    return block_ids(ids).astype("<u4").tobytes()


def _checked(counts: Counts) -> dict[int, int]:
    """Raises `SpecInvalid` for what is no number of blocks."""
    return {
        whole_number(group, "a group"): whole_number(count, f"the number of blocks of group {group}")
        for group, count in counts.items()
    }


def _computed(content: Content) -> leasing.ComputedBlocks:
    return leasing.ComputedBlocks(ids=_packed(content.ids), hashes=b"".join(content.hashes), era=content.era)


def _unpacked(data: bytes) -> Ints:
    return np.frombuffer(data, "<u4").astype(np.int32)


def _grant(granted: leasing.Granted) -> Grant:
    ids = {group: _unpacked(some) for group, some in granted.ids.items()}
    return Grant(ids=ids, clear={group: _unpacked(some) for group, some in granted.clear.items()})
