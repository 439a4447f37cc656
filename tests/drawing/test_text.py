"""Pictures can be read: no text over another, whatever layers are called; and nothing in a name breaks out."""

from __future__ import annotations

import json

import msgspec
import pytest

import kvpage
from drawing import plans, reading
from kvpage.drawing.picture import layout_svg
from kvpage.drawing.text import clipped, escaped, width_px
from planner import build
from support.checkout import ROOT

MAX_PICTURE_BYTES = 200_000
HOSTILE = [
    "</text><script>alert(1)</script>",
    "\"' onload='x' &amp; <![CDATA[ ]]> --> {i}",
    "\u202egnp.exe\u2066\u200b",
    "\x00\x1b[31m\x9b\r\n\t\ufffe\uffff\ud800",
    "x" * 256,
    "層" * 85,
    "שכבה.0",
    "🧠" * 60,
]


@pytest.mark.parametrize("name", plans.arrangements())
def test_no_text_lies_over_another_or_outside(name: str) -> None:
    assert reading.overlaps(reading.read(layout_svg(plans.arrangements()[name]))) == []


@pytest.mark.parametrize("example", ["mimo", "qwen3-next"])
def test_neither_does_it_in_the_examples(example: str) -> None:
    plan = kvpage.plan(json.loads((ROOT / "examples" / f"{example}.json").read_text()))
    picture = reading.read(layout_svg(plan))
    assert reading.overlaps(picture) == []
    texts = " ".join(text.text for text in picture.texts)
    for layer in plan.layers.values():
        assert f"{layer.page_size_bytes:,}" in texts
    assert f"{plan.num_blocks:,} blocks of {plan.bytes_per_block:,} bytes" in texts


def test_the_overlap_check_fires() -> None:
    svg = layout_svg(plans.arrangements()["packed"])
    picture = reading.read(reading.doctored(svg, r'<text class="soft" x="[\d.]+" y="([\d.]+)"', lambda y: y - 15))
    assert reading.overlaps(picture) != []
    outside = reading.read(reading.doctored(svg, r'<text class="bold" x="([\d.]+)"', lambda _: 1150))
    assert reading.overlaps(outside) != []


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_stays_text(name: str) -> None:
    plan = plans.renamed(
        plans.nested(num_layers=3, page_bytes=64, blocks_per_slab=2, slab_bytes=512), [name, name + "2"]
    )
    plan = msgspec.structs.replace(plan, strategy=name, plan_id=name)
    svg = layout_svg(plan)
    svg.encode()  # half a surrogate pair would be refused
    picture = reading.read(svg)
    assert reading.overlaps(picture) == []
    assert reading.faults(picture, plan) == []
    assert all(line.isprintable() for line in svg.splitlines())
    tags = {element.tag.removeprefix(reading.SVG) for element in picture.root.iter()}
    assert tags <= {"svg", "title", "desc", "style", "defs", "pattern", "path", "rect", "g", "text"}
    attributes = {attribute for element in picture.root.iter() for attribute in element.attrib}
    assert not [attribute for attribute in attributes if attribute.startswith("on") or "href" in attribute]


def test_a_kind_stays_text_too() -> None:
    plan = plans.nested(num_layers=1, page_bytes=64, blocks_per_slab=1, slab_bytes=64)
    groups = tuple(msgspec.structs.replace(group, kind="<b>\x07") for group in plan.groups)
    picture = reading.read(layout_svg(msgspec.structs.replace(plan, groups=groups)))
    assert any("<b>\\x07" in text.text for text in picture.texts)


def test_the_picture_speaks_to_screen_readers() -> None:
    root = reading.read(layout_svg(plans.arrangements()["packed"])).root
    assert root.get("role") == "img"
    named = {element.get("id"): element.text for element in root if element.get("id")}
    title, description = (named[key] for key in root.get("aria-labelledby").split())
    assert title == "Page layout by strategy unify"
    assert "3 layers" in description


def test_a_picture_needs_nothing_from_outside() -> None:
    svg = layout_svg(plans.arrangements()["packed"])
    assert svg.count("http") == 1  # the name space, which nobody loads
    assert "<script" not in svg
    assert "@import" not in svg
    assert svg.count("url(") == svg.count("url(#hatch-")


@pytest.mark.parametrize("blocks_per_slab", [1, 30, 46, 60, 61])
def test_pictures_of_large_plans_are_small(blocks_per_slab: int) -> None:
    plan = plans.nested(
        num_layers=4, page_bytes=1_000_000, blocks_per_slab=blocks_per_slab, slab_bytes=9_000_000 * blocks_per_slab,
        num_groups=1000,
    )  # fmt: skip
    svg = layout_svg(plan)
    assert len(svg.encode()) < MAX_PICTURE_BYTES
    assert "more, of other looks" in svg


def test_a_thousand_layers_are_drawn_as_one() -> None:
    plan = plans.planned(
        build.full("a.{i}", count=700, backend="flash_attn"),
        build.full("b.{i}", count=300, size=80, backend="flash_attn"),
    )
    svg = layout_svg(plan)
    picture = reading.read(svg)
    assert len(svg) < 20_000
    assert reading.faults(picture, plan) == []
    assert {"700 ×", "300 ×"} <= {text.text for text in picture.texts}


def test_layers_of_a_thousand_sizes_are_drawn_too() -> None:
    layers = [build.full(f"a.{size}", size=size * 8, backend="flash_attn") for size in range(1, 300)]
    plan = plans.planned(*layers)
    svg = layout_svg(plan)
    assert reading.faults(reading.read(svg), plan) == []
    assert reading.overlaps(reading.read(svg)) == []
    assert len(svg) < MAX_PICTURE_BYTES


def test_text_is_cut_at_what_fits() -> None:
    assert clipped("short", 10, 100) == "short"
    assert clipped("a long name", 10, 40) == "a lo…"
    assert clipped("x", 10, 1) == ""
    assert width_px(clipped("層" * 50, 11, 200), 11) <= 200
    assert escaped("<&>'\"") == "&lt;&amp;&gt;&#39;&quot;"
