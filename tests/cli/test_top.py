"""`kvpage top`: what it shows is what the service says, on any terminal and none, until it is told to stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import msgspec
import pytest
from rich.console import Console

import kvpage
from kvpage.cli.top_frame import Frame, Frames, PoolFrame
from kvpage.cli.top_view import CACHED, FREE, QUARANTINED, USED, bar, view
from kvpage.client.block_resources import GroupBlocks, Latency, LeaseState, PoolBlocks, TenantState
from kvpage.client.http import Client
from kvpage.client.resources import Device, Failure, Pool
from kvpage.errors import PoolNotFound
from kvpage.exit_status import INTERRUPTED, TRY_AGAIN
from support.api_service import ApiService
from support.command_line import COMMAND, run, run_here
from support.leaks import leak_guard
from support.leased_pools import LAYERS, content
from support.screen import Screen

ESCAPES = "a\x1b[31mb\x9b2J\u202ec\rd[bold]"
REQUEST = {
    "layers": LAYERS["three"], "strategy": "nested", "allocator": "slabs", "num_blocks": 64, "max_model_len": 16,
    "max_num_batched_tokens": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def service() -> Iterator[ApiService]:
    with leak_guard(), tempfile.TemporaryDirectory(prefix="kvp-") as folder:
        with ApiService(Path(folder), "--memory", "64MiB") as service, service.client() as client:
            for name in ("mimo", "draft"):
                client.create_pool(REQUEST, name=name)
            yield service


@pytest.fixture
def run_dir(service: ApiService) -> str:
    return str(service.run_directory.path)


# --- one frame --------------------------------------------------------------------------------------------------------


def test_one_frame_shows_who_has_what_in_80_columns_without_colours(run_dir: str) -> None:
    with kvpage.open_lease("mimo", name="engine-0", tenant="acme", run_dir=run_dir, client_name="vllm") as lease:
        ids = lease.allocate_all({0: 13, 1: 50})
        lease.commit(1, ids[1][:20], [content(number) for number in range(1, 21)])
        lease.free(1, ids[1][:20])
        done = run_here("top", "--once", "--run-dir", run_dir, COLUMNS="80")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in done.stdout
    [engine] = [line.split() for line in lines if line.startswith("engine-0")]
    assert engine[1:6] == ["acme", "vllm", "active", str(os.getpid()), "-"]
    [tenant] = [line.split() for line in lines if line.startswith("acme")]
    assert tenant[1:] == ["328", "KiB", "-", "1", "0", "0", "0", "0.0", "s"]
    numbers = [line.split("]")[1].split() for line in lines if line[:2] in ("0 ", "1 ", "2 ")]
    assert numbers[:2] == [["13", "0", "0", "42", "0"], ["30", "20", "2", "170", "0"]]
    assert "pool draft on host: ready, 1 MiB" in done.stdout


def ageless(pool: Pool) -> Pool:
    """Without what grows from one look to the next."""
    assert pool.blocks is not None
    leases = [msgspec.structs.replace(lease, owner_age_s=None) for lease in pool.blocks.leases]
    return msgspec.structs.replace(pool, blocks=msgspec.structs.replace(pool.blocks, leases=leases))


def test_json_is_what_the_service_says(run_dir: str, service: ApiService) -> None:
    with kvpage.open_lease("mimo", name="engine-0", run_dir=run_dir) as lease:
        lease.allocate(1, 5)
        done = run_here("top", "--once", "--json", "--pool", "mimo", "--run-dir", run_dir)
        with service.client() as client:
            pool = client.find_pool("mimo")
            expected = client.get_pool(pool.id)
    frame = msgspec.json.decode(done.stdout, type=Frame)
    assert [ageless(found.pool) for found in frame.pools] == [ageless(expected)]
    assert frame.pools[0].steps_per_s is None
    assert [device.device for device in frame.devices] == ["host"]
    blocks = frame.pools[0].pool.blocks
    assert blocks is not None
    assert [group.used for group in blocks.groups] == [0, 5, 0]
    assert blocks.leases[0].pid == os.getpid()


def test_a_pool_is_chosen_by_name_or_id(run_dir: str, service: ApiService) -> None:
    with service.client() as client:
        pool_id = client.find_pool("draft").id
    for chosen in ("draft", pool_id):
        frame = json.loads(run_here("top", "--once", "--json", "--pool", chosen, "--run-dir", run_dir).stdout)
        assert [found["pool"]["name"] for found in frame["pools"]] == ["draft"]


@pytest.mark.parametrize(
    ("arguments", "code", "status"),
    [(["--pool", "nobody"], "pool-not-found", 1), (["--interval", "0"], "--interval", 2)],
)
def test_a_mistake_is_one_clear_error(run_dir: str, arguments: list[str], code: str, status: int) -> None:
    done = run_here("top", "--once", "--run-dir", run_dir, *arguments)
    assert done.returncode == status
    assert code in done.stderr
    assert not done.stdout


def test_without_a_server_it_says_how_to_start_one(tmp_path: Path) -> None:
    done = run_here("top", "--run-dir", str(tmp_path))
    assert done.returncode == TRY_AGAIN
    assert "device-unavailable" in done.stderr
    assert "kvpage serve" in done.stderr


# --- from one frame to the next ---------------------------------------------------------------------------------------


def test_steps_are_counted_from_one_frame_to_the_next(run_dir: str, service: ApiService) -> None:
    now_s = [100.0]
    with service.client() as client, kvpage.open_lease("mimo", name="engine-0", run_dir=run_dir) as lease:
        frames = Frames(client, "mimo", clock=lambda: now_s[0])
        assert frames.read().pools[0].steps_per_s is None
        for _ in range(5):
            lease.allocate(0, 1)
        now_s[0] += 2.0
        assert frames.read().pools[0].steps_per_s == 2.5
        now_s[0] += 2.0
        assert frames.read().pools[0].steps_per_s == 0.0


class Told:
    """A client whose service says what the test wants."""

    def __init__(self, *pools: Pool) -> None:
        self.found = {pool.id: pool for pool in pools}
        self.gone: set[str] = set()

    def devices(self) -> list[Device]:
        return []

    def pools(self) -> list[Pool]:
        return list(self.found.values())

    def get_pool(self, pool_id: str) -> Pool:
        if pool_id in self.gone:
            raise PoolNotFound("it has gone")
        return self.found[pool_id]


def test_a_worker_that_began_to_count_anew_has_no_rate_for_one_frame() -> None:
    now_s = [0.0]
    told = Told(pool_of(steps=9))
    frames = Frames(cast(Client, told), None, clock=lambda: now_s[0])
    rates = []
    for steps in (9, 3, 7):
        told.found = {"pool-0": pool_of(steps=steps)}
        rates.append(frames.read().pools[0].steps_per_s)
        now_s[0] += 1.0
    assert rates == [None, None, 4.0]


def test_a_pool_that_goes_while_it_is_read_is_left_out() -> None:
    told = Told(pool_of())
    told.gone = {"pool-0"}
    assert Frames(cast(Client, told), None).read().pools == []


def test_json_goes_on_a_line_a_frame_until_it_is_interrupted(run_dir: str) -> None:
    command = [*COMMAND, "top", "--json", "--interval", "0.1", "--run-dir", run_dir]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as top:
        assert top.stdout is not None
        assert top.stderr is not None
        frames = [json.loads(top.stdout.readline()) for _ in range(2)]
        top.send_signal(signal.SIGINT)
        assert top.wait(60) == INTERRUPTED
        assert top.stderr.read() == ""
    assert [frame["pools"][0]["steps_per_s"] for frame in frames] == [None, 0.0]


def test_the_screen_is_given_back_when_it_is_interrupted(run_dir: str) -> None:
    with Screen("top", "--interval", "0.1", "--run-dir", run_dir) as screen:
        screen.wait_for("pool mimo")
        assert screen.shown.startswith("\x1b[?1049h")
        screen.wait_for("pool mimo")
        assert screen.interrupt() == INTERRUPTED
        assert "\x1b[?1049l" in screen.all
        assert "Traceback" not in screen.all


def test_a_service_that_ends_meanwhile_is_waited_for() -> None:
    with leak_guard(), tempfile.TemporaryDirectory(prefix="kvp-") as folder:
        with ApiService(Path(folder), "--memory", "64MiB", "--leave-workers") as service:
            with Screen("top", "--interval", "0.1", "--run-dir", folder) as screen:
                screen.wait_for("no pools")
                service.terminate()
                screen.wait_for("not up to date")
                with ApiService(Path(folder), "--memory", "64MiB") as again, again.client() as client:
                    client.create_pool(REQUEST, name="later")
                    screen.wait_for("pool later")
                    assert screen.interrupt() == INTERRUPTED


# --- the tables -------------------------------------------------------------------------------------------------------


def pool_of(*, steps: int = 0, name: str = "mimo", big: int = 1, gone: bool = False) -> Pool:
    group = GroupBlocks(
        used=big, cached=big, free=big, slabs=big, available=2 * big, leased=big, quarantined=big, block_bytes=1 << 20
    )
    tenant = TenantState(
        name=name, quota_bytes=big << 20, priority=0, weight=1, used_bytes=big << 20, num_leases=1, num_waiting=1,
        num_waited=1, num_served=0, num_given_up=0, waited_s=1234.5,
    )  # fmt: skip
    lease = LeaseState(
        name=name, tenant=name, state="quarantined", generation=1, pid=4194304, client_name=name, ttl_s=30.0,
        expires_in_s=29.6, blocks=[big], reserved=[1],
    )  # fmt: skip
    blocks = PoolBlocks(
        num_slabs=2 * big, free_slabs=big, idle_slabs=0, slab_bytes=1 << 20, groups=[group], tenants=[tenant],
        num_leases=70, leases_by_state={"quarantined": 70}, leases=[lease], prefix=None,
        steps=Latency(bounds_s=[1.0], counts=[steps, 0], sum_s=0.0),
    )  # fmt: skip
    return Pool(
        id="pool-0", name=name, device="host", state="failed" if gone else "ready", plan_id="sha256:0", epoch="0",
        buffer_size_bytes=big << 20, committed_bytes=0, num_holders=3, holders=[], blocks=None if gone else blocks,
        error=Failure(code="internal", message=name) if gone else None,
    )  # fmt: skip


DEVICE = Device(
    device="GPU-01234567-89ab-cdef-0123-456789abcdef", state="ready", handle_kinds=[], epoch="0", worker_pid=1,
    memory_limit_bytes=1023 << 30, reserved_bytes=1000 << 30, num_pools=100, pinned_bytes=999 << 30,
    free_bytes=1001 << 30,
)  # fmt: skip


def printed(frame: Frame, problem: str = "", width: int = 80) -> list[str]:
    console = Console(width=width, color_system=None, highlight=False, markup=False)
    with console.capture() as captured:
        console.print(view(frame, problem))
    return captured.get().splitlines()


def test_large_numbers_are_whole_and_long_names_are_shortened_in_80_columns() -> None:
    pool = pool_of(name="n" * 200, big=999_999)
    lines = printed(Frame(devices=[DEVICE], pools=[PoolFrame(pool=pool, steps_per_s=12345.67)]))
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    [group] = [line for line in lines if line.startswith("0 ")]
    assert group.split("]")[1].split() == ["999,999", "999,999", "999,999", "1,999,998", "999,999"]
    assert "1,234.5 s" in text
    assert "12,345.7" in text
    assert "4194304" in text
    assert "GPU-0" in text
    for size in ("1000 GiB", "1023 GiB", "999 GiB", "1001 GiB", "976.6 GiB"):
        assert size in text


def test_everything_that_is_more_is_said() -> None:
    lines = printed(Frame(devices=[], pools=[PoolFrame(pool=pool_of(), steps_per_s=None)]))
    assert "and 69 more leases" in lines
    [quarantined] = [line for line in lines if line.startswith("mimo") and "quarantined" in line]
    assert quarantined.split()[-3:] == ["s", "2", "MiB"]


def test_the_tenants_that_use_most_are_shown() -> None:
    pool = pool_of()
    assert pool.blocks is not None
    [tenant] = pool.blocks.tenants
    tenants = [msgspec.structs.replace(tenant, name=f"tenant-{size}", used_bytes=size) for size in range(25)]
    crowded = msgspec.structs.replace(pool, blocks=msgspec.structs.replace(pool.blocks, tenants=tenants))
    lines = printed(Frame(devices=[], pools=[PoolFrame(pool=crowded, steps_per_s=None)]))
    shown = [line.split()[0] for line in lines if line.startswith("tenant-")]
    assert shown == [f"tenant-{size}" for size in range(24, 4, -1)]
    assert "and 5 more tenants, who have less" in lines


def test_names_print_nothing_a_terminal_obeys() -> None:
    pools = [PoolFrame(pool=pool_of(name=ESCAPES, gone=gone), steps_per_s=None) for gone in (False, True)]
    lines = printed(Frame(devices=[DEVICE], pools=pools), problem=ESCAPES, width=300)
    assert all(line.isprintable() for line in lines), lines
    assert sum("\\x1b[31m" in line and "[bold]" in line for line in lines) >= 5


def test_a_device_without_a_worker_is_shown_without_numbers() -> None:
    lost = Device(
        device="host", state="lost", handle_kinds=[], epoch=None, worker_pid=None, memory_limit_bytes=None,
        reserved_bytes=None, num_pools=2,
    )  # fmt: skip
    assert printed(Frame(devices=[lost], pools=[]))[2].split() == ["host", "lost", "-", "-", "-", "-", "-", "2"]


@pytest.mark.parametrize(
    ("used", "quarantined", "cached", "free", "expected"),
    [
        (0, 0, 0, 10, "[..........]"),
        (5, 0, 0, 5, "[#####.....]"),
        (3, 2, 4, 1, "[###!!====.]"),
        (1, 0, 0, 10**6, "[#.........]"),
        (10**6, 1, 1, 0, "[##########]"),
        (10, 0, 0, 0, "[##########]"),
        (0, 0, 0, 0, "[          ]"),
    ],
)
def test_a_bar_is_filled_by_shares(used: int, quarantined: int, cached: int, free: int, expected: str) -> None:
    parts = [(used, USED), (quarantined, QUARANTINED), (cached, CACHED), (free, FREE)]
    assert bar(parts, 10).plain == expected


def test_a_program_of_its_own_prints_the_same(run_dir: str) -> None:
    arguments = ("top", "--once", "--pool", "draft", "--run-dir", run_dir)
    assert run(*arguments).stdout.splitlines()[3:] == run_here(*arguments).stdout.splitlines()[3:]
