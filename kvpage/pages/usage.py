"""How much leases and tenants hold, and what they may."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvpage.pages.leases import Lease, LeaseBook, QuotaExceeded


class Usage:
    def __init__(self, book: LeaseBook, block_bytes: Sequence[int]) -> None:
        """`block_bytes`: by group."""
        self._book = book
        self._block_bytes = block_bytes
        self._used_bytes: dict[str, int] = {}

    def used_bytes(self, tenant: str) -> int:
        """What the leases of the tenant hold: each block once for each lease, however often."""
        return self._used_bytes.get(tenant, 0)

    def bytes_of(self, counts: Mapping[int, int]) -> int:
        """Of so many blocks by group."""
        return sum(count * self._block_bytes[group] for group, count in counts.items())

    def recount(self, blocks: Iterable[tuple[Lease, list[int]]]) -> None:
        """Every lease, and how many blocks of each group it holds."""
        self._used_bytes = {}
        for lease, counts in blocks:
            lease.blocks[:] = [0] * len(counts)
            self.change(lease, dict(enumerate(counts)))

    def change(self, lease: Lease, changes: Mapping[int, int]) -> None:
        """By group: so many blocks more, or fewer."""
        for group, change in changes.items():
            lease.blocks[group] += change
        self._used_bytes[lease.tenant] = self.used_bytes(lease.tenant) + self.bytes_of(changes)

    def change_one(self, lease: Lease, group: int, change: int) -> None:
        """One block more, or fewer for -1."""
        lease.blocks[group] += change
        used, tenant = self._used_bytes, lease.record.tenant
        used[tenant] = used.get(tenant, 0) + change * self._block_bytes[group]

    def has_quota(self, lease: Lease) -> bool:
        return self._book.tenant(lease.record.tenant).quota_bytes is not None

    def check_quota(self, lease: Lease, changes: Mapping[int, int]) -> None:
        """Raises `QuotaExceeded` where the tenant may not hold so many blocks more, by group. What is no more than
        before is never refused: its quota may have become smaller."""
        quota_bytes = self._book.tenant(lease.tenant).quota_bytes
        if quota_bytes is None:
            return
        wanted, used = self.bytes_of(changes), self.used_bytes(lease.tenant)
        if wanted > 0 and used + wanted > quota_bytes:
            raise QuotaExceeded(
                f"tenant {lease.tenant or '(default)'} would hold {used + wanted} bytes of blocks, its quota is"
                f" {quota_bytes}; free some, or raise the quota",
                details={
                    "tenant": lease.tenant,
                    "wanted_bytes": wanted,
                    "used_bytes": used,
                    "quota_bytes": quota_bytes,
                },
            )
