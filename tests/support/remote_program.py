"""Run as a program: a client process that does what it is told, one JSON command on a line of standard input.

Needs kvpage and nothing else of the tests, so it also runs as another user and in other namespaces.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import Any

from kvpage.errors import KvpageError
from kvpage.memory.base import Mapping
from kvpage.memory.kinds import memory_kind
from kvpage.wire import leasing, messages
from kvpage.wire.client import WorkerClient


class Program:
    """One method for each command; what it returns is the answer."""

    def __init__(self) -> None:
        self.client: WorkerClient | None = None
        self.mapping: Mapping | None = None

    def connect(self, *, socket: str, role: messages.Role = "client", name: str = "remote") -> dict[str, Any]:
        self.client = WorkerClient(socket, role=role, client_name=name, timeout_s=60)
        return {"epoch": self.client.epoch, "worker_pid": self.client.welcome.worker_pid}

    def create(self, *, name: str, plan_id: str, size_bytes: int) -> dict[str, Any]:
        assert self.client is not None
        body = messages.CreatePool(name=name, plan_id=plan_id, plan=b"{}", buffer_size_bytes=size_bytes)
        pool = self.client.ask(body, messages.PoolCreated).pool
        ready = self.client.ask(messages.WaitPool(pool_id=pool.pool_id, timeout_s=60), messages.PoolState)
        return {"pool_id": ready.pool_id, "state": ready.state}

    def attach(self, *, name: str, epoch: str | None = None) -> dict[str, Any]:
        assert self.client is not None
        reply = self.client.request(messages.Attach(name=name, epoch=epoch))
        assert isinstance(reply.body, messages.Attached)
        [fd], [info] = reply.fds, reply.body.chunks
        self.mapping = memory_kind(info.kind, info.device_uuid).map_chunk(fd, info.size_bytes, info.handle)
        os.close(fd)
        return {"hold_id": reply.body.hold_id, "pool_id": reply.body.pool.pool_id}

    def write(self, *, offset: int, data: str) -> dict[str, Any]:
        assert self.mapping is not None
        encoded = data.encode()
        assert offset + len(encoded) <= self.mapping.size_bytes
        ctypes.memmove(self.mapping.address + offset, encoded, len(encoded))
        return {}

    def read(self, *, offset: int, size_bytes: int) -> dict[str, Any]:
        assert self.mapping is not None
        assert offset + size_bytes <= self.mapping.size_bytes
        return {"data": ctypes.string_at(self.mapping.address + offset, size_bytes).decode()}

    def open_lease(self, **options: Any) -> dict[str, Any]:
        assert self.client is not None
        opened = self.client.ask(leasing.OpenLease(**options), leasing.LeaseOpened)
        return {"lease_id": opened.lease_id, "token": opened.token}

    def allocate(self, *, lease_id: str, count: int, wait_s: float = 0.0) -> dict[str, Any]:
        assert self.client is not None
        step = leasing.TakeStep(lease_id=lease_id, allocate={0: count}, wait_s=wait_s)
        return {"ids": list(memoryview(self.client.ask(step, leasing.Granted).ids[0]).cast("I"))}

    def hang_up(self) -> dict[str, Any]:
        """And live on."""
        assert self.client is not None
        self.client.close()
        return {}

    def become(self, *, uid: int, gid: int, groups: list[int]) -> dict[str, Any]:
        """For the rest of its life; a fresh interpreter of another user might not be allowed to read Python itself."""
        os.setgroups(groups)
        os.setgid(gid)
        os.setuid(uid)
        return {}

    def namespace(self, *, kind: str) -> dict[str, Any]:
        return {"id": os.readlink(f"/proc/thread-self/ns/{kind}")}

    def who(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "uid": os.geteuid()}


def main() -> None:
    program = Program()
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(program, command.pop("do"))(**command)
        except KvpageError as error:
            answer = {"error": error.code, "message": error.message}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
