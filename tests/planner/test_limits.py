"""What a request may cost: faults named, entries looked at. Each case is a body of megabytes that says nothing."""

from __future__ import annotations

from typing import Any

import pytest

import kvpage
from kvpage.errors import SpecInvalid
from kvpage.pointers import MAX_FAULTS
from planner import build

LAYER = build.full("one")


def refusal(request: Any) -> SpecInvalid:
    with pytest.raises(SpecInvalid) as caught:
        kvpage.plan(request)
    return caught.value


@pytest.mark.parametrize("entry", [{}, 0, {"kind": "mamba"}, "x", None], ids=repr)
def test_too_many_entries_are_counted_and_not_looked_at(entry: object) -> None:
    error = refusal(build.request() | {"layers": [entry] * 4097})
    assert [fault.pointer for fault in error.errors] == ["/layers"]
    assert "4097" in error.message


@pytest.mark.parametrize("place", ["request", "layer"])
def test_too_many_keys_are_one_fault(place: str) -> None:
    junk = {f"k{index}": 0 for index in range(100_000)}
    request = build.request(LAYER) | junk if place == "request" else build.request(LAYER | junk)
    assert [fault.pointer for fault in refusal(request).errors] == ["" if place == "request" else "/layers/0"]


def test_an_error_names_some_faults_and_counts_all() -> None:
    error = refusal(build.request(*[{"kind": "mamba"}] * 4096))  # name, shapes and dtypes are missing in each
    assert len(error.errors) == MAX_FAULTS
    assert f"(and {3 * 4096 - 1} more)" in error.message


@pytest.mark.parametrize("value", ["", -1, 1, None])
@pytest.mark.parametrize("field", ["stride_order", "layered_stride_order", "shape"])
def test_a_long_list_in_a_backend_is_a_few_faults(field: str, value: object) -> None:
    backend = {"shape": ["num_blocks", 2, "block_size", "num_kv_heads", "head_size"], field: [value] * 200_000}
    assert len(refusal(build.request(LAYER | {"backend": backend})).errors) <= 2


@pytest.mark.parametrize("field", ["shapes", "dtypes", "kernel_block_sizes"])
def test_a_long_list_in_a_layer_is_a_few_faults(field: str) -> None:
    layer = build.state("s", [[1]], ["int8"]) if field != "kernel_block_sizes" else LAYER
    assert len(refusal(build.request(layer | {field: [-1] * 200_000})).errors) <= 2


def test_as_many_groups_as_layers_are_checked_in_one_pass() -> None:
    """4,096 states that each have a block size, so a group, of their own, over one piece of memory."""
    layers = [build.state(f"s{index}", [[1]] * 4, ["int8"] * 4, block_size=index + 1) for index in range(4096)]
    assert len(kvpage.plan(build.request(*layers, num_blocks=4096)).groups) == 4096
