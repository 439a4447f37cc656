"""What LMCache's released detection makes of our tensors: recorded, and compared with what the plans say now.

LMCACHE_SOURCE, or an installed LMCache, has it asked again: the folder that holds the package `lmcache`, as an unpacked
wheel has. It is asked in a process of its own (lmcache_program.py, which also records).
"""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from integrations.reader_cases import CASES, Case, Json, geometry, plan_of, shown
from support.checkout import ROOT

PROGRAM = Path(__file__).with_name("lmcache_program.py")
RECORD = ROOT / "tests/data/readers/lmcache.json"
PAGE = ROOT / "docs/readers.md"


def recorded() -> Json:
    record: Json = json.loads(RECORD.read_text())
    return record


def fault(case: Case, answer: Json) -> str | None:
    """What is wrong with a recorded answer; None where it is one to the tensors of today, and comes out as is said."""
    plan = plan_of(case)
    if answer["shown"] != shown(plan):
        return "the plan has changed since: record again"
    outcome = "refused"
    if "refused" not in answer:
        found = {name: without_format(layer) for name, layer in answer["layers"].items()}
        outcome = "recovered" if found == geometry(plan, case) else "misread"
    return None if outcome == case.outcome else f"{outcome}, not {case.outcome}"


def without_format(layer: Json) -> Json:
    return {key: value for key, value in layer.items() if key != "format"}


@pytest.mark.parametrize("name", CASES)
def test_what_it_found_out_is_what_the_plan_says(name: str) -> None:
    assert fault(CASES[name], recorded()["cases"][name]) is None


def test_every_recorded_answer_is_looked_at() -> None:
    assert set(recorded()["cases"]) == set(CASES)


@pytest.mark.parametrize(
    ("name", "change", "found"),
    [
        ("BLHNC BLHNC, slab", lambda answer: answer["layers"]["b.1"].update(block_stride=1), "misread, not recovered"),
        ("BLHNC BLHNC, slab", lambda answer: answer["layers"]["b.1"].update(offset_bytes=1), "misread, not recovered"),
        ("BLHNC BLHNC, slab", lambda answer: answer.update(refused="no"), "refused, not recovered"),
        ("LHBNC HND, full", lambda answer: answer.update(refused="no"), "refused, not misread"),
        ("LHBNC HND, full", lambda answer: answer["shown"]["a.0"].append(0), "the plan has changed"),
    ],
)
def test_another_answer_is_a_fault(name: str, change: Any, found: str) -> None:
    answer = copy.deepcopy(recorded()["cases"][name])
    change(answer)
    assert (fault(CASES[name], answer) or "").startswith(found)


def rows(record: Json) -> list[str]:
    """Of the table in the document."""
    pages: dict[tuple[str, ...], list[str]] = {}
    for name, case in CASES.items():
        answer = record["cases"][name]
        formats = {layer["format"] for layer in answer.get("layers", {}).values()}
        row = (f"`{case.layout}`", f"`{case.says}`", case.outcome, ", ".join(f"`{one}`" for one in sorted(formats)))
        pages.setdefault(row, []).append(case.pages)
    return [f"| {row[0]} | {row[1]} | {', '.join(kinds)} | {row[2]} | {row[3]} |" for row, kinds in pages.items()]


def test_the_document_has_the_answers() -> None:
    record, text = recorded(), PAGE.read_text()
    assert "\n".join(rows(record)) + "\n\n" in text
    assert f"LMCache {record['lmcache']}" in text


def test_blocks_that_were_not_moved_are_noticed() -> None:
    """The check of lmcache_program.py, with a transfer that does nothing."""
    torch = pytest.importorskip("torch")
    from integrations import lmcache_program
    from kvpage.client.views import BufferViews, PlannedViews

    plan = plan_of(CASES["BLHNC BLHNC, full"])
    buffer, views = BufferViews(torch.zeros(plan.buffer_size_bytes, dtype=torch.uint8)), PlannedViews(plan).by_layer
    idle = SimpleNamespace(
        kernels=SimpleNamespace(multi_layer_block_kv_transfer=lambda *_: None),
        directions=SimpleNamespace(D2H=1, H2D=0),
    )
    one = SimpleNamespace(
        layer_indices=[0], shape_desc=SimpleNamespace(bs=16, nh=4, hs=128, kv_size=1), engine_kv_format=None
    )
    layers = [buffer.tensor(views["a.0"][0])]
    with pytest.raises(RuntimeError, match="not moved"):
        lmcache_program.check_moved(idle, buffer, [views["a.0"][0]], layers, one)  # type: ignore[arg-type]


def source() -> Path:
    """The folder of the package; skips where there is none."""
    named = os.environ.get("LMCACHE_SOURCE")
    found = importlib.util.find_spec("lmcache") if named is None else None
    if named is None and (found is None or found.origin is None):
        pytest.skip("no LMCache: install it, or name its folder in LMCACHE_SOURCE")
    return Path(named) if named else Path(str(found.origin if found else "")).parents[1]


def test_a_real_lmcache_answers_as_recorded() -> None:
    folder = source()
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["cases"] == recorded()["cases"]
