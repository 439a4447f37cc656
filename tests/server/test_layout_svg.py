"""`/v1/plans/{plan_id}/layout.svg`: the picture of a plan, harmless in a browser and kept by caches."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import httpx
import pytest

import kvpage
from kvpage import __version__
from kvpage.drawing.picture import layout_svg
from support.api_service import ApiService
from support.plan_requests import small_request
from support.problems import assert_problem

pytestmark = pytest.mark.anyio
PLAIN = {"Accept-Encoding": "identity"}
HOSTILE = "</text><script>alert(1)</script>&amp;"


async def picture_path(api: httpx.AsyncClient, request: object = None) -> str:
    posted = await api.post("/v1/plans", json=request or small_request())
    return f"{posted.headers['location']}/layout.svg"


async def test_a_picture_is_that_of_the_library(api: httpx.AsyncClient) -> None:
    got = await api.get(await picture_path(api), headers=PLAIN)
    assert got.status_code == 200
    assert got.text == layout_svg(kvpage.plan(small_request()))
    assert got.headers["content-type"] == "image/svg+xml"


async def test_nothing_in_it_may_run_or_be_loaded(api: httpx.AsyncClient) -> None:
    request = small_request()
    request["layers"][1]["name"] = HOSTILE + "{i}"
    got = await api.get(await picture_path(api, request))
    assert got.headers["content-security-policy"] == "default-src 'none'; style-src 'unsafe-inline'"
    assert got.headers["x-content-type-options"] == "nosniff"
    tags = {element.tag.rpartition("}")[2] for element in ElementTree.fromstring(got.text).iter()}
    assert "script" not in tags


async def test_a_caller_that_has_it_gets_304(api: httpx.AsyncClient) -> None:
    path = await picture_path(api)
    first = await api.get(path, headers=PLAIN)
    again = await api.get(path, headers={**PLAIN, "If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"]


async def test_its_tag_names_the_plan_and_the_version_that_drew_it(api: httpx.AsyncClient) -> None:
    path = await picture_path(api)
    plan_id = path.split("/")[3]
    got = await api.get(path, headers=PLAIN)
    assert got.headers["etag"] == f'"{plan_id}-picture-{__version__}-identity"'
    assert got.headers["etag"] != (await api.get(f"/v1/plans/{plan_id}", headers=PLAIN)).headers["etag"]
    assert "immutable" not in got.headers["cache-control"]


async def test_it_is_compressed_for_those_who_accept_it(api: httpx.AsyncClient) -> None:
    path = await picture_path(api)
    plain = await api.get(path, headers=PLAIN)
    small = await api.get(path, headers={"Accept-Encoding": "gzip"})
    assert small.headers["content-encoding"] == "gzip"
    assert small.content == plain.content
    assert small.headers["etag"] != plain.headers["etag"]


async def test_a_plan_nobody_made_has_none(api: httpx.AsyncClient) -> None:
    assert_problem(await api.get("/v1/plans/sha256:00/layout.svg"), "plan-not-found")


async def test_an_unknown_parameter_and_another_method_are_refused(api: httpx.AsyncClient) -> None:
    path = await picture_path(api)
    assert_problem(await api.get(path, params={"detail": "full"}), "spec-invalid")
    refused = await api.put(path)
    assert_problem(refused, "method-not-allowed")
    assert refused.headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize("detail", ["picture", "layout.svg"])
async def test_a_picture_is_no_detail_of_the_plan(api: httpx.AsyncClient, detail: str) -> None:
    plan_path = (await picture_path(api)).removesuffix("/layout.svg")
    assert_problem(await api.get(plan_path, params={"detail": detail}), "spec-invalid")


def test_head_says_how_large_it_is(no_leaks: None, run_dir: Path) -> None:
    with ApiService(run_dir), kvpage.Client(run_dir=str(run_dir)) as client:
        plan = client.plan(small_request())
        svg = client.layout_svg(plan.plan_id)
        assert svg == layout_svg(plan)
        socket = httpx.HTTPTransport(uds=str(run_dir / "kvpage.sock"))
        with httpx.Client(transport=socket, base_url="http://kvpage", headers=PLAIN) as http:
            head = http.head(f"/v1/plans/{plan.plan_id}/layout.svg")
            assert (head.status_code, head.content) == (200, b"")
            assert int(head.headers["content-length"]) == len(svg.encode())
            assert http.get("/livez").status_code == 200  # the connection is still in step
