"""A worker that answers by script, so that a client meets what a real worker never sends."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvpage.wire import messages
from kvpage.wire.channel import FrameReader, Outbox
from kvpage.wire.messages import PROTOCOL_VERSION, InvalidRequest, ReplyFrame, RequestFrame, Welcome

EPOCH = "0123456789abcdef" * 2
WELCOME = Welcome(
    version=PROTOCOL_VERSION, epoch=EPOCH, device="host", worker_pid=1, handle_kinds=["memfd"], max_frame_bytes=8 << 20
)


class Peer:
    """The worker's end of one connection; its methods block."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.fds: list[int] = []
        """Descriptors of the last request, owned by the script."""
        self._reader = FrameReader()

    def receive(self) -> RequestFrame:
        while (frame := self._reader.take()) is None:
            if not self._reader.read(self.socket):
                raise EOFError("the client has ended the connection")
        self.fds = frame.fds
        request = messages.decode_request(frame.payload)
        assert not isinstance(request, InvalidRequest)
        return request

    def reply(self, request_id: int, body: messages.ReplyBody, fds: Sequence[int] = ()) -> None:
        """Owns `fds`."""
        self.send(messages.encode(ReplyFrame(id=request_id, epoch=EPOCH, body=body)), fds)

    def fail(self, request_id: int, code: str, fds: Sequence[int] = ()) -> None:
        error = messages.WireError(code=code, message="as the script says", details={"by": "script"})
        self.send(messages.encode(ReplyFrame(id=request_id, epoch=EPOCH, error=error)), fds)

    def send(self, payload: bytes, fds: Sequence[int] = ()) -> None:
        outbox = Outbox()
        outbox.push(payload, fds)
        assert outbox.flush(self.socket)


@contextlib.contextmanager
def scripted_worker(path: Path, script: Callable[[Peer], None], *, greet: bool = True) -> Iterator[None]:
    """Run `script` for the first client of the socket at `path`, after a proper welcome unless `greet` is false.

    What the script raises is raised here; a client that ends the connection ends the script.
    """
    faults: list[BaseException] = []

    def serve(listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
            with sock, contextlib.suppress(EOFError):
                peer = Peer(sock)
                if greet:
                    peer.reply(peer.receive().id, WELCOME)
                script(peer)
        except BaseException as fault:  # noqa: BLE001 - raised again in the test's thread
            faults.append(fault)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        try:
            yield
        finally:
            thread.join()
    if faults:
        raise faults[0]
