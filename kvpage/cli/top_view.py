"""A frame of `kvpage top` as tables. Every state has a letter of its own, so that it can be read without colours."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvpage.cli.sizes import format_bytes
from kvpage.cli.top_frame import Frame, PoolFrame
from kvpage.client.block_resources import GroupBlocks, LeaseState, PoolBlocks, TenantState
from kvpage.client.resources import Device
from kvpage.errors import printable

USED, QUARANTINED, CACHED, FREE = ("#", "green"), ("!", "red"), ("=", "blue"), (".", "dim")
LEGEND = "# used   ! quarantined   = cached   . available"
BAR_CHARS = 18
MAX_TENANTS_SHOWN = 20
UNKNOWN = "-"


def view(frame: Frame, problem: str = "") -> RenderableType:
    """`problem`: why there is no newer one."""
    parts: list[RenderableType] = [_devices(frame.devices)]
    for pool in frame.pools:
        parts += _pool(pool)
    if not frame.pools:
        parts.append(Text("no pools"))
    parts.append(Text(LEGEND, style="dim"))
    if problem:
        parts.append(Text(f"not up to date: {printable(problem)}", style="bold red"))
    return Group(*parts)


def bar(parts: Iterable[tuple[int, tuple[str, str]]], width: int = BAR_CHARS) -> Text:
    """Counts of things as shares of `width` characters, the last part taking what rounding leaves. What there is at
    all has a character of its own as long as there is room.
    """
    counts = list(parts)
    total = sum(count for count, _ in counts)
    text, left = Text("["), width
    for count, (letter, style) in counts[:-1]:
        chars = min(left, max(round(width * count / total), 1)) if count else 0
        text.append(letter * chars, style)
        left -= chars
    letter, style = counts[-1][1] if total else (" ", "")
    return text.append(letter * left, style).append("]")


def _devices(devices: Sequence[Device]) -> Table:
    table = _table("device", "state", "", "reserved", "limit", "pinned", "free", "pools", num_names=1, num_texts=2)
    for device in devices:
        reserved, limit = device.reserved_bytes, device.memory_limit_bytes
        share = Text(UNKNOWN) if reserved is None or limit is None else bar(_shares(reserved, limit), 10)
        sizes = (reserved, limit, device.pinned_bytes, device.free_bytes)
        style = "" if device.state == "ready" else "bold red"
        table.add_row(
            printable(device.device), Text(device.state, style), share, *map(_size, sizes), str(device.num_pools)
        )
    return table


def _shares(reserved: int, limit: int) -> Iterator[tuple[int, tuple[str, str]]]:
    yield reserved, USED
    yield max(limit - reserved, 0), FREE


def _size(size_bytes: int | None) -> str:
    return UNKNOWN if size_bytes is None else format_bytes(size_bytes)


# --- pools ------------------------------------------------------------------------------------------------------------


def _pool(frame: PoolFrame) -> Iterator[RenderableType]:
    pool, blocks = frame.pool, frame.pool.blocks
    yield Text.assemble(
        (f"pool {printable(pool.name)}", "bold"),
        f" on {printable(pool.device)}: {pool.state}, {format_bytes(pool.buffer_size_bytes)}, "
        f"holders: {pool.num_holders:,}",
    )
    if pool.error is not None:
        yield Text(f"{pool.error.code}: {printable(pool.error.message)}", style="bold red")
    if blocks is None:
        return
    num_waiting = sum(tenant.num_waiting for tenant in blocks.tenants)
    rate = UNKNOWN if frame.steps_per_s is None else f"{frame.steps_per_s:,.1f}"
    yield Text(
        f"{blocks.num_slabs:,} slabs: {blocks.free_slabs:,} free, {blocks.idle_slabs:,} idle; "
        f"leases: {blocks.num_leases:,}; waiting: {num_waiting:,}; steps/s: {rate}"
    )
    yield _groups(blocks)
    if blocks.tenants:
        most = sorted(blocks.tenants, key=lambda tenant: tenant.used_bytes, reverse=True)
        yield tenants_table(most[:MAX_TENANTS_SHOWN])
        yield from _more(len(most) - MAX_TENANTS_SHOWN, "tenants, who have less")
    if blocks.leases:
        yield leases_table(blocks.leases, blocks.groups)
    yield from _more(blocks.num_leases - len(blocks.leases), "leases")


def _more(count: int, what: str) -> Iterator[Text]:
    if count > 0:
        yield Text(f"and {count:,} more {what}")


def _groups(blocks: PoolBlocks) -> Table:
    table = _table("group", "", "used", "cached", "free", "available", "quarantined", num_texts=2)
    for number, group in enumerate(blocks.groups):
        counts = (group.used, group.cached, group.free, group.available, group.quarantined)
        table.add_row(str(number), bar(_occupancy(group)), *(f"{count:,}" for count in counts))
    return table


def _occupancy(group: GroupBlocks) -> Iterator[tuple[int, tuple[str, str]]]:
    """Of all blocks that the group has or could have. A quarantined one may be held twice."""
    quarantined = min(group.quarantined, group.used)
    yield group.used - quarantined, USED
    yield quarantined, QUARANTINED
    yield group.cached, CACHED
    yield max(group.available - group.cached, 0), FREE


def tenants_table(tenants: Sequence[TenantState]) -> Table:
    table = _table("tenant", "used", "quota", "leases", "waiting", "served", "gave up", "waited", num_names=1)
    for tenant in tenants:
        table.add_row(
            printable(tenant.name) or UNKNOWN, format_bytes(tenant.used_bytes), _size(tenant.quota_bytes),
            *(f"{count:,}" for count in (tenant.num_leases, tenant.num_waiting, tenant.num_served)),
            f"{tenant.num_given_up:,}", f"{tenant.waited_s:,.1f} s",
        )  # fmt: skip
    return table


def leases_table(leases: Sequence[LeaseState], groups: Sequence[GroupBlocks]) -> Table:
    table = _table("lease", "tenant", "program", "state", "pid", "ends in", "has", num_names=3, num_texts=1)
    for lease in leases:
        ends = UNKNOWN if lease.expires_in_s is None else f"{lease.expires_in_s:,.0f} s"
        style = "" if lease.state == "active" else "bold red"
        table.add_row(
            printable(lease.name), printable(lease.tenant) or UNKNOWN, printable(lease.client_name) or UNKNOWN,
            Text(lease.state, style), str(lease.pid or "?"), ends, format_bytes(_held_bytes(lease, groups)),
        )  # fmt: skip
    return table


def _held_bytes(lease: LeaseState, groups: Sequence[GroupBlocks]) -> int:
    counts = zip(lease.blocks, lease.reserved, groups, strict=True)
    return sum((held + reserved) * group.block_bytes for held, reserved, group in counts)


class _Cells(Table):
    """Cells are text and never markup: others choose what is in them."""

    def add_row(self, *cells: RenderableType | None, **_: object) -> None:
        super().add_row(*(_cell(cell) if isinstance(cell, str) else cell for cell in cells))


def _cell(text: str) -> Text:
    return Text(text, no_wrap=True, overflow="ellipsis")


def _table(*headers: str, num_names: int = 0, num_texts: int = 0) -> Table:
    """First come names, which are shortened where there is no room, then other texts, then numbers: those are whole."""
    table = _Cells(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for number, header in enumerate(headers):
        is_name, is_number = number < num_names, number >= num_names + num_texts
        # Where there is no room, columns that may be wrapped become narrower first; their cells never are, see above.
        table.add_column(header, justify="right" if is_number else "left", no_wrap=not is_name)
    return table
