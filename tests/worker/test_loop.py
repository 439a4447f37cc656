"""The loop: sockets, timers and other threads, one callback at a time."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Iterator

import pytest

from kvpage_server.worker_helper import Helper
from kvpage_server.worker_loop import Loop


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def loop(no_leaks: None, clock: Clock) -> Iterator[Loop]:
    loop = Loop(clock)
    yield loop
    loop.close()


def test_timers_run_in_order_of_time_and_cancelled_ones_do_not(loop: Loop, clock: Clock) -> None:
    ran: list[str] = []
    loop.call_after(2, lambda: ran.append("second"))
    loop.call_after(1, lambda: ran.append("first"))
    loop.call_after(1.5, lambda: ran.append("never")).cancel()
    loop.call_after(2, lambda: ran.append("same time, later"))
    loop.call_after(3, loop.stop)
    clock.now_s = 3
    loop.run()
    assert ran == ["first", "second", "same time, later"]


def test_a_timer_is_not_run_before_its_time(loop: Loop, clock: Clock) -> None:
    ran: list[float] = []

    def advance() -> None:
        clock.now_s += 1
        loop.post(loop.stop if ran else advance)

    loop.call_after(5, lambda: ran.append(clock.now_s))
    loop.post(advance)
    loop.run()
    assert ran == [5]


def test_other_threads_wake_it(loop: Loop) -> None:
    ran: list[str] = []

    def tell() -> None:
        loop.post(lambda: ran.append("posted"))
        loop.post(loop.stop)

    other = threading.Thread(target=tell)
    other.start()
    loop.run()
    other.join()
    assert ran == ["posted"]


def test_what_is_posted_by_a_posted_callback_runs_in_a_later_round(loop: Loop) -> None:
    ran: list[int] = []

    def again() -> None:
        ran.append(len(ran))
        loop.post(again if len(ran) < 10_000 else loop.stop)  # more wake-ups than the socket would hold at once

    loop.post(again)
    loop.run()
    assert len(ran) == 10_000


def test_so_many_posts_that_the_wake_up_socket_is_full_are_all_run(loop: Loop) -> None:
    ran: list[None] = []
    for _ in range(5000):
        loop.post(lambda: ran.append(None))
    loop.post(loop.stop)
    loop.run()
    assert len(ran) == 5000


def test_a_callback_that_raises_is_logged_and_the_loop_goes_on(loop: Loop, capfd: pytest.CaptureFixture[str]) -> None:
    def bad() -> None:
        raise ValueError("a bug")

    loop.post(bad)
    loop.post(loop.stop)
    loop.run()
    assert '"event": "internal_error"' in capfd.readouterr().err


def test_a_socket_closed_by_an_earlier_callback_of_the_round_is_not_called(loop: Loop) -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    called: list[int] = []

    def first_come(number: int) -> None:
        called.append(number)
        for left, _ in pairs:
            loop.watch(left, 0, lambda: None)
            left.close()
        loop.post(loop.stop)

    for number, (left, right) in enumerate(pairs):
        loop.watch(left, selectors.EVENT_READ, lambda number=number: first_come(number))  # type: ignore[misc]
        right.send(b"x")
    loop.run()
    assert len(called) == 1
    for _, right in pairs:
        right.close()


def test_a_helper_runs_jobs_in_order_and_hands_their_outcome_to_the_loop(loop: Loop) -> None:
    outcomes: list[object] = []
    threads: set[int] = set()
    helper = Helper("test", loop.post)

    def note(outcome: object) -> None:
        outcomes.append(outcome)
        threads.add(threading.get_ident())
        if len(outcomes) == 3:
            loop.stop()

    helper.submit(lambda: 1, note)
    helper.submit(lambda: 1 // 0, note)
    helper.submit(lambda: threading.get_ident(), note)
    loop.run()
    helper.stop()
    assert outcomes[0] == 1
    assert type(outcomes[1]).__name__ == "InternalError"
    assert outcomes[2] != threading.get_ident()
    assert threads == {threading.get_ident()}


def test_what_was_cancelled_is_not_kept_until_its_time() -> None:
    """One who waits for an hour, again and again, and is served at once."""
    loop = Loop()
    ran: list[int] = []
    kept = [loop.call_after(0.0, lambda number=number: ran.append(number)) for number in range(3)]  # type: ignore[misc]
    for _ in range(10_000):
        loop.call_after(3600.0, ran.clear).cancel()
    assert len(loop._timers) < 1000
    loop.call_after(0.0, loop.stop)
    loop.run()
    loop.close()
    assert ran == list(range(len(kept)))
