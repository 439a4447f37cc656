"""Bytes that are almost HTTP get a proper answer or the end of the connection."""

from __future__ import annotations

import random

import pytest

from support.http_fuzz import check_answers, fuzzed_bytes, fuzzed_http


def test_fuzzed_requests_are_answered_or_ended(no_leaks: None, seed: int) -> None:
    fuzzed_http(seed, 60).require_nothing_lost()


def test_a_seed_makes_the_same_bytes() -> None:
    assert fuzzed_bytes(random.Random(5)) == fuzzed_bytes(random.Random(5)) != fuzzed_bytes(random.Random(6))


@pytest.mark.parametrize(
    "received",
    [b"hello", b"HTTP/1.1 500 Internal Server Error\r\n\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\nInvalid HTTP"],
)
def test_the_check_fires_for_what_is_no_answer_of_the_server(received: bytes) -> None:
    with pytest.raises(AssertionError):
        check_answers(received)
