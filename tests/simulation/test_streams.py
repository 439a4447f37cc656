"""Streams: the same for the same seed, with the lengths they promise; files with clear errors."""

from __future__ import annotations

from itertools import islice
from random import Random
from statistics import median

import pytest

from kvpage.errors import SpecInvalid
from kvpage.simulation.conversations import Conversations, Talk
from kvpage.simulation.streams import BUILT_IN, CHAT, LONG, SHORT, LogNormal, RequestLengths, Stream, stream_of_lengths


def taken(stream: Stream, seed: int, number: int = 4000) -> list[RequestLengths]:
    return list(islice(stream.make(seed), number))


@pytest.mark.parametrize("stream", BUILT_IN.values(), ids=BUILT_IN)
def test_a_seed_names_one_stream(stream: Stream) -> None:
    assert taken(stream, 7) == taken(stream, 7)
    assert taken(stream, 7) != taken(stream, 8)


def test_the_first_requests_are_these_on_every_python() -> None:
    assert taken(SHORT, 1, 3) == [(67, 257), (310, 88), (206, 144)]
    assert taken(CHAT, 1, 2) == [(165, 454), (1184, 118)]


def test_short_is_uniform_and_reaches_its_ends() -> None:
    prompts, outputs = zip(*taken(SHORT, 1), strict=True)
    assert (min(prompts), max(prompts), min(outputs), max(outputs)) == (16, 400, 16, 300)


@pytest.mark.parametrize(("stream", "prompt", "output"), [(CHAT, 545, 200), (LONG, 14_800, 490)])
def test_medians_are_those_named(stream: Stream, prompt: int, output: int) -> None:
    prompts, outputs = zip(*taken(stream, 1), strict=True)
    assert median(prompts) == pytest.approx(prompt, rel=0.06)
    assert median(outputs) == pytest.approx(output, rel=0.06)
    assert str(prompt) in stream.about.replace(",", "")


def test_a_log_normal_length_is_never_zero_and_never_endless() -> None:
    wide = LogNormal(1, 60)
    drawn = [wide.draw(random) for random in [Random(1)] for _ in range(100)]
    assert min(drawn) == 1
    assert max(drawn) == 1 << 24


def test_a_file_is_repeated_in_its_order() -> None:
    stream = stream_of_lengths("# prompt,output\n 10, 2\n\n30,4 # the last\n", "'lengths'")
    assert taken(stream, 1, 3) == [(10, 2), (30, 4), (10, 2)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names no request"),
        ("1,2\n3", "line 2: '3' is not `prompt,output`"),
        ("1,2,3", "line 1"),
        ("-1,2", "line 1"),
        ("1.5,2", "line 1"),
        ("٣,2", "line 1"),
        ("0,2", "from 1 to"),
        ("1,999999999", "from 1 to"),
        ("1," + "9" * 50, "is not `prompt,output`"),
    ],
)
def test_what_is_no_stream_is_said_with_its_line(text: str, said: str) -> None:
    with pytest.raises(SpecInvalid) as caught:
        stream_of_lengths(text, "'lengths'")
    assert said in caught.value.message
    assert "'lengths'" in caught.value.message


def test_a_file_of_too_many_requests_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpage.simulation.streams.MAX_FILE_REQUESTS", 2)
    stream_of_lengths("1,1\n1,1", "'lengths'")
    with pytest.raises(SpecInvalid, match="more than 2 requests"):
        stream_of_lengths("1,1\n1,1\n1,1", "'lengths'")


def test_a_prompt_holds_all_that_was_said_before() -> None:
    talk = Talk(Conversations(people=1), Random(1))
    said = firsts = 0
    for _ in range(100):
        before, lengths = talk.next_turn()
        firsts += before == 0
        assert before in (0, said)
        assert lengths.prompt_tokens > before
        said = lengths.prompt_tokens + lengths.output_tokens
    assert 100 / 10 <= firsts <= 100 / 3  # of 3 to 10 turns


def test_pauses_are_of_the_mean_named() -> None:
    talk = Talk(Conversations(people=1, mean_pause_steps=50), Random(1))
    pauses = [talk.pause_steps() for _ in range(4000)]
    assert sum(pauses) / 4000 == pytest.approx(50, rel=0.06)
    assert min(pauses) >= 0
