"""A worker whose pools are leased, for all tests of a file."""

from __future__ import annotations

from support.served_leases import pools as pools
