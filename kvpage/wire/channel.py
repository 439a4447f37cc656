"""Frames with file descriptors over a Unix stream socket: the same code on both sides, and it never blocks.

A frame is an 8-byte header (u32 little-endian length of the payload, u8 number of descriptors, 3 zero bytes) and the
payload. The descriptors of a frame are attached to its first byte. `FrameReader` cuts what arrives into frames,
`Outbox` holds what the socket did not take yet; whoever owns the socket decides when to wait.
"""

from __future__ import annotations

import array
import os
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from kvpage.errors import ProtocolError
from kvpage.owned import Descriptors, keep

MAX_FRAME_BYTES = 8 << 20
MAX_FDS_PER_FRAME = 16

_HEADER = struct.Struct("<IB3s")
_ZEROS = bytes(3)
_READ_BYTES = 64 << 10
_FD_BYTES = array.array("i").itemsize
_SEND_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)  # once: operations on Python's flags take microseconds
_RECEIVE_FLAGS = int(socket.MSG_CMSG_CLOEXEC)
_PEEK = int(socket.MSG_PEEK)
_SEEN = [bytearray(_READ_BYTES)]  # what is seen is received afterwards
_TRUNCATED = int(socket.MSG_CTRUNC)
_ANCILLARY_BYTES = socket.CMSG_SPACE(MAX_FDS_PER_FRAME * _FD_BYTES)


class Frame(NamedTuple):
    payload: bytes
    fds: list[int]
    """Open descriptors, owned by whoever took the frame."""


def close_fds(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def duplicates(fds: Sequence[int]) -> list[int]:
    """Copies of all of them, or of none."""
    copies: list[int] = []
    try:
        copies.extend(os.dup(fd) for fd in fds)
    except OSError:
        close_fds(copies)
        raise
    return copies


def keep_urgent_data(sock: socket.socket) -> None:
    """Have bytes sent with MSG_OOB read in turn. Otherwise the kernel drops them, and descriptors that came with them,
    in whatever thread reads what follows.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, 1)


def header(payload_bytes: int, num_fds: int) -> bytes:
    """The 8 bytes in front of a payload; raises `ProtocolError` when no peer would accept the frame."""
    _check_header(payload_bytes, num_fds, _ZEROS)
    return _HEADER.pack(payload_bytes, num_fds, _ZEROS)


def _check_header(payload_bytes: int, num_fds: int, zeros: bytes) -> None:
    if zeros != _ZEROS:
        raise ProtocolError(f"bytes 5 to 7 of a frame header must be zero, they are {zeros.hex()}")
    if not 0 < payload_bytes <= MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {payload_bytes} bytes: it must have 1 to {MAX_FRAME_BYTES} bytes")
    if num_fds > MAX_FDS_PER_FRAME:
        raise ProtocolError(f"a frame with {num_fds} descriptors: at most {MAX_FDS_PER_FRAME} are allowed")


class DescriptorsLost(ProtocolError):
    """Of the descriptors that came in one message only `num_received` found room, in the message or in this process."""

    def __init__(self, num_received: int) -> None:
        super().__init__(
            f"more than {MAX_FDS_PER_FRAME} descriptors in one message, or more than this process may open"
        )
        self.num_received = num_received

    def __reduce__(self) -> tuple[Any, ...]:
        return DescriptorsLost, (self.num_received,)


class _Messages(deque[tuple[bytes, list[tuple[int, int, bytes]], int, Any]]):
    """What `recvmsg` gave; it owns the descriptors in there."""

    def move_fds(self, owner: Descriptors) -> tuple[bytes, bool]:
        """Move the first message's descriptors to `owner`; its data, and whether some of its descriptors were lost."""
        data, ancillary, flags, _ = self[0]
        fds = _descriptors(ancillary)
        # No call in these two lines, so nothing can come between them: see kvpage.owned.
        owner += fds
        del self[0]
        return data, bool(flags & _TRUNCATED)

    def close(self) -> None:
        owner = Descriptors()
        while self:
            self.move_fds(owner)
        owner.close()

    def __del__(self, _at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        if not _at_exit():
            self.close()


class FrameReader:
    """Bytes and descriptors as they arrive, cut into frames. After a `ProtocolError` only `close` is of use."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._arrived = _Messages()
        self._fds = Descriptors()

    def __repr__(self) -> str:
        return f"<FrameReader {len(self._data)} bytes, {len(self._fds)} descriptors>"

    @property
    def has_untaken_fds(self) -> bool:
        return bool(self._fds)

    @property
    def num_bytes(self) -> int:
        """Of what has come and is not taken."""
        return len(self._data)

    @property
    def unread(self) -> bytes:
        """What has come of a frame that is not whole."""
        return bytes(self._data)

    def read(self, sock: socket.socket) -> bool:
        """Take what one `recvmsg` gives; False at the end of the stream.

        Raises `BlockingIOError` when a non-blocking socket has nothing, `ProtocolError` when descriptors were lost.
        """
        keep(self._arrived, sock.recvmsg, _READ_BYTES, _ANCILLARY_BYTES, _RECEIVE_FLAGS)
        num_before = len(self._fds)
        data, is_truncated = self._arrived.move_fds(self._fds)
        self._data += data
        if is_truncated:
            raise DescriptorsLost(len(self._fds) - num_before)
        return bool(data)

    def read_without_fds(self, sock: socket.socket) -> bool:
        """Like `read`, from a peer that has no reason to send descriptors: raises `ProtocolError` when it has.

        They stay in the socket. Taking them in, or letting the kernel drop them, would close them sooner or later in
        this thread, and a stranger decides how long that takes: closing a TCP socket may wait for its peer.
        `sock` must have been given to `keep_urgent_data`.
        """
        num_bytes, _, flags, _ = sock.recvmsg_into(_SEEN, 0, _PEEK)
        if flags & _TRUNCATED:  # there is no room for descriptors, so there are some
            raise ProtocolError("descriptors came where none may be sent: only role 'api' sends some, after its hello")
        if num_bytes:
            self._data += sock.recv(num_bytes)  # exactly what was seen: what came since may bring descriptors
        return num_bytes > 0

    def read_request(self, sock: socket.socket) -> memoryview | bool:
        """As `read_without_fds`; but where all that has come is one whole frame without descriptors, as a client that
        waits for its answer sends, its payload, which is right until something is read again.
        """
        seen = _SEEN[0]
        num_bytes, _, flags, _ = sock.recvmsg_into(_SEEN, 0, _PEEK)
        if flags & _TRUNCATED or self._data or num_bytes <= _HEADER.size or num_bytes == len(seen):
            return self.read_without_fds(sock)
        payload_bytes, num_fds, zeros = _HEADER.unpack_from(seen)
        if num_fds or zeros != _ZEROS or payload_bytes != num_bytes - _HEADER.size:
            return self.read_without_fds(sock)
        sock.recv(num_bytes)
        return memoryview(seen)[_HEADER.size : num_bytes]

    def feed(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Add bytes and descriptors; the reader owns the descriptors until a frame takes them."""
        self._data += data
        self._fds.extend(fds)

    def take(self) -> Frame | None:
        """The next whole frame, or None. Raises `ProtocolError` for a bad header and for missing or surplus fds."""
        if not self._data and not self._fds:
            return None
        fds = Descriptors()
        payload = self.take_into(fds)
        return None if payload is None else Frame(payload, fds.release())

    def take_into(self, fds: Descriptors) -> bytes | None:
        """As `take`, the payload alone; the frame's descriptors go into `fds`."""
        if len(self._data) < _HEADER.size:
            self._check_surplus(0 if not self._data else MAX_FDS_PER_FRAME)
            return None
        payload_bytes, num_fds, zeros = _HEADER.unpack_from(self._data)
        _check_header(payload_bytes, num_fds, zeros)
        end = _HEADER.size + payload_bytes
        if len(self._data) < end:
            self._check_surplus(num_fds)
            return None
        if len(self._fds) < num_fds:
            raise ProtocolError(f"a frame announced {num_fds} descriptors, {len(self._fds)} came with it")
        payload = bytes(memoryview(self._data)[_HEADER.size : end])
        del self._data[:end]
        self._fds.move(fds, num_fds)
        return payload

    def _check_surplus(self, expected: int) -> None:
        # Descriptors come with the first byte of their frame, so none of these can belong to a frame still to begin.
        if len(self._fds) > expected:
            raise ProtocolError(f"{len(self._fds)} descriptors came where at most {expected} were announced")

    def close(self) -> None:
        """Close every descriptor that no frame has taken. Happens at the latest when nobody refers to the reader."""
        self._data.clear()
        self._fds.close()
        self._arrived.close()


def _descriptors(ancillary: Iterable[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % _FD_BYTES])
    return fds.tolist()


class _Outgoing:
    """One frame on its way; `fds` is empty once they are sent."""

    def __init__(self, data: bytes, fds: Sequence[int]) -> None:
        self.rest = memoryview(data)
        self.fds = list(fds)


class Outbox:
    """Frames in the order they go out. It owns their descriptors and closes each one when it is sent or given up."""

    def __init__(self) -> None:
        self._frames: deque[_Outgoing] = deque()
        self.num_bytes = 0

    def __repr__(self) -> str:
        return f"<Outbox {len(self._frames)} frames, {self.num_bytes} bytes>"

    @property
    def has_unsent_fds(self) -> bool:
        return any(frame.fds for frame in self._frames)

    @property
    def unsent(self) -> bytes:
        """The rest of all frames, without the descriptors of those that have not begun."""
        return b"".join(frame.rest for frame in self._frames)

    def push_rest(self, data: bytes) -> None:
        """Queue the rest of frames that another process has begun to send."""
        if data:
            self._frames.append(_Outgoing(data, ()))
            self.num_bytes += len(data)

    def push(self, payload: bytes, fds: Sequence[int] = ()) -> None:
        """Queue a frame and take over `fds`, which are closed even if the frame is refused."""
        try:
            data = header(len(payload), len(fds)) + payload
        except ProtocolError:
            close_fds(fds)
            raise
        self._frames.append(_Outgoing(data, fds))
        self.num_bytes += len(data)

    def send(self, sock: socket.socket, payload: bytes) -> bool:
        """`push` without descriptors, and `flush` as far as goes in one call; True when nothing is left."""
        if self._frames:
            self.push(payload)
            return False
        data = header(len(payload), 0) + payload
        try:
            sent = sock.send(data, _SEND_FLAGS)
        except BlockingIOError:
            sent = 0
        if sent == len(data):
            return True
        self.push_rest(data[sent:])
        return False

    def flush(self, sock: socket.socket) -> bool:
        """Send what the socket takes without waiting; True when nothing is left."""
        while self._frames:
            try:
                self._send_some(sock, self._frames[0])
            except BlockingIOError:
                return False
        return True

    def _send_some(self, sock: socket.socket, frame: _Outgoing) -> None:
        if frame.fds:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", frame.fds))]
            sent = sock.sendmsg([frame.rest], rights, _SEND_FLAGS)
            close_fds(frame.fds)
            frame.fds = []
        else:
            sent = sock.send(frame.rest, _SEND_FLAGS)
        self.num_bytes -= sent
        frame.rest = frame.rest[sent:]
        if not frame.rest:
            self._frames.popleft()

    def close(self) -> None:
        """Give up what was not sent."""
        while self._frames:
            close_fds(self._frames.popleft().fds)
        self.num_bytes = 0
