"""Pictures are to scale and complete: measured against the bytes that the plan's tensors really have."""

from __future__ import annotations

import json
import random
from itertools import pairwise

import msgspec
import pytest

import kvpage
from drawing import plans, reading
from kvpage.drawing.picture import layout_svg
from kvpage.errors import NotEnoughMemory, SpecInvalid
from kvpage.plans import Plan
from planner import build, random_requests
from support.checkout import ROOT

ARRANGEMENTS = plans.arrangements()


@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_bars_are_to_scale_and_show_the_bytes_of_the_tensors(name: str) -> None:
    plan = ARRANGEMENTS[name]
    picture = reading.read(layout_svg(plan))
    assert reading.faults(picture, plan) == []
    drawn = [int(group) for bar in picture.of("slab") for group in bar.of.split()]
    assert sorted(drawn) == list(range(len(plan.groups)))
    assert bool(picture.of("stride")) == bool(plan.groups)


@pytest.mark.parametrize("name", ["regions", "packed", "planes", "heads outside", "interleaved", "states", "nested"])
def test_pieces_are_the_runs_of_bytes_that_walking_all_indices_finds(name: str) -> None:
    plan = ARRANGEMENTS[name]
    for bar in reading.read(layout_svg(plan)).of("slab"):
        for group in map(int, bar.of.split()):
            walked = reading.runs(reading.owned_bytes(plan, group, slab=2))
            data = [rect for rect in bar.rects if rect.look[0] == "h"]
            assert [rect.size_bytes for rect in data] == [size for _, size in walked]


@pytest.mark.parametrize("name", ["packed", "interleaved", "nested"])
def test_pieces_lie_where_the_tensors_have_them(name: str) -> None:
    plan = ARRANGEMENTS[name]
    for bar in reading.read(layout_svg(plan)).of("slab"):
        walked = reading.runs(reading.owned_bytes(plan, int(bar.of.split()[0]), slab=2))
        offset, places = 0, []
        for rect in bar.rects:
            if rect.look[0] == "h":
                places.append(offset)
            offset += rect.size_bytes
        assert places == [start - 2 * plan.slab_bytes for start, _ in walked]


def test_regions_are_drawn_apart_and_padding_behind_its_data() -> None:
    wide, *_, narrow = reading.read(layout_svg(ARRANGEMENTS["regions"])).of("slab")
    gaps = [right.x - left.x - left.width for left, right in pairwise(wide.rects)]
    assert min(gaps) > 5
    pairs = list(pairwise(narrow.rects))
    assert [right.look for left, right in pairs if left.look == "h1"] == ["pad"] * len(pairs[::2])


@pytest.mark.parametrize("seed", range(60))
def test_whatever_is_planned_is_drawn_truly(seed: int) -> None:
    plan = random_plan(random.Random(seed))
    picture = reading.read(layout_svg(plan))
    assert reading.faults(picture, plan) == []
    assert reading.overlaps(picture) == []


def random_plan(rng: random.Random) -> Plan:
    num_layers, page = rng.choice([1, 2, 7, 40, 300]), rng.choice([1, 64, 1000, 98_304])
    blocks = rng.choice([1, 2, 13, 61, 131, 1039])
    stride = num_layers * page + rng.choice([0, 1, 7, page * 3])
    return plans.nested(
        num_layers=num_layers, page_bytes=page, blocks_per_slab=blocks, slab_bytes=stride * blocks,
        num_groups=rng.choice([1, 2, 5, 40]),
    )  # fmt: skip


def test_a_rank_that_has_no_layer_of_some_group_is_drawn() -> None:
    layers = (
        build.full("full.{i}", count=2, backend="flash_attn"),
        build.sliding("s.{i}", count=2, backend="flash_attn"),
    )
    ranks = [{"layers": ["full.0", "full.1"]}, {"layers": ["s.0", "s.1"]}]
    ranked = kvpage.plan_ranks(build.request(*layers, ranks=ranks))
    assert any(not group.layers for plan in ranked.ranks for group in plan.groups)
    for plan in ranked.ranks:
        picture = reading.read(layout_svg(plan))
        assert reading.overlaps(picture) == []
        assert len(picture.of("slab")) == sum(1 for group in plan.groups if group.layers)


def test_random_requests_are_drawn_truly() -> None:
    drawn = 0
    for seed in range(120):
        rng = random.Random(seed)
        request = (random_requests.small_request if seed % 2 else random_requests.random_request)(rng)
        try:
            plan = kvpage.plan(request)
        except (SpecInvalid, NotEnoughMemory):
            continue
        picture = reading.read(layout_svg(plan))
        assert reading.faults(picture, plan) == [], seed
        assert reading.overlaps(picture) == [], seed
        drawn += 1
    assert drawn > 40


# --- the checks fire --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "change"),
    [
        (r'class="h1"[^>]* width="([\d.]+)"', lambda width: width * 1.05),
        (r'class="pad"[^>]* width="[\d.]+"[^>]*data-bytes="(\d+)"', lambda size: int(size) + 8),
        (r'class="h0"[^>]*data-bytes="(\d+)"', lambda size: int(size) // 2),
        (r'class="h0" x="([\d.]+)"', lambda x: x + 40),
    ],
)
def test_a_picture_that_lies_is_found(pattern: str, change: object) -> None:
    plan = ARRANGEMENTS["packed"]
    svg = layout_svg(plan)
    assert reading.faults(reading.read(svg), plan) == []
    assert reading.faults(reading.read(reading.doctored(svg, pattern, change)), plan) != []


def test_the_picture_of_another_plan_is_found() -> None:
    picture = reading.read(layout_svg(ARRANGEMENTS["packed"]))
    assert reading.faults(picture, ARRANGEMENTS["regions"]) != []


def test_a_stride_that_is_drawn_wrong_is_found() -> None:
    plan = ARRANGEMENTS["packed"]
    svg = layout_svg(plan)
    start = svg.index('data-panel="stride"')
    wrong = reading.doctored(svg[start:], r'data-bytes="(\d+)"', lambda size: int(size) + 2)
    assert any("stride" in fault for fault in reading.faults(reading.read(svg[:start] + wrong), plan))


def test_the_picture_shows_nothing_that_a_plan_id_does_not_cover() -> None:
    """Or two pictures would go by one name."""
    plan = kvpage.plan(build.request(build.full(backend="flash_attn"), strategy="auto"))
    layers = {name: msgspec.structs.replace(layer, reason="other") for name, layer in plan.layers.items()}
    other = msgspec.structs.replace(plan, layers=layers, efficiency=None, front=(), rejected=())
    assert other != plan
    assert other.computed_id() == plan.plan_id
    assert layout_svg(other) == layout_svg(plan)


@pytest.mark.parametrize(("strategy", "memory_bytes"), [("slab", 1 << 30), ("nested", 1 << 30), ("nested", 40 << 30)])
@pytest.mark.parametrize("example", ["mimo", "qwen3-next"])
def test_what_the_searches_find_is_drawn_truly(example: str, strategy: str, memory_bytes: int) -> None:
    request = json.loads((ROOT / "examples" / f"{example}.json").read_text())
    request.pop("num_blocks", None)
    plan = kvpage.plan(request | {"strategy": strategy, "memory_bytes": memory_bytes})
    picture = reading.read(layout_svg(plan))
    assert reading.faults(picture, plan) == []
    assert reading.overlaps(picture) == []
