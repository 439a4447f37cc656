"""Sends a worker what no client should: random bytes, broken frames, wrong descriptors, mutated conversations."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from kvpage.wire import messages, succession
from kvpage.wire.channel import MAX_FDS_PER_FRAME, FrameReader, close_fds, header
from kvpage.wire.messages import RequestFrame

POOL_ID = "pool-" + "0" * 16
PLAN_ID = "sha256:" + "0" * 64
CHUNK = messages.ChunkInfo(kind="memfd", size_bytes=4096)
MAX_PER_CONNECTION = 40
TIMEOUT_S = 60.0

# Nothing here ends or replaces the worker, or fills it up: those are allowed to whoever is role `api`.
CONVERSATION: tuple[messages.RequestBody, ...] = (
    messages.DescribeDevice(),
    messages.CreatePool(name="fuzzed", plan_id=PLAN_ID, plan=b"{}", buffer_size_bytes=4096),
    messages.ListPools(),
    messages.GetPool(pool_id=POOL_ID),
    messages.FindPool(name="precious"),
    messages.WaitPool(pool_id=POOL_ID, timeout_s=0.0),
    messages.Attach(name="precious", known_plan_id=PLAN_ID),
    messages.Attach(pool_id=POOL_ID, plan_id=PLAN_ID),
    messages.Detach(hold_id=1),
    messages.ExportPool(pool_id=POOL_ID),
    messages.AdoptPool(chunks=[CHUNK]),
    succession.FinishAdoption(),
    succession.TakeConnection(number=0),
    succession.FinishTakeOver(),
)
FOREIGN: tuple[Any, ...] = (
    None,
    True,
    -1,
    2**63,
    2**64 - 1,
    1.5,
    float("nan"),
    "",
    "\ud800",
    "x" * 5000,
    b"\0",
    [],
    {},
    [[]] * 9,
)


class Fuzzer:
    """What a connection is sent is chosen by `seed` and its number; how far it gets is up to the worker."""

    def __init__(self, socket_path: Path, seed: int) -> None:
        self._path = socket_path
        self._seed = seed
        self._random = random.Random()
        self.num_sent = 0
        self.num_connections = 0

    def send(self, num_messages: int) -> None:
        """At least that many, over as many connections as it takes: most end by what they are sent."""
        target = self.num_sent + num_messages
        while self.num_sent < target:
            self._converse()

    def _converse(self) -> None:
        self.num_connections += 1
        self._random.seed(f"{self._seed}/{self.num_connections}")
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(TIMEOUT_S)
            sock.connect(str(self._path))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                if self._random.random() < 0.9:
                    role: messages.Role = self._random.choice(("client", "api"))
                    version = self._random.choice((1, 1, 1, 1, 1, 1, 0, 2, 2**31))
                    self._frame(sock, messages.Hello(version=version, role=role, client_name="fuzz"))
                for _ in range(self._random.randrange(1, MAX_PER_CONNECTION)):
                    self._random.choice(KINDS)(self, sock)
                    self.num_sent += 1
                    self._drain(sock)

    def _drain(self, sock: socket.socket) -> None:
        """Read what is there; descriptors are closed. A worker that has hung up ends the conversation."""
        reader = FrameReader()
        sock.setblocking(False)
        try:
            with contextlib.suppress(BlockingIOError):
                if not reader.read(sock):
                    raise ConnectionResetError
        finally:
            reader.close()
            sock.settimeout(TIMEOUT_S)

    # --- kinds of messages -------------------------------------------------------------------------------------------

    def valid(self, sock: socket.socket) -> None:
        self._frame(sock, self._random.choice(CONVERSATION))

    def random_bytes(self, sock: socket.socket) -> None:
        sock.sendall(self._random.randbytes(self._random.randrange(1, 200)))

    def random_payload(self, sock: socket.socket) -> None:
        self._payload(sock, self._random.randbytes(self._random.randrange(1, 200)))

    def flipped_bits(self, sock: socket.socket) -> None:
        data = bytearray(self._encoded())
        for _ in range(self._random.randrange(1, 4)):
            data[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
        self._payload(sock, bytes(data))

    def truncated(self, sock: socket.socket) -> None:
        payload = self._encoded()
        data = header(len(payload), 0) + payload
        sock.sendall(data[: self._random.randrange(1, len(data))])

    def foreign_fields(self, sock: socket.socket) -> None:
        """A request with one field of another type, one too many, or one missing."""
        request = msgspec.to_builtins(self._request(), builtin_types=(bytes,))
        body = request["body"]
        name = self._random.choice([*body, "surplus", "id"])
        target = request if name == "id" else body
        if self._random.random() < 0.3:
            target.pop(name, None)
        else:
            target[name] = self._random.choice(FOREIGN)
        with contextlib.suppress(UnicodeEncodeError):
            self._payload(sock, msgspec.msgpack.encode(request))

    def surplus_fds(self, sock: socket.socket) -> None:
        payload = self._encoded()
        self._with_fds(sock, header(len(payload), 0) + payload, self._random.randrange(1, 20))

    def wrong_number_of_fds(self, sock: socket.socket) -> None:
        payload = self._encoded()
        announced = self._random.randrange(MAX_FDS_PER_FRAME + 1)
        self._with_fds(sock, header(len(payload), announced) + payload, self._random.randrange(MAX_FDS_PER_FRAME + 1))

    def strange_fds(self, sock: socket.socket) -> None:
        """A pool to adopt, made of pipes and folders."""
        payload = messages.encode(RequestFrame(id=1, body=messages.AdoptPool(chunks=[CHUNK])))
        self._with_fds(sock, header(len(payload), 2) + payload, 2)

    def broken_header(self, sock: socket.socket) -> None:
        numbers = (self._random.choice((0, 1, 2**23, 2**23 + 1, 2**32 - 1)), self._random.choice((0, 16, 17, 255)))
        sock.sendall(struct.pack("<IB3s", *numbers, self._random.choice((b"\0\0\0", b"\0\0\1"))))

    def in_pieces(self, sock: socket.socket) -> None:
        payload = self._encoded()
        data = header(len(payload), 0) + payload
        cut = self._random.randrange(len(data))
        sock.sendall(data[:cut])
        sock.sendall(data[cut:])

    # --- sending -----------------------------------------------------------------------------------------------------

    def _request(self) -> RequestFrame:
        request_id = self._random.choice((0, 1, 1, 1, 2**64 - 1, self._random.randrange(2**32)))
        ack = self._random.choice((None, 0, 1, 2**40))
        return RequestFrame(id=request_id, ack=ack, body=self._random.choice(CONVERSATION))

    def _encoded(self) -> bytes:
        return messages.encode(self._request())

    def _frame(self, sock: socket.socket, body: messages.RequestBody) -> None:
        self._payload(sock, messages.encode(RequestFrame(id=self._random.randrange(1, 2**32), ack=1, body=body)))

    def _payload(self, sock: socket.socket, payload: bytes) -> None:
        sock.sendall(header(len(payload), 0) + payload)

    def _with_fds(self, sock: socket.socket, data: bytes, count: int) -> None:
        fds: list[int] = []
        try:
            fds.extend(os.open(self._random.choice(("/dev/null", "/", "/dev/zero")), os.O_RDONLY) for _ in range(count))
            sent = socket.send_fds(sock, [data], fds)
            sock.sendall(data[sent:])
        finally:
            close_fds(fds)


KINDS: tuple[Callable[[Fuzzer, socket.socket], None], ...] = (
    Fuzzer.valid,
    Fuzzer.valid,
    Fuzzer.random_bytes,
    Fuzzer.random_payload,
    Fuzzer.flipped_bits,
    Fuzzer.flipped_bits,
    Fuzzer.truncated,
    Fuzzer.foreign_fields,
    Fuzzer.foreign_fields,
    Fuzzer.foreign_fields,
    Fuzzer.surplus_fds,
    Fuzzer.wrong_number_of_fds,
    Fuzzer.strange_fds,
    Fuzzer.broken_header,
    Fuzzer.in_pieces,
)
