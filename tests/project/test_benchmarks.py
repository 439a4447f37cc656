"""The report of benchmarks: what it is made of, that docs/benchmarks.md is one, and that a wrong one is found out."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

import machine
import prefixes
import vllm_peer
from measure import Effort, Row, Runs, beside, compare, take_turns
from report import (
    DOCUMENT,
    NOT_RUN,
    VLLM_POOL,
    Measured,
    Subject,
    as_json,
    as_page,
    as_text,
    measured,
    printed,
    shown,
    significant,
    wrong_rows,
)
from run import SUBJECTS

PEER = "nothing"
SORTED, SUMMED = "a list sorted", "a list summed"


def few_rounds(effort: Effort) -> list[Row]:
    numbers = list(range(2000))
    sides = {PEER: lambda: None, SORTED: lambda: sorted(numbers), SUMMED: lambda: sum(numbers)}
    return beside(PEER, take_turns(sides, rounds=effort.rounds(5)))


SUBJECT = Subject(
    title="Lists",
    about="`benchmarks/run.py`",
    pairs=((SORTED, PEER), (SUMMED, PEER), (SORTED, VLLM_POOL)),
    measure=few_rounds,
)
FACTS = {"command": "`make bench`", "date": "2026-11-30"}


def row(**changed: float) -> Row:
    figures = {"ours": 2.0, "theirs": 1.0, "low": 1.5, "ratio": 2.0, "high": 2.5} | changed
    return Row(name="a", peer="b", unit="s", rounds=7, **figures)


def test_the_page_has_the_rows_that_are_measured_and_right_ratios() -> None:
    assert wrong_rows(DOCUMENT.read_text(), SUBJECTS) == []


def test_a_page_is_made_of_a_few_rounds() -> None:
    parts = [measured(SUBJECT, Effort(0.5)), measured(prefixes.SUBJECT, Effort(0.01))]
    page = as_page(FACTS, parts)
    assert wrong_rows(page, [SUBJECT, prefixes.SUBJECT]) == []
    rows = {(found.title, found.pair): found.figures for found in printed(page)}
    assert rows["Lists", (SORTED, VLLM_POOL)] is None
    assert rows["Lists", (SORTED, PEER)] is not None
    assert VLLM_POOL in page.partition("## Lists")[0]
    assert SORTED in as_text(parts[0])
    said = json.loads(as_json(FACTS, parts))
    assert [subject["title"] for subject in said["subjects"]] == ["Lists", "Prefixes"]
    assert said["subjects"][0]["absent"] == [VLLM_POOL]
    assert said["subjects"][0]["rows"][0]["rounds"] == 2


def test_a_ratio_is_the_median_of_those_of_the_rounds() -> None:
    ours, theirs = Runs("ours", (1.0, 9.0, 3.0)), Runs("theirs", (1.0, 3.0, 2.0))
    found = compare(ours, theirs)
    assert (found.ratio, found.low, found.high) == (1.5, 1.25, 2.25)
    assert (found.ours, found.theirs, found.rounds) == (3.0, 2.0, 3)
    assert compare(ours.divided(2), theirs.divided(2)).ratio == 1.5


@pytest.mark.parametrize(
    "changed",
    [{"ratio": 2.6}, {"ratio": 1.4}, {"ours": 0.0}, {"theirs": -1.0}, {"ours": float("nan")}, {"low": 3.0}],
    ids=str,
)
def test_figures_that_cannot_be_are_no_row(changed: dict[str, float]) -> None:
    row()
    with pytest.raises(ValueError, match="figures that cannot be"):
        row(**changed)


def test_sides_that_did_not_run_the_same_rounds_are_not_compared() -> None:
    with pytest.raises(ValueError, match="argument"):
        compare(Runs("ours", (1.0, 2.0)), Runs("theirs", (1.0, 2.0, 3.0)))


def test_one_round_has_no_spread() -> None:
    with pytest.raises(ValueError, match="rounds"):
        replace(row(), rounds=1)


@pytest.mark.parametrize(
    "pairs", [((SORTED, PEER),), ((SORTED, PEER), (SUMMED, PEER), ("missing", PEER))], ids=["surplus", "missing"]
)
def test_what_is_measured_is_what_was_declared(pairs: tuple[tuple[str, str], ...]) -> None:
    with pytest.raises(ValueError, match="declared"):
        measured(replace(SUBJECT, pairs=pairs), Effort(0.1))


def test_a_row_comes_once() -> None:
    subject = replace(SUBJECT, pairs=(("a", "b"),))
    with pytest.raises(ValueError, match="twice"):
        Measured(subject=subject, rows=(row(), row()))


PAIRS = (("a", "b"),)
GOOD = """# Benchmarks

## Lists

| what | beside | ours | the peer's | ratio | middle half | rounds |
| --- | --- | --- | --- | --- | --- | --- |
| a | b | 2.00 ms | 1.00 ms | 2.00 | 1.50 – 2.50 | 7 |
"""


@pytest.mark.parametrize(
    ("right", "wrong", "fault"),
    [
        ("| 2.00 | 1.50", "| 4.00 | 1.50", "wrong ratio"),
        ("| 2.00 | 1.50", "| 0.400 | 0.300", "wrong ratio"),
        ("1.00 ms", "1.00 µs", "wrong ratio"),
        ("1.50 – 2.50", "2.10 – 2.50", "wrong ratio"),
        ("| a | b |", "| c | b |", "nobody's"),
        ("| a | b |", "| c | b |", "not on the page"),
        ("2.00 ms | 1.00 ms | 2.00 | 1.50 – 2.50 | 7", f"{NOT_RUN} | {NOT_RUN} | – | – | –", "must be"),
    ],
)
def test_what_is_wrong_with_a_page_is_found(right: str, wrong: str, fault: str) -> None:
    subject = replace(SUBJECT, pairs=PAIRS)
    assert wrong_rows(GOOD, [subject]) == []
    assert right in GOOD
    assert any(fault in found for found in wrong_rows(GOOD.replace(right, wrong), [subject]))


def test_figures_have_three_digits() -> None:
    assert [significant(value) for value in (12345.6, 999.9, 99.96, 9.996, 0.99949, 0.00312)] == [
        "12,346", "1,000", "100", "10.0", "0.999", "0.003",
    ]  # fmt: skip
    assert [shown(value, "s") for value in (2.5, 0.0025, 2.5e-6, 2.5e-9)] == ["2.50 s", "2.50 ms", "2.50 µs", "2.50 ns"]
    assert shown(3 << 19, "bytes") == "1.50 MiB"


def test_a_report_says_what_it_was_made_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "vllm", lambda: None)
    facts = machine.facts()
    assert facts["vLLM"] == "not there"
    assert "kvpage" in facts["packages"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", facts["date"])
    assert re.fullmatch(r"\d+ % of .*", machine.Use().facts()["other use meanwhile"])


def test_a_folder_without_vllm_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(vllm_peer.SOURCE_VARIABLE, str(tmp_path))
    with pytest.raises(SystemExit, match="name the folder it lies in"):
        vllm_peer.vllm.__wrapped__()
