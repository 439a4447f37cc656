"""How long the server waits before it starts a worker again."""

from __future__ import annotations

from kvpage_server.device_link import FIRST_DELAY_S, HEALTHY_S, LONGEST_DELAY_S, RestartDelay


def test_the_first_restart_is_at_once_and_each_further_one_waits_twice_as_long() -> None:
    delay = RestartDelay()
    assert [delay.after(0.0) for _ in range(4)] == [0.0, FIRST_DELAY_S, 2 * FIRST_DELAY_S, 4 * FIRST_DELAY_S]


def test_the_delay_has_a_bound() -> None:
    delay = RestartDelay()
    assert max(delay.after(0.0) for _ in range(100)) == LONGEST_DELAY_S


def test_a_worker_that_served_well_is_replaced_at_once() -> None:
    delay = RestartDelay()
    for _ in range(5):
        delay.after(0.0)
    assert delay.after(HEALTHY_S) == 0.0
    assert delay.after(HEALTHY_S / 2) == FIRST_DELAY_S
