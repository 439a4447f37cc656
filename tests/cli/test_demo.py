"""The demo runs, and its checks fire."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import kvpage
from kvpage.cli.demo_models import hybrid, target_and_draft
from kvpage.cli.demo_page import HOW_TO_GET_IT
from kvpage.cli.demo_pattern import UNTOUCHED, check_pool, owned_blocks, write_pool
from support.api_service import ApiService
from support.command_line import COMMAND, run
from support.leaks import leak_guard


def test_the_demo_plans_shares_and_checks_two_models() -> None:
    done = run("demo", "--memory", "96MiB")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": equal") == 2
    assert "all values right" in done.stdout
    assert done.stdout.endswith(f"{HOW_TO_GET_IT}\n"), "not in a terminal, so it serves no page"


@pytest.mark.long
def test_the_demo_prints_only_what_it_measured_as_json() -> None:
    done = run("demo", "--memory", "64MiB", "--device", "host", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert told["device"] == "host"
    assert [pool["pool"] for pool in told["pools"]] == ["mimo", "qwen3-next"]
    assert all(pool["values"] > 0 and pool["untouched_bytes"] > 0 for pool in told["pools"])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("to_group", [False, True])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_demo_that_is_told_to_end_leaves_nothing(run_dir: Path, number: signal.Signals, to_group: bool) -> None:
    """Ended as soon as its server is there: the server, its worker and their folder go with it. A terminal that is
    closed tells all of them, more than once. In `run_dir`, as a socket's path has room for no long folder.
    """
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip(f"{number.name} is ignored here, and so in every child")
    environment = os.environ | {"TMPDIR": str(run_dir), "COLUMNS": "100"}
    command = [*COMMAND, "demo", "--memory", "64MiB"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, start_new_session=True) as demo:
        assert demo.stdout is not None
        assert demo.stdout.readline(), "the first line is printed once the server is ready"
        for _ in range(2 if to_group else 1):
            (os.killpg if to_group else os.kill)(demo.pid, number)
        demo.stdout.read()
        assert demo.wait(60) == 128 + number
    assert list(run_dir.iterdir()) == []
    assert processes_naming(run_dir) == []


def processes_naming(path: Path) -> list[str]:
    """Command lines that name `path`."""
    found = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += [text for text in [process.read_bytes().replace(b"\0", b" ").decode()] if str(path) in text]
    return found


def test_the_search_for_processes_finds_them(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print(flush=True); input()", str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()  # before it runs, the system does not know its command line
        assert len(processes_naming(tmp_path)) == 1
        child.communicate(b"\n")


@pytest.fixture(scope="module", params=[target_and_draft(24 << 20), hybrid(80 << 20)], ids=["3:2", "hybrid"])
def pool(request: pytest.FixtureRequest) -> Iterator[kvpage.Attachment]:
    """Written once; whoever changes a byte puts it back."""
    with leak_guard(), tempfile.TemporaryDirectory(prefix="kvp-") as folder:
        with ApiService(Path(folder)) as service, service.client() as client:
            client.create_pool(request.param, name="demo")
            with kvpage.attach("demo", run_dir=folder) as kv:
                write_pool(kv)
                yield kv


def test_every_byte_is_counted_once(pool: kvpage.Attachment) -> None:
    counts = check_pool(pool)
    data_bytes = sum(
        len(owned_blocks(pool.plan, layer.group or 0)) * layer.real_page_size_bytes
        for layer in pool.plan.layers.values()
    )
    assert data_bytes + counts.untouched_bytes == pool.plan.buffer_size_bytes
    assert counts.values > 0


def test_one_wrong_byte_is_found_wherever_it_is(pool: kvpage.Attachment) -> None:
    generator = torch.Generator().manual_seed(7)
    for position in torch.randint(pool.plan.buffer_size_bytes, (12,), generator=generator).tolist():
        before = int(pool.buffer[position])
        pool.buffer[position] = before ^ 0x40
        with pytest.raises(ValueError, match=r"does not hold|was written to"):
            check_pool(pool)
        pool.buffer[position] = before
    check_pool(pool)


def test_the_null_block_belongs_to_nobody(pool: kvpage.Attachment) -> None:
    groups = range(len(pool.plan.groups))
    owned = [block for group in groups for block in owned_blocks(pool.plan, group)]
    assert sorted(owned) == list(range(1, pool.plan.num_blocks))
    first = pool.plan.layers[pool.plan.groups[0].layers[0]]
    assert bool((pool.buffer[: first.page_size_bytes] == UNTOUCHED).all())


def test_a_signal_that_comes_while_it_is_held_back_ends_the_process_afterwards() -> None:
    program = (
        "import os, signal; from kvpage.cli.ending import Ending; ending = Ending(); ending.begin()\n"
        "with ending.held_back():\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print('still here', flush=True)\n"
        "print('too far')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, "still here\n")
