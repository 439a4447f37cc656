"""Frames and descriptors: what goes in comes out, and what breaks the rules is refused with nothing left open."""

from __future__ import annotations

import array
import os
import socket
import struct
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpage.errors import ProtocolError
from kvpage.wire.channel import MAX_FDS_PER_FRAME, MAX_FRAME_BYTES, Frame, FrameReader, Outbox, close_fds, header

HEADER_BYTES = 8


@pytest.fixture
def sockets(no_leaks: None) -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    right.setblocking(False)
    with left, right:
        yield left, right


@pytest.fixture
def reader(sockets: tuple[socket.socket, socket.socket]) -> Iterator[FrameReader]:
    reader = FrameReader()
    yield reader
    reader.close()


def open_fds(count: int) -> list[int]:
    return [os.open("/dev/null", os.O_RDONLY) for _ in range(count)]


def send(sock: socket.socket, data: bytes, fds: Sequence[int] = ()) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    assert sock.sendmsg([data], rights) == len(data)
    close_fds(fds)


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_a_frame_arrives_with_its_descriptors_and_they_do_not_outlive_an_exec(
    sockets: tuple[socket.socket, socket.socket], reader: FrameReader
) -> None:
    left, right = sockets
    inside, outside = os.pipe()
    send(left, header(5, 1) + b"hello", [inside])
    assert reader.read(right)
    frame = reader.take()
    assert frame is not None
    assert frame.payload == b"hello"
    assert not os.get_inheritable(frame.fds[0])
    os.write(outside, b"through the pipe")
    assert os.read(frame.fds[0], 100) == b"through the pipe"
    close_fds([*frame.fds, outside])
    assert reader.take() is None


def test_a_frame_that_arrives_byte_by_byte_is_whole_only_at_its_end(reader: FrameReader) -> None:
    data = header(3, 0) + b"abc"
    for byte in data[:-1]:
        reader.feed(bytes([byte]))
        assert reader.take() is None
    reader.feed(data[-1:])
    assert reader.take() == Frame(b"abc", [])


frames = st.lists(st.tuples(st.binary(min_size=1, max_size=40), st.integers(0, 3)), max_size=6)


@given(frames=frames, cuts=st.lists(st.integers(1, 30)))
def test_any_sequence_of_frames_survives_any_cutting(frames: list[tuple[bytes, int]], cuts: list[int]) -> None:
    """Descriptors are plain numbers here: the reader only hands them on."""
    numbers = iter(range(10**6, 2 * 10**6))
    expected = [Frame(payload, [next(numbers) for _ in range(count)]) for payload, count in frames]
    stream = b"".join(header(len(frame.payload), len(frame.fds)) + frame.payload for frame in expected)
    starts, position = {}, 0
    for frame in expected:
        starts[position] = frame.fds
        position += HEADER_BYTES + len(frame.payload)
    reader, received, position = FrameReader(), [], 0
    while position < len(stream):
        end = position + (cuts.pop() if cuts else len(stream))
        end = min([end, *(start for start in starts if position < start and starts[start])])  # as the kernel cuts
        reader.feed(stream[position:end], starts.get(position, []))
        position = end
        while (taken := reader.take()) is not None:
            received.append(taken)
    assert received == expected


@given(data=st.binary(max_size=64), num_fds=st.integers(0, 3))
def test_random_bytes_give_frames_within_the_limits_or_a_protocol_error(data: bytes, num_fds: int) -> None:
    reader = FrameReader()
    fds = open_fds(num_fds)
    reader.feed(data, fds)
    try:
        while (frame := reader.take()) is not None:
            close_fds(frame.fds)
            assert 0 < len(frame.payload) <= MAX_FRAME_BYTES
    except ProtocolError:
        pass
    finally:
        reader.close()
    assert not any(is_open(fd) for fd in fds)


lengths = st.sampled_from([0, 1, 3, 7, MAX_FRAME_BYTES, MAX_FRAME_BYTES + 1, 2**32 - 1])
headers = st.builds(struct.pack, st.just("<IB3s"), lengths, st.integers(0, 255), st.sampled_from([bytes(3), b"\0\0\1"]))


@given(parts=st.lists(st.one_of(headers, st.binary(max_size=8)), max_size=8))
def test_random_headers_give_frames_within_the_limits_or_a_protocol_error(parts: list[bytes]) -> None:
    reader = FrameReader()
    reader.feed(b"".join(parts))
    try:
        while (frame := reader.take()) is not None:
            assert frame.fds == []
            assert 0 < len(frame.payload) <= MAX_FRAME_BYTES
    except ProtocolError:
        pass


def test_a_truncated_frame_is_never_taken_and_its_descriptors_are_closed(reader: FrameReader) -> None:
    [fd] = open_fds(1)
    reader.feed(header(100, 1) + b"only this", [fd])
    assert reader.take() is None
    reader.close()
    assert not is_open(fd)


@pytest.mark.parametrize("length", [0, MAX_FRAME_BYTES + 1, 2**32 - 1])
def test_a_length_outside_the_limits_is_refused_by_the_header_alone(reader: FrameReader, length: int) -> None:
    reader.feed(struct.pack("<IBxxx", length, 0))
    with pytest.raises(ProtocolError):
        reader.take()


def test_more_descriptors_than_a_frame_may_have_are_refused_by_the_header_alone(reader: FrameReader) -> None:
    reader.feed(struct.pack("<IBxxx", 1, MAX_FDS_PER_FRAME + 1))
    with pytest.raises(ProtocolError):
        reader.take()


def test_header_bytes_kept_for_later_versions_must_be_zero(reader: FrameReader) -> None:
    reader.feed(struct.pack("<IB3s", 1, 0, b"\0\1\0") + b"x")
    with pytest.raises(ProtocolError):
        reader.take()


@pytest.mark.parametrize("sent", [0, 1])
def test_missing_descriptors_are_refused(reader: FrameReader, sent: int) -> None:
    reader.feed(header(1, 2) + b"x", open_fds(sent))
    with pytest.raises(ProtocolError):
        reader.take()


def test_descriptors_behind_a_frame_that_announced_none_are_surplus(reader: FrameReader) -> None:
    reader.feed(header(1, 0) + b"x", open_fds(1))
    assert reader.take() == Frame(b"x", [])
    with pytest.raises(ProtocolError):
        reader.take()


def test_surplus_descriptors_are_refused_before_the_frame_is_whole(reader: FrameReader) -> None:
    reader.feed(header(100, 1) + b"x", open_fds(2))
    with pytest.raises(ProtocolError):
        reader.take()


def test_descriptors_the_kernel_had_to_drop_are_a_protocol_error(
    sockets: tuple[socket.socket, socket.socket], reader: FrameReader
) -> None:
    left, right = sockets
    send(left, header(1, 1) + b"x", open_fds(MAX_FDS_PER_FRAME + 4))
    with pytest.raises(ProtocolError):
        reader.read(right)


def test_the_end_of_the_stream_is_told_from_no_data_yet(
    sockets: tuple[socket.socket, socket.socket], reader: FrameReader
) -> None:
    left, right = sockets
    with pytest.raises(BlockingIOError):
        reader.read(right)
    left.close()
    assert reader.read(right) is False


def test_an_outbox_keeps_what_the_socket_does_not_take_and_closes_descriptors_once_sent(
    sockets: tuple[socket.socket, socket.socket], reader: FrameReader
) -> None:
    left, right = sockets
    outbox, payload, fds = Outbox(), os.urandom(4 << 20), open_fds(2)
    outbox.push(payload, fds)
    outbox.push(b"behind it")
    assert outbox.flush(left) is False
    assert not any(is_open(fd) for fd in fds)
    received: list[Frame] = []
    while len(received) < 2:
        reader.read(right)
        outbox.flush(left)
        while (frame := reader.take()) is not None:
            received.append(frame)
    assert outbox.num_bytes == 0
    assert [frame.payload for frame in received] == [payload, b"behind it"]
    assert [len(frame.fds) for frame in received] == [2, 0]
    close_fds(received[0].fds)


def test_a_closed_outbox_has_closed_the_descriptors_it_did_not_send(no_leaks: None) -> None:
    outbox, fds = Outbox(), open_fds(3)
    outbox.push(b"never sent", fds)
    outbox.close()
    assert not any(is_open(fd) for fd in fds)
    assert outbox.num_bytes == 0


def test_a_frame_no_peer_would_accept_is_refused_and_its_descriptors_closed(no_leaks: None) -> None:
    outbox = Outbox()
    with pytest.raises(ProtocolError):
        outbox.push(bytes(MAX_FRAME_BYTES + 1), open_fds(1))
    with pytest.raises(ProtocolError):
        outbox.push(b"x", open_fds(MAX_FDS_PER_FRAME + 1))
    assert outbox.num_bytes == 0


def test_sending_to_a_peer_that_left_raises_and_sends_no_signal(sockets: tuple[socket.socket, socket.socket]) -> None:
    left, right = sockets
    right.close()
    outbox = Outbox()
    outbox.push(b"x")
    with pytest.raises(BrokenPipeError):
        outbox.flush(left)


def test_what_the_socket_does_not_take_at_once_follows_in_order() -> None:
    """A reply larger than the socket's room, one behind it, and one when all is sent."""
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        ours.setblocking(False)
        outbox, reader = Outbox(), FrameReader()
        payloads = [b"small", b"l" * (1 << 20), b"behind"]
        for payload in payloads:
            outbox.send(ours, payload)
        assert outbox.num_bytes > 0
        received: list[bytes] = []
        while len(received) < len(payloads):
            reader.read_without_fds(theirs)
            outbox.flush(ours)
            while (frame := reader.take()) is not None:
                received.append(frame.payload)
        assert received == payloads
        outbox.send(ours, b"last")
        assert outbox.num_bytes == 0
        reader.read_without_fds(theirs)
        frame = reader.take()
        assert frame is not None
        assert frame.payload == b"last"
