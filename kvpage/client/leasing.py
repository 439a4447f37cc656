"""Leasing blocks of a pool through its worker's socket.

    with kvpage.open_lease("mimo", name="engine-0") as lease:
        blocks = lease.allocate_all({0: 12, 1: 3})

When the worker dies or is replaced, the lease goes on with its successor: the request under way is asked again there,
and done once.
"""

from __future__ import annotations

import secrets

from kvpage.client.arguments import checked_optional, checked_seconds, checked_text
from kvpage.client.finding import (
    DEFAULT_TIMEOUT_S,
    SHORTEST_ANSWER_S,
    device_with,
    find_run_directory,
    program_name,
)
from kvpage.client.patience import Patience
from kvpage.client.socket_lease import Door, SocketLease
from kvpage.errors import KvpageError
from kvpage.pages.block_lease import Clear
from kvpage.pages.steps import new_key
from kvpage.wire import leasing
from kvpage.wire.values import MAX_NAME_BYTES


def open_lease(
    pool: str,
    *,
    name: str,
    tenant: str = "",
    token: str | None = None,
    keep_s: float = 0.0,
    clear: Clear | None = None,
    device: str | None = None,
    run_dir: str | None = None,
    client_name: str | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> SocketLease:
    """A lease on blocks of the pool of this name, without blocks at first. Needs only the worker.

    `token`: what proves, to `adopt_lease`, that one may; None: a new one. `keep_s`: how long its blocks stay
    when this process dies, for one who adopts them. `clear`: `Attachment.clear`, for blocks that must be cleared before
    they are used. `timeout_s`: for the worker's answers, and to go on trying while none answers.

    Raises `PoolNotFound`, `Conflict` where the name is taken or several devices have the pool, `NotSupported` where the
    pool's blocks cannot be leased, `TooManyClients`, `SpecInvalid`, `WorkerLost`, `DeviceUnavailable`,
    `PermissionDenied`.
    """
    token = secrets.token_hex(16) if token is None else token  # made here: an answer may be lost
    body = leasing.OpenLease(
        pool_name=checked_text("pool", pool, max_bytes=MAX_NAME_BYTES),
        name=checked_text("name", name, max_bytes=MAX_NAME_BYTES),
        tenant=tenant,
        token=token,
        keep_s=checked_seconds("keep_s", keep_s),
        key=new_key(),
    )
    return _begin(body, token, clear, device, run_dir, client_name, timeout_s)


def adopt_lease(
    pool: str,
    *,
    name: str,
    token: str,
    keep_s: float = 0.0,
    clear: Clear | None = None,
    device: str | None = None,
    run_dir: str | None = None,
    client_name: str | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> SocketLease:
    """The lease of this name with all its blocks (`SocketLease.held`), from an owner that has died, or has not: that
    one can do nothing with it any more. Raises as `open_lease`; `NotFound` where there is no such lease,
    `PermissionDenied` for a wrong token.
    """
    body = leasing.AdoptLease(
        pool_name=checked_text("pool", pool, max_bytes=MAX_NAME_BYTES),
        name=checked_text("name", name, max_bytes=MAX_NAME_BYTES),
        token=checked_text("token", token),
        keep_s=checked_seconds("keep_s", keep_s),
        key=new_key(),
    )
    return _begin(body, token, clear, device, run_dir, client_name, timeout_s)


def _begin(
    body: leasing.OpenLease | leasing.AdoptLease,
    token: str,
    clear: Clear | None,
    device: str | None,
    run_dir: str | None,
    client_name: str | None,
    timeout_s: float,
) -> SocketLease:
    checked_optional("device", device)
    checked_optional("client_name", client_name, max_bytes=MAX_NAME_BYTES)
    patience = Patience(checked_seconds("timeout_s", timeout_s))
    runs = find_run_directory(run_dir)
    shown = program_name() if client_name is None else client_name
    while True:
        answer_s = max(patience.left_s, SHORTEST_ANSWER_S)
        try:
            where = device if device is not None else device_with(str(body.pool_name), runs, answer_s)
            door = Door(runs, where, shown, max(timeout_s, SHORTEST_ANSWER_S))
            client = door.open(answer_s)
            try:
                opened = client.ask(body, leasing.LeaseOpened)
            except BaseException:
                client.close()
                raise
            return SocketLease(door, client, body, opened, token, clear)
        except KvpageError as error:
            patience.wait(error)
