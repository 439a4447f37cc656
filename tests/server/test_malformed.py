"""No body, however malformed, is answered with a 500 or repeated at length."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.api_in_process import SyncApi, settings_without_worker
from support.plan_requests import small_request
from support.problems import PROBLEM_JSON

ACCEPTABLE = {200, 201, 400, 413, 422}
NO_WORKER = 503  # a valid pool request finds the device without a worker
LONG = "x" * 5000


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SyncApi]:
    with SyncApi(settings_without_worker(tmp_path_factory.mktemp("run"))) as api:
        yield api


def assert_well_answered(response: httpx.Response, *, also: int = 200) -> None:
    assert response.status_code in {*ACCEPTABLE, also}, response.text
    if response.status_code >= 400:
        assert response.headers["content-type"] == PROBLEM_JSON
        assert response.json()["status"] == response.status_code
    assert "Traceback" not in response.text


@pytest.mark.parametrize("status", [500, 404])
def test_the_check_fires(status: int) -> None:
    with pytest.raises(AssertionError):
        assert_well_answered(httpx.Response(status, json={"status": status}, headers={"Content-Type": PROBLEM_JSON}))


@pytest.mark.parametrize("path", ["/v1/plans", "/v1/pools"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":' * 50 + b"1" + b"}" * 50,
        b'{"layers": [], "layers": []}',
        b'{"memory_bytes": NaN}',
        b'{"memory_bytes": ' + b"9" * 10_000 + b"}",
        b'{"strategy": "\\ud800"}',
        b'{"\\ud800": 1}',
    ],
)
def test_malformed_json_is_400(api: SyncApi, path: str, body: bytes) -> None:
    response = api.post(path, body)
    assert response.json()["code"] == "json-invalid"
    assert_well_answered(response)


NAMES = [
    "layers", "strategy", "memory_bytes", "num_blocks", "max_model_len", "kind", "name", "count", "block_size",
    "num_kv_heads", "head_size", "dtype", "backend", "shape", "stride_order", "layered_stride_order", "shapes",
    "dtypes", "kernel_block_sizes", "page_size_padded", "kv_quant", "align_hybrid", "ranks", "draft", "device",
]  # fmt: skip
VALUES = [
    "unify", "full_attention", "mamba", "mla_attention", "bfloat16", "float32", "flash_attn", "num_blocks",
    "block_size", "host", "NHD", "{i}", "", LONG, "\u0000", 0, 1, -1, 16, 2**62, 2**63, 10**90, 0.5, 1e308, True, None,
]  # fmt: skip
junk = st.recursive(
    st.sampled_from(VALUES) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=8), inner, max_size=6)
    ),
    max_leaves=25,
)


@given(junk)
def test_junk_in_the_shape_of_a_request_is_answered(api: SyncApi, value: Any) -> None:
    body = json.dumps(value).encode()
    assert_well_answered(api.post("/v1/plans", body))
    assert_well_answered(api.post("/v1/pools", body), also=NO_WORKER)


@st.composite
def damaged_requests(draw: st.DrawFn) -> dict[str, Any]:
    """A valid request with one value replaced, removed or added somewhere."""
    request = small_request()
    place: Any = draw(st.sampled_from([request, *request["layers"]]))
    key = draw(st.sampled_from([*place, *NAMES]))
    if key in place and draw(st.booleans()):
        del place[key]
    else:
        place[key] = draw(junk)
    return request


@given(damaged_requests())
def test_a_damaged_request_is_answered_and_not_repeated_at_length(api: SyncApi, request_: dict[str, Any]) -> None:
    plan = api.post("/v1/plans", json.dumps(request_).encode())
    pool = api.post("/v1/pools", json.dumps({"name": "p", "request": request_}).encode())
    assert_well_answered(plan)
    assert_well_answered(pool, also=NO_WORKER)
    for response in (plan, pool):
        assert response.status_code < 400 or "x" * 201 not in response.text


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_answered(api: SyncApi, body: bytes) -> None:
    assert_well_answered(api.post("/v1/plans", body))
    assert_well_answered(api.post("/v1/pools", body))


@given(
    st.binary(max_size=40)
    | st.sampled_from([b"application/json" + LONG.encode(), b"application/json; charset=" + LONG.encode()])
)
def test_arbitrary_media_types_are_answered(api: SyncApi, declared: bytes) -> None:
    response = api.post("/v1/plans", b"{}", declared)
    assert response.status_code in (415, 422)
    assert "x" * 201 not in response.text


def _named(name: str) -> dict[str, Any]:
    return {**small_request()["layers"][0], "count": 1, "name": name}


POOL_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({}, ""),
    ({"name": "a"}, ""),
    ({"request": small_request()}, ""),
    ({"name": "", "request": small_request()}, "/name"),
    ({"name": "n" * 257, "request": small_request()}, "/name"),
    *(({"name": f"a{char}b", "request": small_request()}, "/name") for char in "\n\x00\x1b\x7f\x9b\u2028\u202e\ufeff"),
    ({"name": "a", "request": small_request(layers=[_named("a\x1b[31mb")])}, "/request/layers/0/name"),
    ({"name": 1, "request": small_request()}, "/name"),
    ({"name": "a", "request": []}, "/request"),
    ({"name": "a", "request": small_request(), "plan_id": "sha256:00"}, "/plan_id"),
    ({"name": "a", "request": small_request(), "device": 0}, "/device"),
    ({"name": "a", "request": small_request(), "device": "cuda:7"}, "/device"),
    ({"name": "a", "request": small_request(), LONG: 1}, ""),
    ({"name": "a", "request": small_request(strategy=7)}, "/request/strategy"),
    ({"name": "a", "request": small_request(layers=[{"kind": "full_attention"}])}, "/request/layers/0/name"),
]


@pytest.mark.parametrize(("body", "pointer"), POOL_FAULTS)
def test_faults_of_a_pool_request_point_into_the_whole_body(api: SyncApi, body: dict[str, Any], pointer: str) -> None:
    response = api.post("/v1/pools", json.dumps(body).encode())
    assert response.status_code == 422
    assert response.json()["errors"][0]["pointer"] == pointer
    assert response.json()["detail"].isprintable()
    assert "x" * 201 not in response.text
