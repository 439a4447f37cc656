"""What one client may take from a worker."""

from __future__ import annotations

import resource
from dataclasses import dataclass

from kvpage.errors import NotEnoughMemory, TooManyClients

FDS_PER_POOL = 2  # chunk and control block

_CLIENT_SHARE = 0.8
_POOL_SHARE = 0.9
_OWN_FDS = 32  # standard streams, selector, lock, listening socket, libraries


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    hello_s: float = 5.0
    """How long a new connection may take to say hello."""
    stall_s: float = 5.0
    """How long a client may leave waiting replies unread."""
    frame_s: float = 10.0
    """How long a request that has begun may take to be whole."""
    end_s: float = 5.0
    """How long clients may take to read what was answered when the worker ends."""
    handover_s: float = 5.0
    """How long a new worker that takes over from this one may say nothing; meanwhile nobody is served. Less than the
    10 s for which clients wait for an answer: the server would think that this worker hangs.
    """
    lease_grace_s: float = 10.0
    """How long the blocks of a client whose connection has ended stay, where the kernel cannot say whether its process
    has."""
    max_queued_bytes: int = 1 << 20
    """No request of a client is looked at while more than this of its replies waits."""
    max_unfinished_bytes: int = 64 << 20
    """Of all clients together: what has come of requests that are not whole. Beyond it, whoever has sent most goes."""
    max_holds: int = 1024
    """Of one connection."""
    max_leases: int = 1024
    """Of one connection, which are bound to it."""
    max_waits: int = 16
    """Of one connection: requests to be answered later."""
    max_pools: int = 1024
    """Of one worker, so that all of them fit into one reply, however long their names and those of their holders."""
    max_plans_bytes: int = 512 << 20
    """Of all pools together. A plan is kept twice, in the worker and in the control block, and where the device is not
    the host no other limit counts that.
    """
    max_fds: int = 1024
    """Descriptors this process may have open."""

    def check_plans(self, plans_bytes: int) -> None:
        """Raises `NotEnoughMemory` when the plans of all pools would take as much."""
        if plans_bytes > self.max_plans_bytes:
            raise NotEnoughMemory(
                f"the plans of all pools would have {plans_bytes} bytes, at most {self.max_plans_bytes} are kept;"
                " delete pools",
                details={"needed_bytes": plans_bytes, "available_bytes": self.max_plans_bytes},
            )

    def check_pools(self, num_pools: int) -> None:
        """Raises `TooManyClients` when no further pool may be made or adopted."""
        if num_pools >= self.max_pools:
            raise TooManyClients(
                f"{num_pools} pools are open, as many as a worker may have; delete some",
                details={"num_pools": num_pools, "limit": self.max_pools},
            )

    @property
    def max_fds_with_clients(self) -> int:
        """New clients are refused from here on, so that those who are there can be served."""
        return int(self.max_fds * _CLIENT_SHARE) - _OWN_FDS

    @property
    def max_fds_with_pools(self) -> int:
        return int(self.max_fds * _POOL_SHARE) - _OWN_FDS


def raise_fd_limit() -> int:
    """Let this process open as many descriptors as it may; returns that number."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
