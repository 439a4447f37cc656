"""The worker's front door: accepts clients, turns strangers away, and ends in good order."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket

from kvpage.errors import KvpageError, PermissionDenied, TooManyClients
from kvpage.wire import messages, succession
from kvpage.wire.channel import Outbox
from kvpage.wire.credentials import Peer, peer_of, supplementary_groups
from kvpage_server.worker_adoption import AdoptionWindow
from kvpage_server.worker_connection import Connection
from kvpage_server.worker_disposal import Disposal
from kvpage_server.worker_endpoint import Endpoint
from kvpage_server.worker_handover import Handover
from kvpage_server.worker_leasing import LeaseOwner
from kvpage_server.worker_limits import FDS_PER_POOL, Limits
from kvpage_server.worker_log import log
from kvpage_server.worker_loop import Loop
from kvpage_server.worker_memory import MemoryKeeper
from kvpage_server.worker_pools import PoolTable
from kvpage_server.worker_requests import Requests
from kvpage_server.worker_retirement import Retirement

_MAX_ACCEPTS = 64  # in a row, before those who are connected get their turn
_NO_FDS_PAUSE_S = 0.05  # a listening socket stays readable, so without a pause a full worker would do nothing else
_NO_FDS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Server:
    """Owns the connections; the `Handler` of each."""

    def __init__(
        self,
        endpoint: Endpoint,
        pools: PoolTable,
        keeper: MemoryKeeper,
        loop: Loop,
        disposal: Disposal,
        *,
        limits: Limits,
        group: int | None = None,
        adoption_s: float = 0.0,
    ) -> None:
        """Members of `group`, by its id, may connect too. `adoption_s`: how long to wait for pools that are kept."""
        self._endpoint = endpoint
        self._pools = pools
        self._loop = loop
        self._disposal = disposal
        self._limits = limits
        self._group = group
        self._connections: set[Connection] = set()
        self._lease_owners: dict[str, LeaseOwner] = {}
        """Of clients that were taken over, until their leases are served."""
        self._num_unfinished_bytes = 0
        self._draining = False
        self._asked_to_end = False
        self._window = AdoptionWindow(pools, endpoint, loop, adoption_s)
        self._retirement = Retirement(pools, loop, num_keepers=self._num_keepers, end=self.drain)
        self._handover = Handover(
            endpoint,
            pools,
            loop,
            accept=self._accept_all,
            connections=lambda: self._connections,
            end_waiting=lambda: self._requests.end_waiting(),
            let_go=lambda: self._requests.leave(),
            patience_s=limits.handover_s,
        )
        self._requests = Requests(
            pools,
            keeper,
            loop,
            limits,
            window=self._window,
            handover=self._handover,
            retirement=self._retirement,
            num_clients=lambda: len(self._connections),
            on_kept=lambda: endpoint.keep_epoch(pools.epoch),
        )
        loop.watch(endpoint.socket, selectors.EVENT_READ, self._accept_all)

    def __repr__(self) -> str:
        return f"<Server {self._endpoint.path} {len(self._connections)} clients, {self._pools!r}>"

    @property
    def epoch(self) -> str:
        return self._pools.epoch

    def handle(self, connection: Connection, request_id: int, body: messages.RequestBody, fds: list[int]) -> None:
        self._handover.heard(connection)
        self._requests.handle(connection, request_id, body, fds)

    def disconnected(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if not self._handover.is_finished:  # else its leases are the successor's
            self._requests.disconnected(connection)
        self._handover.disconnected(connection)
        if self._asked_to_end:
            self.drain()
        if self._draining and not self._connections:
            self._loop.stop()

    def received(self, num_bytes: int) -> None:
        self._num_unfinished_bytes += num_bytes
        limit_bytes = self._limits.max_unfinished_bytes
        if num_bytes > 0 and self._num_unfinished_bytes > limit_bytes:
            largest = max(self._connections, key=lambda connection: connection.num_unfinished_bytes)
            log("client_refused", level="warning", client_pid=largest.peer.pid, reason="most of too many bytes")
            largest.refuse(
                TooManyClients(
                    f"clients have begun requests of {self._num_unfinished_bytes} bytes together, the limit is"
                    f" {limit_bytes}, and this one has sent most of them; send requests whole, one after the other",
                    details={"limit_bytes": limit_bytes},
                )
            )

    def dispose(self, sock: socket.socket) -> None:
        self._disposal.close(sock)

    def drain(self) -> None:
        """Accept nobody, tell those who wait, send what was answered, and stop the loop."""
        self._asked_to_end = True
        if self._draining or self._handover.is_under_way:  # who takes over will not need to be told
            return
        self._draining = True
        log("draining", num_clients=len(self._connections))
        self._loop.watch(self._endpoint.socket, 0, self._accept_all)
        if not self._num_keepers():
            self._endpoint.forget_kept_epoch()
        self._endpoint.close(self._disposal.close)
        self._requests.drain()
        for connection in list(self._connections):
            connection.end()
        if not self._connections:
            self._loop.stop()
        self._loop.call_after(self._limits.end_s, self._close_all)

    def _close_all(self) -> None:
        for connection in list(self._connections):
            connection.close()

    def take(self, sock: socket.socket, packed: succession.ConnectionTaken) -> None:
        """Go on with a client of the worker that this one replaces."""
        peer = peer_of(sock)
        connection = Connection(sock, peer, self._loop, self._limits, self)
        holds = {}
        for taken in packed.holds:
            pool = holds[taken.hold_id] = self._pools.get(taken.pool_id)
            holder = messages.Holder(hold_id=taken.hold_id, pid=peer.pid, uid=peer.uid, client_name=packed.client_name)
            self._pools.restore_hold(pool, holder)
        for lease in packed.leases:
            self._lease_owners[lease.lease_id] = (connection, lease.hold_id)
        self._connections.add(connection)
        connection.unpack(packed, holds)

    def serve_leases(self) -> None:
        """From here on the block state of all pools is this worker's to change."""
        owners, self._lease_owners = self._lease_owners, {}
        self._requests.serve_leases(owners)

    def _num_keepers(self) -> int:
        return sum(connection.role == "api" for connection in self._connections)

    def _accept_all(self) -> None:
        for _ in range(_MAX_ACCEPTS):
            try:
                sock, _ = self._endpoint.socket.accept()
            except BlockingIOError:
                return
            except OSError as error:  # the client is gone again, or no descriptor is left
                log("accept_failed", level="warning", reason=str(error))
                if error.errno in _NO_FDS:
                    self._pause_accepting()
                return
            self._admit(sock)

    def _pause_accepting(self) -> None:
        self._loop.watch(self._endpoint.socket, 0, self._accept_all)
        self._loop.call_after(_NO_FDS_PAUSE_S, self._accept_again)

    def _accept_again(self) -> None:
        if not self._draining and not self._handover.is_under_way:
            self._loop.watch(self._endpoint.socket, selectors.EVENT_READ, self._accept_all)

    def _admit(self, sock: socket.socket) -> None:
        peer = peer_of(sock)
        try:
            self._check_room()
            self._check_peer(sock, peer)
        except KvpageError as error:
            log("client_refused", level="warning", client_pid=peer.pid, uid=peer.uid, reason=error.message)
            self._turn_away(sock, error)
            return
        self._connections.add(Connection(sock, peer, self._loop, self._limits, self))

    def _check_room(self) -> None:
        num_fds = len(self._connections) + self._disposal.num_stuck + FDS_PER_POOL * len(self._pools)
        num_fds += self._requests.num_fds
        limit = self._limits.max_fds_with_clients
        if num_fds >= limit:
            raise TooManyClients(
                f"{len(self._connections)} clients are connected and {len(self._pools)} pools open; the worker serves"
                f" new clients up to {limit} descriptors; raise its limit of open files (ulimit -Hn)",
                details={"num_clients": len(self._connections), "limit": limit},
            )

    def _check_peer(self, sock: socket.socket, peer: Peer) -> None:
        own = os.geteuid()
        if peer.uid in (0, own):
            return
        if self._group is None:
            raise PermissionDenied(f"uid {peer.uid} may not connect: only uid {own} and root may; see --group")
        if peer.gid != self._group and self._group not in supplementary_groups(sock):
            raise PermissionDenied(f"uid {peer.uid} is not in the group {self._group} whose members may connect")

    def _turn_away(self, sock: socket.socket, error: KvpageError) -> None:
        wire_error = messages.WireError.from_error(error)
        outbox = Outbox()
        outbox.push(messages.encode(messages.ReplyFrame(id=0, epoch=self.epoch, error=wire_error)))
        with contextlib.suppress(OSError):
            outbox.flush(sock)
        outbox.close()
        self._disposal.close(sock)
