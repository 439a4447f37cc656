"""The shares: what is taken is counted, refused beyond the limit, and free again when given back."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvpage.errors import RateLimited, TooManyClients
from kvpage_server.intake import Intake, IntakeLimits, Share


@dataclass(eq=False)
class Connection:
    peer: str = "somebody"
    since: int | None = None
    """None: it is being served."""
    unread_bytes: int = 0
    ended: str = ""

    def waits_since(self) -> int | None:
        return self.since

    def give_way(self) -> None:
        self.ended = "gave way"

    def drop(self) -> None:
        self.ended = "dropped"


def full(*connections: Connection) -> Share:
    share = Share("TCP", IntakeLimits(max_connections=len(connections)), max_fds=1 << 20)
    for connection in connections:
        share.enter(connection)
    return share


def test_connections_leave_most_descriptors_to_pools() -> None:
    few, many = Share("TCP", IntakeLimits(), max_fds=64), Share("TCP", IntakeLimits(), max_fds=1 << 20)
    for share, limit in ((few, 16), (many, 1024)):
        members = [Connection() for _ in range(limit)]
        for member in members:
            share.enter(member)
        with pytest.raises(TooManyClients):
            share.enter(Connection())
        share.leave(members[0])
        share.leave(members[0])
        share.enter(Connection())
        assert share.num_connections == limit


def test_of_whoever_has_most_connections_the_one_that_waits_longest_gives_way() -> None:
    lonely, served = Connection("other", 1), Connection("many", None)
    first, second = Connection("many", 2), Connection("many", 3)
    share = full(second, lonely, served, first)
    newcomer = Connection("new", 4)
    share.enter(newcomer)
    assert [one.ended for one in (first, second, lonely, served)] == ["gave way", "", "", ""]
    assert share.num_connections == 4
    share.enter(Connection("new", 5))
    assert (second.ended, lonely.ended, newcomer.ended) == ("gave way", "", "")


def test_nobody_who_is_served_gives_way() -> None:
    served = [Connection("many"), Connection("many")]
    share = full(*served)
    with pytest.raises(TooManyClients):
        share.enter(Connection("new"))
    assert [one.ended for one in served] == ["", ""]


def test_whoever_has_most_unread_is_dropped_when_that_is_too_much() -> None:
    share = Share("TCP", IntakeLimits(max_unread_bytes=100), max_fds=1024)
    little, much, later = Connection(), Connection(), Connection()
    for connection in (little, much, later):
        share.enter(connection)
    share.unread(little, 40)
    share.unread(much, 60)
    assert (little.ended, much.ended) == ("", "")
    share.unread(later, 1)
    assert (little.ended, much.ended, later.ended) == ("", "dropped", "")
    share.leave(much)
    assert share.unread_bytes == 41
    share.unread(little, 0)
    share.unread(later, 0)
    assert share.unread_bytes == 0


def test_bytes_of_bodies_are_counted_exactly() -> None:
    share = Share("TCP", IntakeLimits(max_large_bodies_bytes=100), max_fds=1024)
    share.take(60)
    share.take(40)
    with pytest.raises(RateLimited):
        share.take(1)
    share.give_back(60)
    share.take(60)
    assert share.large_bodies_bytes == 100


def test_the_kinds_of_connections_do_not_share() -> None:
    intake = Intake(IntakeLimits(max_large_bodies_bytes=1), max_fds=1024)
    intake.tcp.take(1)
    intake.unix.take(1)
