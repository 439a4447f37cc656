"""A sample of every message about leases, with no field left to its default."""

from __future__ import annotations

from kvpage.wire import leasing

POOL_ID = "pool-0123456789abcdef"
LEASE_ID = "lease-0123456789abcdef"
RESERVATION_ID = "reservation-0123456789abcdef"
TOKEN = "0123456789abcdef"
IDS, HASHES = b"\1\0\0\0\2\0\0\0", bytes(range(32))
LOG_ID = "0123456789abcdef" * 2

COMPUTED = leasing.ComputedBlocks(ids=IDS, hashes=HASHES, era=3)
TENANT = leasing.TenantSettings(name="a", quota_bytes=1 << 30, priority=-5, weight=7)
LEASE = leasing.LeaseState(
    name="engine", tenant="a", state="kept", generation=2, pid=12, client_name="c", ttl_s=2.5, expires_in_s=1.5,
    blocks=[3, 0], reserved=[0, 4],
)  # fmt: skip

REQUESTS: list[leasing.RequestBody] = [
    leasing.OpenLease(pool_id=POOL_ID, name="engine", tenant="a", token=TOKEN, ttl_s=2.5, keep_s=60.0, key=9),
    leasing.AdoptLease(pool_name="mimo", name="engine", token=TOKEN, generation=2, ttl_s=2.5, keep_s=60.0, key=9),
    leasing.RenewLease(lease_id=LEASE_ID),
    leasing.CloseLease(lease_id=LEASE_ID),
    leasing.TakeStep(
        lease_id=LEASE_ID, key=7, commit={0: COMPUTED}, retain={1: IDS}, free={0: IDS}, allocate={0: 5, 1: 2},
        as_runs=True, wait_s=2.5,
    ),
    leasing.TakePrefix(lease_id=LEASE_ID, key=7, hashes=[HASHES, b""], at_most_tokens=32),
    leasing.FindPrefix(lease_id=LEASE_ID, hashes=[HASHES, b""], at_most_tokens=32),
    leasing.Reserve(lease_id=LEASE_ID, blocks={0: 5}, wait_s=2.5, ttl_s=3.5),
    leasing.CommitReservation(lease_id=LEASE_ID, key=7, reservation_id=RESERVATION_ID, blocks={0: 2}),
    leasing.EndReservation(lease_id=LEASE_ID, reservation_id=RESERVATION_ID),
    leasing.DescribeLease(lease_id=LEASE_ID),
    leasing.ListHeld(lease_id=LEASE_ID, group=1, after=9),
    leasing.InspectBlocks(lease_id=LEASE_ID, group=1, ids=IDS),
    leasing.FindContents(lease_id=LEASE_ID, group=1, hashes=HASHES),
    leasing.DescribeBlocks(pool_id=POOL_ID),
    leasing.MapBlocks(pool_id=POOL_ID),
    leasing.SetTenants(pool_id=POOL_ID, tenants=[TENANT]),
    leasing.ReadEvents(pool_id=POOL_ID, log_id=LOG_ID, after=5, at_most=10, wait_s=2.5),
    leasing.ListContents(pool_id=POOL_ID, group=1, after_block=5),
    leasing.ClearContents(pool_id=POOL_ID),
]  # fmt: skip
REPLIES: list[leasing.ReplyBody] = [
    leasing.LeaseOpened(
        pool_id=POOL_ID, lease_id=LEASE_ID, token=TOKEN, generation=1, tenant="a", salt=b"salt", blocks=[0, 2],
        clears_on_reuse=[True, False],
    ),
    leasing.LeaseRenewed(lease_id=LEASE_ID, ttl_s=2.5),
    leasing.LeaseClosed(lease_id=LEASE_ID),
    leasing.Granted(ids={0: IDS}, clear={0: IDS[:4]}),
    leasing.PrefixTaken(era=3, num_tokens=32, ids=[IDS, b""]),
    leasing.PrefixFound(era=3, num_tokens=32, ids=[IDS, b""], num_revived=[1, 0]),
    leasing.Reserved(reservation_id=RESERVATION_ID),
    leasing.ReservationEnded(reservation_id=RESERVATION_ID),
    leasing.HeldList(ids=IDS, times=IDS, is_last=True),
    leasing.BlocksInspected(times=IDS, is_cached=b"\1\0"),
    leasing.ContentsFound(ids=IDS),
    leasing.LeaseDescribed(pool_id=POOL_ID, lease=LEASE),
    leasing.BlocksState(
        pool_id=POOL_ID, num_slabs=9, free_slabs=5, idle_slabs=1, slab_bytes=4096,
        groups=[
            leasing.GroupBlocks(
                used=1, cached=2, free=3, slabs=4, available=5, leased=1, quarantined=0, block_bytes=2048
            )
        ],
        tenants=[
            leasing.TenantState(
                name="a", quota_bytes=1 << 30, priority=0, weight=1, used_bytes=2048, num_leases=1, num_waiting=2,
                num_waited=3, num_served=4, num_given_up=5, waited_s=6.5,
            )
        ],
        num_leases=1, leases_by_state={"kept": 1}, leases=[LEASE],
        prefix=leasing.PrefixState(
            hits=1, misses=2, asked_tokens=3, found_tokens=4, stored=5, duplicates=6, evicted=7, blocks=8
        ),
        steps=leasing.Latency(bounds_s=[0.5], counts=[1, 2], sum_s=3.5),
    ),
    leasing.BlockMap(
        pool_id=POOL_ID, num_slabs=3, slabs_per_cell=2, owners=[-1, 0], owned=[2, 0], used=[3, 0], shared=[1, 0],
        cached=[1, 0], free=[0, 0], most_held=[2, 0],
    ),
    leasing.TenantsSet(tenants=[TENANT]),
    leasing.EventList(
        log_id=LOG_ID, after=6, has_missed=True,
        events=[leasing.ContentEvent(number=6, kind="stored", group=0, hashes=HASHES)],
    ),
    leasing.ContentList(log_id=LOG_ID, after=6, hashes=HASHES, last_block=9, is_last=False),
    leasing.ContentsCleared(pool_id=POOL_ID),
]  # fmt: skip
