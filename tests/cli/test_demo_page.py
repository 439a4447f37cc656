"""The demo's page: served with pools that are in use, until Ctrl-C, and nothing is left then."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import kvpage
from kvpage.client.block_resources import PoolBlocks
from support.command_line import COMMAND
from support.eventually import until
from support.leaks import leak_guard

LINE = re.compile(r"^open (http://127\.0\.0\.1:\d+)/ui#token=(\S+) \((Ctrl-C|kill \d+) ends it\)\r?$", re.MULTILINE)
SOON_S = 25
"""Much for ending, and less than the half minute that a lease waits for a worker that is gone."""
IGNORING_SIGINT = ("sh", "-c", "trap '' INT; exec \"$@\"", "sh")  # as the background job of a script is started
PAGE = """
from rich.console import Console
from kvpage.cli.demo_page import show_page
from kvpage.cli.ending import Ending
ending = Ending()
ending.begin()
show_page(Console(soft_wrap=True), ending, 16 << 20, "host")
"""


@contextmanager
def page(run_dir: Path, *before: str) -> Iterator[tuple[subprocess.Popen[str], str, str, str]]:
    """A page that is served, without the check before it; its address, its token, and how it is ended.

    In a session of its own, so that all its processes can be told at once, as a terminal does. `before`: the begin of
    its command line.
    """
    environment = os.environ | {"TMPDIR": str(run_dir)}
    command = [*before, sys.executable, "-c", PAGE]
    with leak_guard(), subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as served:  # fmt: skip
        try:
            assert served.stdout is not None
            found = LINE.match(served.stdout.readline())
            assert found is not None
            yield served, found[1], found[2], found[3]
        finally:
            served.kill()


def test_the_page_shows_pools_in_use_until_ctrl_c(run_dir: Path) -> None:
    with page(run_dir) as (served, url, token, how_to_end):
        assert how_to_end == "Ctrl-C"
        token_file = next(run_dir.glob("*/tokens"))
        assert token_file.stat().st_mode & 0o777 == 0o600
        with kvpage.Client(url, token=token) as client:
            pools = {pool.name: pool for pool in client.pools()}
            assert set(pools) == {"mimo", "mimo-nested"}
            blocks = until(lambda: _used(client, pools["mimo"].id))
            assert {lease.client_name for lease in blocks.leases} == {"chat-0", "batch-0"}
            assert served.pid not in {lease.pid for lease in blocks.leases}
            with pytest.raises(kvpage.KvpageError) as refusal:
                client.delete_pool(pools["mimo"].id)
            assert refusal.value.code == "permission-denied", "its token may only read"
        os.killpg(served.pid, signal.SIGINT)
        assert served.wait(SOON_S) == 0
    assert list(run_dir.iterdir()) == []


def test_a_page_whose_service_is_ended_by_others_says_so_and_ends_at_once(run_dir: Path) -> None:
    with page(run_dir, *IGNORING_SIGINT) as (served, url, token, how_to_end):
        assert how_to_end == f"kill {served.pid}", "Ctrl-C would do nothing"
        os.killpg(served.pid, signal.SIGINT)
        with kvpage.Client(url, token=token) as client:
            until(lambda: _used(client, client.find_pool("mimo").id))
        os.kill(_service_in(run_dir), signal.SIGTERM)
        assert served.wait(SOON_S) == 1
        assert served.stderr is not None
        assert "kvpage serve, which serves the page, was ended by something else" in served.stderr.read()
    assert list(run_dir.iterdir()) == []


def _service_in(run_dir: Path) -> int:
    """Process id of the one service that has its run directory in `run_dir`."""
    found = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # one that has just ended
            words = process.read_bytes().split(b"\0")
            if b"serve" in words and any(word.startswith(os.fsencode(run_dir)) for word in words):
                found.append(int(process.parent.name))
    assert len(found) == 1
    return found[0]


def _used(client: kvpage.Client, pool_id: str) -> PoolBlocks | None:
    """The pool's blocks, once two leases have some."""
    blocks = client.get_pool(pool_id).blocks
    assert blocks is not None
    return blocks if len(blocks.leases) == 2 and all(sum(lease.blocks) for lease in blocks.leases) else None


@pytest.mark.long
def test_in_a_terminal_the_demo_ends_with_the_page_and_ctrl_c_ends_the_page(run_dir: Path) -> None:
    primary, secondary = pty.openpty()
    environment = os.environ | {"TMPDIR": str(run_dir), "COLUMNS": "100", "TERM": "dumb"}
    command = [*COMMAND, "demo", "--memory", "96MiB", "--device", "host"]
    with subprocess.Popen(command, stdin=secondary, stdout=secondary, env=environment, start_new_session=True) as demo:
        os.close(secondary)
        said = ""
        while not LINE.search(said):
            said += os.read(primary, 65536).decode()
        assert "all values right" in said
        os.killpg(demo.pid, signal.SIGINT)  # as the terminal does
        assert demo.wait(60) == 0
    os.close(primary)
    assert list(run_dir.iterdir()) == []
