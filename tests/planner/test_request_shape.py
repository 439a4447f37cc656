"""Whatever Python object stands anywhere in a request, the answer is a plan or an error that points at it."""

from __future__ import annotations

import copy
import datetime
import decimal
import itertools
from collections import UserDict, deque
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any

import pytest

import kvpage
from kvpage.errors import JsonInvalid, KvpageError, SpecInvalid
from kvpage.request_shape import MAX_DEPTH, MAX_ITEMS, MAX_KEYS, MAX_LAYERS

WRITTEN = {
    "shape": ["num_blocks", 2, "block_size", "num_kv_heads", "head_size"],
    "stride_order": [0, 1, 2, 3, 4],
    "layered_stride_order": [1, 0, 2, 3, 4, 5],
}
ATTENTION = {"kind": "full_attention", "num_kv_heads": 1, "head_size": 16, "dtype": "float16"}
REQUEST: dict[str, Any] = {
    "strategy": "unify", "num_blocks": 40, "max_model_len": 100, "kv_cache_layout": "NHD", "align_hybrid": False,
    "layers": [
        {**ATTENTION, "name": "a", "backend": "flash_attn", "block_size": 16,
         "kernel_block_sizes": [16, {"multiple_of": 16}], "count": 1, "kv_sharing_target": None},
        {**ATTENTION, "name": "b", "backend": WRITTEN},
        {"name": "s", "kind": "mamba", "shapes": [[4, 4]], "dtypes": ["float32"]},
        {"name": "m", "kind": "mla_attention", "head_size": 576, "dtype": "bfloat16"},
    ],
}  # fmt: skip


class Silent:
    def __repr__(self) -> str:
        raise RuntimeError("it shall not be asked")


def nested(levels: int) -> list[Any]:
    deep: list[Any] = []
    for _ in range(levels):
        deep = [deep]
    return deep


DEEPEST = nested(100_000)  # one for all places: it takes long to make


def cyclic() -> list[Any]:
    ring: list[Any] = []
    ring.append(ring)
    return ring


HOSTILE: list[Callable[[], Any]] = [
    lambda: "\ud800", lambda: "a\udfffb", lambda: "x" * 100_000, lambda: b"x", lambda: bytearray(b"x"),
    lambda: (item for item in [1]), itertools.count, lambda: itertools.repeat("num_blocks"), lambda: {1, 2},
    lambda: deque([1]), lambda: range(3), lambda: range(10**12), lambda: [0] * 100_000, lambda: {"a": 1}.keys(),
    lambda: decimal.Decimal(4), lambda: datetime.date(2020, 1, 1), lambda: 1j, lambda: ..., lambda: int, object,
    Silent, lambda: [Silent()], lambda: 10**90, lambda: float("nan"), lambda: float("inf"),
    cyclic, lambda: DEEPEST, lambda: {1: 2}, lambda: {"\ud800": 1}, lambda: {(1, 2): 1}, lambda: {None: 1},
    lambda: memoryview(b"xx"), lambda: {str(number): 0 for number in range(1000)},
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, inner in items:
        yield from places(inner, (*path, step))


def refusal_of(request: Any) -> KvpageError | None:
    try:
        kvpage.plan(request)
    except KvpageError as error:
        return error
    return None


@pytest.mark.parametrize("hostile", HOSTILE)
def test_anything_anywhere_is_planned_or_pointed_at(hostile: Callable[[], Any]) -> None:
    for *way, last in places(REQUEST):
        request = copy.deepcopy(REQUEST)
        place: Any = request
        for step in way:
            place = place[step]
        place[last] = hostile()
        refusal = refusal_of(request)
        assert str(refusal).encode()
        if isinstance(refusal, SpecInvalid):
            assert refusal.errors[0].pointer.startswith(f"/{(*way, last)[0]}")


@pytest.mark.parametrize("hostile", HOSTILE)
def test_anything_instead_of_a_request_is_refused(hostile: Callable[[], Any]) -> None:
    with pytest.raises(SpecInvalid):
        kvpage.plan(hostile())


@pytest.mark.parametrize("key", ["\ud800", 1, (1, 2), None, b"x", "x" * 100_000, "a/b~c", "\x1b[31m", float("nan")])
@pytest.mark.parametrize("place", [(), ("layers", 0), ("layers", 1, "backend")])
def test_a_key_nobody_knows_is_refused(key: Any, place: tuple[Any, ...]) -> None:
    request = copy.deepcopy(REQUEST)
    inside: Any = request
    for step in place:
        inside = inside[step]
    inside[key] = 1
    with pytest.raises(SpecInvalid) as caught:
        kvpage.plan(request)
    assert str(caught.value).encode().decode().isprintable()
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("wrap", [UserDict, MappingProxyType, dict])
@pytest.mark.parametrize("sequence", [list, tuple])
def test_every_mapping_and_sequence_will_do(wrap: Callable[[Any], Any], sequence: Callable[[Any], Any]) -> None:
    request = {**REQUEST, "layers": sequence([wrap(layer) for layer in REQUEST["layers"]])}
    assert kvpage.plan(wrap(request)) == kvpage.plan(REQUEST)


def test_models_will_do_and_are_looked_at() -> None:
    parsed = kvpage.PlanRequest.parse(REQUEST)
    assert kvpage.plan(parsed) == kvpage.plan(REQUEST)
    assert kvpage.plan({**REQUEST, "layers": parsed.layers}) == kvpage.plan(REQUEST)
    for invalid in (
        kvpage.PlanRequest.model_construct(),
        kvpage.PlanRequest.model_construct(layers=(1,), strategy="unify", num_blocks=2),
        parsed.model_copy(update={"num_blocks": -5}),
        parsed.model_copy(update={"layers": (parsed.layers[0].model_copy(update={"head_size": "\ud800"}),)}),
    ):
        with pytest.raises(SpecInvalid) as caught:
            kvpage.plan(invalid)
        assert caught.value.errors


@pytest.mark.parametrize(
    ("changes", "pointer"),
    [
        ({"layers": [{}] * (MAX_LAYERS + 1)}, "/layers"),
        ({"layers": [{**ATTENTION, "name": "a", "kernel_block_sizes": [16] * (MAX_ITEMS + 1)}]},
         "/layers/0/kernel_block_sizes"),
        ({str(number): 0 for number in range(MAX_KEYS)}, ""),
        ({"layers": [dict.fromkeys(map(str, range(MAX_KEYS + 1)))]}, "/layers/0"),
        ({"ranks": nested(MAX_DEPTH + 1)}, "/ranks" + "/0" * MAX_DEPTH),
    ],
)  # fmt: skip
def test_the_bounds_are_named_with_their_place(changes: dict[str, Any], pointer: str) -> None:
    with pytest.raises(SpecInvalid) as caught:
        kvpage.plan({**REQUEST, **changes})
    assert [fault.pointer for fault in caught.value.errors] == [pointer]


def test_a_lone_surrogate_is_an_error_of_the_request_here_and_of_the_json_there() -> None:
    """Over HTTP the document itself is refused; in Python there is no document."""
    from kvpage.strict_json import loads

    with pytest.raises(JsonInvalid):
        loads(b'{"strategy": "\\ud800"}')
    with pytest.raises(SpecInvalid):
        kvpage.plan({**REQUEST, "strategy": "\ud800"})
