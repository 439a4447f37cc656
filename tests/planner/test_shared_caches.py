"""`kv_sharing_target`: layers that read another layer's cache."""

from __future__ import annotations

from typing import Any

import pytest

import kvpage
from kvpage.errors import SpecInvalid
from planner import build, comparison

Json = dict[str, Any]
FULL = [build.full(f"full.{i}") for i in range(3)]
WINDOWS = [build.sliding(f"window.{i}") for i in range(12)]


def sharing(layer: Json, name: str, target: str) -> Json:
    return layer | {"name": name, "kv_sharing_target": target}


def test_twenty_of_thirty_five_layers_cost_nothing() -> None:
    """15 layers of their own, 20 that share: 35 views over blocks of 15 pages, as without the 20."""
    later = [sharing(WINDOWS[0], f"late.{i}", "window.11") for i in range(16)]
    later += [sharing(FULL[0], f"late.{i}", "full.2") for i in range(16, 20)]
    alone = kvpage.plan(build.request(*FULL, *WINDOWS, memory_bytes=1 << 32))
    request = build.request(*FULL, *WINDOWS, *later, memory_bytes=1 << 32)
    plan = kvpage.plan(request)
    assert plan.num_blocks == alone.num_blocks
    assert plan.bytes_per_block == alone.bytes_per_block == 3 * 65_536
    assert plan.capacity == alone.capacity
    assert plan.waste == alone.waste
    assert sum(len(layer.tensors) for layer in plan.layers.values()) == 35
    assert [group.layers[:-16] for group in plan.groups if "late.0" in group.layers] == [
        next(group.layers for group in alone.groups if "window.11" in group.layers)
    ]
    for name, target in ((f"late.{i}", "window.11" if i < 16 else "full.2") for i in range(20)):
        got = plan.layers[name]
        assert (got.decision, got.kv_sharing_target) == ("share", target)
        assert got.tensors == plan.layers[target].tensors
        assert target in got.reason
    assert plan.buffer_size_bytes == alone.buffer_size_bytes
    comparison.compare(request)


# the owner as asked for, and how its page ends up
OWNERS: list[tuple[str, list[Json], str]] = [
    ("kept", [build.full("a")], "a"),
    ("scaled", [build.full("a", heads=4), build.sliding("b")], "a"),
    ("padded", [build.full("a", size=192), build.sliding("b")], "b"),
    ("one type", [build.full("a"), build.full("b", size=80)], "b"),
    ("a state", [build.state("a", [[65_536]], ["int8"]), build.full("b")], "a"),
    ("latent rows", [build.mla("a"), build.mla("b", size=132)], "b"),
    ("packed", [build.full("a", backend="BLNHC"), build.sliding("b", size=64, backend="BLNHC")], "b"),
    ("interleaved", [build.full("a", backend="BHLNC"), build.full("b", backend="BHLNC")], "b"),
    ("kernel blocks", [build.full("a", block_size=64, kernel_block_sizes=[16])], "a"),
]


@pytest.mark.parametrize(("what", "layers", "owner"), OWNERS, ids=[case[0] for case in OWNERS])
@pytest.mark.parametrize("first", [True, False], ids=["sharer first", "owner first"])
def test_a_sharer_is_as_its_owner_however_that_is_planned(
    what: str, layers: list[Json], owner: str, first: bool
) -> None:
    alone = kvpage.plan(build.request(*layers, num_blocks=2000))
    (wanted,) = (layer for layer in layers if layer["name"] == owner)
    sharer = sharing(wanted, "late", owner)
    request = build.request(*([sharer, *layers] if first else [*layers, sharer]), num_blocks=2000)
    plan = kvpage.plan(request)
    late, early = plan.layers["late"], plan.layers[owner]
    assert early == alone.layers[owner]
    for field in ("tensors", "group", "block_size", "page_size_bytes", "page_size_padded", "real_page_size_bytes"):
        assert getattr(late, field) == getattr(early, field)
    assert list(plan.layers) == [layer["name"] for layer in request["layers"]]
    comparison.compare(request)


FAULTS: list[tuple[str, list[Json]]] = [
    ("no such layer", [FULL[0], sharing(FULL[0], "late", "full")]),
    ("itself", [sharing(FULL[0], "late", "late")]),
    ("each other", [sharing(FULL[0], "a", "b"), sharing(FULL[0], "b", "a")]),
    ("a chain", [FULL[0], sharing(FULL[0], "a", "full.0"), sharing(FULL[0], "late", "a")]),
    ("another kind", [FULL[0], sharing(WINDOWS[0], "late", "full.0")]),
    ("another window", [WINDOWS[0], sharing(build.sliding(window=8), "late", "window.0")]),
    ("another size", [FULL[0], sharing(build.full(size=64), "late", "full.0")]),
    ("another dtype", [FULL[0], sharing(build.full(dtype="float16"), "late", "full.0")]),
    ("another block size", [FULL[0], sharing(build.full(block_size=32), "late", "full.0")]),
    ("another backend", [FULL[0], sharing(build.full(backend="flash_attn"), "late", "full.0")]),
    ("padding", [FULL[0], sharing(build.full(page_size_padded=98_304), "late", "full.0")]),
    ("a layer without a cache", [build.encoder("e"), sharing(FULL[0], "late", "e")]),
    ("nothing to share", [build.encoder("e"), sharing(build.encoder("e"), "late", "e")]),
]


@pytest.mark.parametrize(("what", "layers"), FAULTS, ids=[case[0] for case in FAULTS])
def test_what_cannot_be_shared(what: str, layers: list[Json]) -> None:
    with pytest.raises(SpecInvalid) as caught:
        kvpage.plan(build.request(*layers))
    assert type(caught.value) is SpecInvalid
    assert caught.value.errors[0].pointer.endswith("/kv_sharing_target")
    comparison.compare(build.request(*layers))


def test_a_counted_entry_shares_one_target() -> None:
    layers = [build.full("a"), sharing(build.full(), "late.{i}", "a") | {"count": 3}]
    plan = kvpage.plan(build.request(*layers))
    assert plan.groups[0].layers == ("a", "late.0", "late.1", "late.2")
