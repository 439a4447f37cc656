"""What every request to a worker must keep to, whatever it asks for."""

from __future__ import annotations

from collections.abc import Sequence

from kvpage.errors import ProtocolError
from kvpage.wire import leasing, messages
from kvpage.wire.channel import close_fds


def check_request(request: messages.RequestFrame, fds: Sequence[int], *, greeted: bool) -> None:
    """Raises `ProtocolError` for one that does not, and closes `fds` then, which else stay the caller's."""
    body, kind = request.body, type(request.body)
    if kind is leasing.TakeStep and greeted and request.id and not fds:
        return  # of these there are the most
    name = kind.__name__
    expected = len(body.chunks) + 1 if isinstance(body, messages.AdoptPool) else 0
    fault = None
    if len(fds) != expected:
        fault = f"a {name} with {len(fds)} descriptors where {expected} belong"
    elif isinstance(body, messages.Hello) == greeted:
        fault = f"a {name} where " + ("hello was said already" if greeted else "the first request must be Hello")
    elif request.id == 0 and not isinstance(body, messages.Detach | leasing.CloseLease):
        fault = f"a {name} with id 0: only Detach and CloseLease go without an answer"
    if fault is not None:
        close_fds(fds)
        raise ProtocolError(fault)
