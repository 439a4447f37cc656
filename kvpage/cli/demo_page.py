"""The end of `kvpage demo` in a terminal: a service that stays, with pools that are in use, and its web page."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from kvpage.cli.demo_models import target_and_draft
from kvpage.cli.demo_service import Service, end, run_directory, service
from kvpage.cli.ending import Ending
from kvpage.client.http import Client
from kvpage.errors import InternalError

HOW_TO_GET_IT = "the web page: kvpage demo --page, or make demo in a terminal"
POOL_BYTES = 128 << 20
_USERS = (("mimo", "chat-0"), ("mimo", "batch-0"), ("mimo-nested", "chat-1"), ("mimo-nested", "batch-1"))
"""Pools, and the processes that use them."""


def show_page(console: Console, ending: Ending, memory_bytes: int, device: str) -> None:
    """Print where the page is, and serve it until Ctrl-C. Other signals end the process as ever.

    Where SIGINT was ignored before this process began, as for a background job of a script, it stays so.
    """
    token, port = secrets.token_urlsafe(24), free_port()
    with run_directory(None) as run_dir:
        token_file = Path(run_dir) / "tokens"
        token_file.touch(mode=0o600)
        token_file.write_text(f"read page {token}\n")
        arguments = ["--port", str(port), "--token-file", str(token_file)]
        with service(run_dir, device, ending, *arguments) as served, Client(run_dir=run_dir) as client:
            for name, request in _pools(min(memory_bytes, POOL_BYTES)):
                client.create_pool(request, device=device, name=name)
            with ExitStack() as users:
                for pool, name in _USERS:
                    users.enter_context(_user(pool, name, run_dir, ending))
                console.print(f"open http://127.0.0.1:{port}/ui#token={token} ({_how_to_end()} ends it)", markup=False)
                sys.stdout.flush()  # whoever reads it through a pipe waits for this line
                _wait(served)


def _how_to_end() -> str:
    return f"kill {os.getpid()}" if signal.getsignal(signal.SIGINT) is signal.SIG_IGN else "Ctrl-C"


def _pools(memory_bytes: int) -> Iterator[tuple[str, dict[str, Any]]]:
    request = target_and_draft(memory_bytes)
    yield "mimo", request
    yield "mimo-nested", request | {"strategy": "nested"}


@contextmanager
def _user(pool: str, name: str, run_dir: str, ending: Ending) -> Iterator[None]:
    """A process that leases blocks until the block ends, or this process does: its standard input closes with it.

    It is not only told through its input: while its worker is gone it waits for another one, for half a minute.
    """
    command = [sys.executable, "-m", "kvpage.cli.demo_churn", pool, name, run_dir]
    with ExitStack() as stack:
        with ending.held_back():
            user = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                start_new_session=True,  # the terminal's Ctrl-C is for this process
            )  # fmt: skip
            stack.push(user)  # closes the input
            stack.callback(end, user)
        yield


def _wait(served: Service) -> None:
    """Returns at Ctrl-C, which is how it is meant to end. Raises `InternalError` when the service ends before."""
    try:
        status = served.process.wait()
    except SystemExit as ended:
        if ended.code != 128 + signal.SIGINT:
            raise
        return
    raise InternalError(
        f"kvpage serve, which serves the page, was ended by something else (status {status}):\n{served.last_words()}"
    )


def free_port() -> int:
    """Of 127.0.0.1. Another process may take it in the moment until it is used: then the service says so and ends."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
