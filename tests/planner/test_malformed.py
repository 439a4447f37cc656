"""Bad requests: each is refused with a pointer to the fault, and nothing but a `KvpageError` ever escapes."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvpage
from kvpage.errors import MAX_ECHO_CHARS, InternalError, KvpageError, NotSupported, SpecInvalid
from planner import build
from planner.random_requests import random_request, small_request

Json = dict[str, Any]
ABSENT = object()
MAX_PROSE_CHARS = 10 * MAX_ECHO_CHARS  # the echo, each character perhaps escaped as six, and the choices there are


def good() -> Json:
    """A request with one layer of each kind, in this order: full 0, sliding 1, chunked 2, MLA 3, state 4, encoder 5."""
    return build.request(
        build.full(),
        build.sliding(),
        build.chunked(),
        build.mla(size=512, block_size=64),
        build.state("state", [[4, 8], [16]], ["bfloat16", "float32"]),
        build.encoder(),
    )


def with_value(pointer: str, value: object) -> Json:
    """The good request with one value set, or taken out, at a JSON pointer."""
    request = good()
    parts: list[Any] = [int(part) if part.isdigit() else part for part in pointer.split("/")[1:]]
    *path, last = parts
    target: Any = request
    for part in path:
        target = target[part]
    if value is ABSENT:
        del target[last]
    elif isinstance(target, list) and last == len(target):
        target.append(value)
    else:
        target[last] = value
    return request


def test_the_good_request_is_good() -> None:
    kvpage.plan(good()).check()


# Where a value is put, the value, and where the error must point if not there.
Case = tuple[str, object, str | None]
NUMBERS = [
    *("/layers/0/block_size", "/layers/0/num_kv_heads", "/layers/0/head_size", "/layers/0/head_size_v"),
    *("/layers/1/sliding_window", "/layers/2/attention_chunk_size", "/layers/3/page_alignment_bytes"),
    *("/layers/4/num_speculative_blocks", "/layers/4/shapes/0/1", "/layers/0/page_size_padded", "/layers/0/count"),
    *("/memory_bytes", "/max_model_len", "/max_num_batched_tokens", "/max_num_encoder_input_tokens"),
    "/layers/3/compress_ratio",
]
NO_SIZES: list[object] = [True, "8", 8.0, -1, 2**62 + 1, [], {}, ""]
NOT_NUMBERS: list[Case] = [(pointer, value, None) for pointer in NUMBERS for value in NO_SIZES]
NULLABLE = (
    *("block_size", "head_size_v", "page_alignment_bytes", "page_size_padded", "max_model_len", "memory_bytes"),
    "max_num_encoder_input_tokens",
)
NULLS: list[Case] = [(pointer, None, None) for pointer in NUMBERS if not pointer.endswith(NULLABLE)]
ZEROS: list[Case] = [(pointer, 0, None) for pointer in NUMBERS if not pointer.endswith("num_speculative_blocks")]
WRITTEN_ORDERS = {"shape": build.ROW_SHAPE, "stride_order": [0, 1, 2, 3], "layered_stride_order": [1, 0, 2, 3, 4]}
OTHERS: list[Case] = [
    # missing
    ("/layers", ABSENT, None),
    ("/strategy", ABSENT, None),
    ("/memory_bytes", ABSENT, ""),
    ("/layers/0/name", ABSENT, None),
    ("/layers/0/kind", ABSENT, "/layers/0"),
    ("/layers/0/num_kv_heads", ABSENT, None),
    ("/layers/0/head_size", ABSENT, None),
    ("/layers/0/dtype", ABSENT, None),
    ("/layers/1/sliding_window", ABSENT, None),
    ("/layers/2/attention_chunk_size", ABSENT, None),
    ("/layers/3/head_size", ABSENT, None),
    ("/layers/4/shapes", ABSENT, None),
    ("/layers/4/dtypes", ABSENT, None),
    # unknown keys, and keys of another kind
    ("/colour", "red", None),
    ("/layers/0/colour", "red", None),
    ("/layers/0/type", "full", None),
    ("/layers/3/sliding_window", 16, None),
    ("/layers/4/head_size", 16, None),
    ("/layers/0/shapes", [[4]], None),
    ("/layers/0/num_speculative_blocks", 1, None),
    ("/layers/0/backend", {"shape": build.ROW_SHAPE, "strides": [0, 1, 2, 3]}, "/layers/0/backend/strides"),
    # wrong types
    ("/layers", None, None),
    ("/layers", {}, None),
    ("/layers", "full", None),
    ("/layers/0", None, None),
    ("/layers/0", 5, None),
    ("/layers/0", "full", None),
    ("/layers/0", [], None),
    ("/layers/0/name", 5, None),
    ("/layers/0/name", None, None),
    ("/layers/0/dtype", 2, None),
    ("/layers/0/kind", 5, None),
    ("/layers/0/draft", 1, None),
    ("/layers/0/draft", "true", None),
    ("/layers/0/backend", 5, None),
    ("/layers/0/backend", [], None),
    ("/layers/4/shapes", [4, 8], "/layers/4/shapes/0"),
    ("/layers/4/shapes", 5, None),
    ("/layers/4/dtypes", "bfloat16", None),
    ("/layers/4/dtypes/1", 4, None),
    ("/align_hybrid", 1, None),
    ("/align_hybrid", "yes", None),
    ("/strategy", 5, None),
    # values out of the sets
    ("/strategy", "best", None),
    ("/kv_cache_layout", "nhd", None),
    ("/layers/0/kind", "full", None),
    ("/layers/0/kind", "Full_Attention", None),
    ("/layers/0/dtype", "bf16", None),
    ("/layers/0/dtype", "torch.bfloat16", None),
    ("/layers/0/dtype", "", None),
    ("/layers/4/dtypes/0", "float128", "/layers/4/dtypes"),
    ("/layers/0/kv_quant", "fp4", None),
    *(("/layers/0/kv_quant", quant, "/layers/0") for quant in ("nvfp4", "int4", "mxfp4", "fp8_ds_mla")),
    ("/layers/3/kv_quant", "fp8_ds_mla", "/layers/3"),
    ("/layers/0/compress_ratio", 4, None),
    ("/layers/4/kv_quant", "int4", None),
    ("/layers/3/compress_ratio", 3, "/layers/3"),
    ("/layers/3/compress_ratio", 128, "/layers/3"),
    ("/layers/0/kind", "cross_attention", ""),
    ("/layers/3/kind", "sliding_window_mla", "/layers/3/sliding_window"),
    ("/layers/0/backend", "LBNCH", None),
    ("/layers/0/backend", "lbnhc", None),
    ("/layers/0/kv_sharing_target", "none", None),
    ("/layers/0/kv_sharing_target", "full", None),
    ("/layers/0/kv_sharing_target", "sliding", None),
    ("/layers/0/kv_sharing_target", "encoder", None),
    ("/layers/0/kv_sharing_target", 1, None),
    ("/layers/5/kv_sharing_target", "full", None),
    ("/layered", 1, None),
    ("/layered", "yes", None),
    ("/layers/0/backend", "flash_attention", None),
    ("/layers/0/backend", "FLASH_ATTN", None),
    ("/layers/0/backend", "", None),
    ("/layers/0/kernel_block_sizes", [], None),
    ("/layers/0/kernel_block_sizes", [0], "/layers/0/kernel_block_sizes/0"),
    ("/layers/0/kernel_block_sizes", [16, "32"], "/layers/0/kernel_block_sizes/1"),
    ("/layers/0/kernel_block_sizes", [{"multiple": 16}], "/layers/0/kernel_block_sizes/0"),
    # names
    ("/layers/0/name", "", None),
    ("/layers/0/name", "x" * 257, None),
    ("/layers/0/name", "é" * 129, None),
    ("/layers/0/name", "\ud800", None),
    ("/layers/1/name", "full", None),
    ("/layers/0/count", 2, "/layers/0"),
    ("/layers/0/count", 4097, None),
    # layouts
    ("/layers/0/backend", WRITTEN_ORDERS | {"shape": []}, "/layers/0/backend/shape"),
    ("/layers/0/backend", WRITTEN_ORDERS | {"stride_order": [0, 1, 2]}, None),
    ("/layers/0/backend", WRITTEN_ORDERS | {"stride_order": [0, 1, 1, 3]}, None),
    ("/layers/0/backend", WRITTEN_ORDERS | {"stride_order": [0, 1, 2, 4]}, None),
    ("/layers/0/backend", WRITTEN_ORDERS | {"stride_order": [0, 1, 2, "3"]}, "/layers/0/backend/stride_order/3"),
    ("/layers/0/backend", WRITTEN_ORDERS | {"stride_order": [0, 1, 2, -1]}, "/layers/0/backend/stride_order/3"),
    ("/layers/0/backend", WRITTEN_ORDERS | {"layered_stride_order": [1, 0, 2, 3]}, None),
    ("/layers/0/backend", {"shape": ["num_blocks", "block_size", "num_heads", "head_size"]}, None),
    ("/layers/0/backend", {"shape": ["block_size", "num_kv_heads", "head_size + head_size_v"]}, None),
    ("/layers/0/backend", {"shape": ["num_blocks", 2.0, "block_size", "head_size"]}, "/layers/0/backend/shape/1"),
    # sizes that contradict each other
    ("/layers/4/dtypes", ["bfloat16"], "/layers/4"),
    ("/layers/4/shapes", [], None),
    ("/layers/4/shapes", [[4, 8], [16], [2]], "/layers/4"),
    ("/layers/0/page_size_padded", 65_535, "/layers/0"),
    ("/layers/0/page_size_padded", 65_537, "/layers/0"),
    ("/num_blocks", 100, ""),
]  # fmt: skip


def refusal(request: object) -> SpecInvalid:
    with pytest.raises(SpecInvalid) as caught:
        kvpage.plan(request)  # type: ignore[arg-type]  # bad on purpose
    return caught.value


@pytest.mark.parametrize(("pointer", "value", "expected"), NOT_NUMBERS + NULLS + ZEROS + OTHERS)
def test_a_bad_value_is_refused_where_it_stands(pointer: str, value: object, expected: str | None) -> None:
    error = refusal(with_value(pointer, value))
    assert not isinstance(error, NotSupported)
    pointers = [fault.pointer for fault in error.errors]
    wanted = pointer if expected is None else expected
    assert any(found == wanted or found.startswith(wanted + "/") for found in pointers), (wanted, pointers)
    assert_is_json(error)


def assert_is_json(error: KvpageError) -> None:
    """What an error says can be sent: short, and UTF-8."""
    text = json.dumps({"message": error.message, "errors": error.errors, "details": error.details}, ensure_ascii=False)
    text.encode()
    assert len(error.message) < MAX_PROSE_CHARS
    assert all(len(fault.detail) < MAX_PROSE_CHARS for fault in error.errors)


SEARCH: list[Case] = [
    ("/workload", [], None),
    ("/workload", [{}], "/workload/0"),
    ("/workload", [{"tokens": 5, "min_tokens": 1, "max_tokens": 2}], "/workload/0"),
    ("/workload", [{"min_tokens": 5}], "/workload/0"),
    ("/workload", [{"min_tokens": 5, "max_tokens": 4}], "/workload/0"),
    ("/workload", [{"tokens": 0}], "/workload/0/tokens"),
    ("/workload", [{"tokens": 2**31 + 1}], "/workload/0/tokens"),
    ("/workload", [{"tokens": 5, "weight": 0}], "/workload/0/weight"),
    ("/workload", [{"tokens": 5, "weight": float("nan")}], "/workload/0/weight"),
    ("/workload", [{"tokens": 5, "weight": float("inf")}], "/workload/0/weight"),
    ("/workload", [{"tokens": 5, "weight": "1"}], "/workload/0/weight"),
    ("/workload", [{"tokens": 5}] * 65, None),
    ("/max_groups", 0, None),
    ("/max_groups", 4097, None),
    ("/max_block_size", 0, None),
    ("/max_block_lcm", True, None),
    ("/max_block_stride_bytes", "1MiB", None),
    ("/max_one_token_bytes", -1, None),
    ("/allocator", "slab", None),
    ("/layers/0/index_bits", 16, None),
    ("/layers/0/kernel_block_sizes", [16, {"multiple_of": 64, "max": 32}], "/layers/0/kernel_block_sizes/1"),
]


@pytest.mark.parametrize(("pointer", "value", "expected"), SEARCH)
def test_what_bounds_a_search_is_checked(pointer: str, value: object, expected: str | None) -> None:
    request = with_value(pointer, value) | {"strategy": "auto"}
    assert [fault.pointer for fault in refusal(request).errors] == [expected or pointer]


def test_nested_is_for_an_allocator_that_knows_slabs() -> None:
    request = with_value("/allocator", "flat") | {"strategy": "nested"}
    assert "use allocator slabs" in refusal(request).message


@pytest.mark.parametrize(
    "request_", [None, True, 5, 5.5, "plan", b"{}", [], [good()], {}, {"layers": []}, set(), object()]
)
def test_a_request_must_be_an_object_with_layers_and_a_strategy(request_: object) -> None:
    assert refusal(request_).errors


def test_all_faults_are_reported_at_once() -> None:
    request = with_value("/layers/0/head_size", 0)
    request["layers"][1]["dtype"] = "bf16"
    request["memory_bytes"] = "all"
    pointers = {fault.pointer for fault in refusal(request).errors}
    assert pointers >= {"/layers/0/head_size", "/layers/1/dtype", "/memory_bytes"}


def test_a_fault_in_a_repeated_layer_points_at_its_entry() -> None:
    layers = [build.full("a.{i}", count=100), build.full("b.{i}", count=100), build.full("a.7")]
    assert [fault.pointer for fault in refusal(build.request(*layers)).errors] == ["/layers/2/name"]


def test_keys_with_slashes_and_tildes_are_escaped_in_pointers() -> None:
    request = good() | {"a/b~c": 1}
    assert [fault.pointer for fault in refusal(request).errors] == ["/a~1b~0c"]


def test_the_number_of_layers_is_limited_before_they_are_made() -> None:
    many = [build.full(f"{n}.{{i}}", count=4096) for n in range(1000)]
    assert refusal(build.request(*many)).errors[0].pointer == "/layers"
    kvpage.plan(build.request(build.full("full.{i}", count=4096), memory_bytes=1 << 40))
    assert refusal(build.request(build.full("full.{i}", count=4096), build.full("one"))).errors[0].pointer == "/layers"


def test_names_may_have_256_bytes_after_the_number_is_put_in() -> None:
    name = "x" * 253 + "{i}"
    assert len(kvpage.plan(build.request(build.full(name, count=10))).layers) == 10  # 254 bytes
    assert len(kvpage.plan(build.request(build.full("x" * 256))).layers) == 1
    longer = "{i}" * 80 + "x" * 16  # 256 bytes as sent; 80 numbers of four digits once expanded
    assert refusal(build.request(build.full(longer, count=4096))).errors[0].pointer.startswith("/layers/0")


@pytest.mark.parametrize(
    "layers",
    [
        [build.full(heads=2**31, size=2**31, block_size=2**31)],
        [build.full(block_size=2**62)],
        [build.state("s", [[2**40, 2**40]], ["float32"])],
        [build.mla(size=2**62, block_size=2**62)],
        [build.full(), build.state("s", [[2**61, 2, 2]], ["int8"])],
    ],
)
def test_sizes_that_multiply_beyond_the_limit_are_refused(layers: list[Json]) -> None:
    assert refusal(build.request(*layers)).errors


def test_long_and_unprintable_input_is_not_echoed() -> None:
    for pointer, value in (
        ("/layers/0/dtype", "x" * 100_000),
        ("/layers/0/backend", "\ud800" * 1000),
        ("/strategy", "\ud800"),
        ("/memory_bytes", 10**4000),
        ("/layers/0/name", "n" * 100_000),
        ("/" + "k" * 100_000, 1),
    ):
        error = refusal(with_value(pointer, value))
        assert_is_json(error)


def test_the_request_is_left_as_it_was() -> None:
    request = good()
    before = copy.deepcopy(request)
    kvpage.plan(request)
    assert request == before


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["unify", "full_attention"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(JSON_VALUES)
def test_any_json_is_planned_or_refused(value: object) -> None:
    try:
        kvpage.plan(value)  # type: ignore[arg-type]  # that is the point
    except KvpageError as error:
        assert_is_json(error)


@given(st.randoms(use_true_random=False), JSON_VALUES)
def test_a_request_with_anything_anywhere_is_planned_or_refused(rng: random.Random, value: object) -> None:
    """A good random request with one value of it replaced, or a key added."""
    request = copy.deepcopy(rng.choice((random_request, small_request))(rng))
    target: Any = request
    while True:
        keys = list(target) if isinstance(target, dict) else list(range(len(target)))
        if not keys:
            return
        key = rng.choice(keys)
        if not isinstance(target[key], dict | list) or rng.random() < 0.2:
            break
        target = target[key]
    target[key] = value
    try:
        kvpage.plan(request).check()
    except InternalError:
        raise  # a fault of kvpage, not of the request
    except KvpageError as error:
        assert_is_json(error)
