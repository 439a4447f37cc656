"""docs/protocol.md names the worker's limits as they are."""

from __future__ import annotations

import pytest

from kvpage.wire import messages
from kvpage_server.worker_limits import Limits
from support.checkout import ROOT

LIMITS = Limits()


@pytest.mark.parametrize(
    "sentence",
    [
        f"At most {LIMITS.max_waits} requests of a connection may wait",
        f"or {LIMITS.max_pools:,} pools are open",
        f"the first {messages.MAX_HOLDERS_LISTED} of its holders",
        f"the first {messages.MAX_HOLDERS_NAMED} of them",
        f"({LIMITS.max_holds:,} holds on one connection)",
        f"more than {LIMITS.max_queued_bytes >> 20} MiB of replies waits",
        f"taken nothing for {LIMITS.stall_s:.0f} s",
        f"not said hello {LIMITS.hello_s:.0f} s after",
        f"not whole {LIMITS.frame_s:.0f} s after its first byte",
        f"may be {LIMITS.max_unfinished_bytes >> 20} MiB for all clients together",
        f"to those who read it within {LIMITS.end_s:.0f} s",
        f"would have more than {LIMITS.max_plans_bytes >> 20} MiB",
        f"asks for nothing for {LIMITS.handover_s:.0f} s",
        "taken 80 % of the descriptors",
    ],
)
def test_every_limit_is_the_one_in_the_code(sentence: str) -> None:
    assert sentence in (ROOT / "docs" / "protocol.md").read_text()
