"""The files of the web page: who gets them, how they are labelled, and what they must not have in them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest

from kvpage.drawing import style
from kvpage_server import routes_ui
from kvpage_server.static_headers import STATIC_HEADERS
from support.checkout import ROOT
from support.problems import assert_problem

FILES = sorted(path.name for path in routes_ui.FOLDER.iterdir())
asynchronous = pytest.mark.anyio


def text_of(name: str) -> str:
    return (routes_ui.FOLDER / name).read_text()


@asynchronous
async def test_every_file_is_served_to_everybody_with_its_type_and_the_headers(api_over_tcp: httpx.AsyncClient) -> None:
    for path, name in [("/ui", "index.html"), *((f"/ui/{name}", name) for name in FILES)]:
        answer = await api_over_tcp.get(path)
        assert (answer.status_code, answer.content) == (200, (routes_ui.FOLDER / name).read_bytes())
        assert answer.headers["content-type"] == routes_ui.CONTENT_TYPES[Path(name).suffix]
        assert {header: answer.headers[header] for header in STATIC_HEADERS} == STATIC_HEADERS
        head = await api_over_tcp.head(path)
        assert (head.status_code, head.content, head.headers["etag"]) == (200, b"", answer.headers["etag"])


@asynchronous
async def test_a_file_that_the_browser_has_is_not_sent_again(api_over_tcp: httpx.AsyncClient) -> None:
    first = await api_over_tcp.get("/ui")
    assert first.headers["cache-control"] == "no-cache"
    for known in (first.headers["etag"], f'"other", W/{first.headers["etag"]}', "*"):
        again = await api_over_tcp.get("/ui", headers={"If-None-Match": known})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["content-security-policy"] == STATIC_HEADERS["Content-Security-Policy"]
    other = await api_over_tcp.get("/ui", headers={"If-None-Match": '"other"'})
    assert other.status_code == 200


@asynchronous
@pytest.mark.parametrize("path", ["/", "/ui/"])
async def test_what_people_type_leads_to_the_page(api_over_tcp: httpx.AsyncClient, path: str) -> None:
    answer = await api_over_tcp.get(path)
    assert answer.status_code == 307
    assert answer.next_request is not None
    assert answer.next_request.url.path == "/ui"


@asynchronous
@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("nothing.js", "not-found"),
        ("index.html%00", "not-found"),
        ("..%2Froutes_ui.py", "permission-denied"),  # deeper paths are closed, as all that is not there
        ("%2Fetc%2Fpasswd", "permission-denied"),
    ],
)
async def test_there_is_nothing_but_these_files(api_over_tcp: httpx.AsyncClient, name: str, code: str) -> None:
    assert_problem(await api_over_tcp.get(f"/ui/{name}"), code)


@asynchronous
async def test_a_page_of_another_name_gets_no_file(api_over_tcp: httpx.AsyncClient) -> None:
    """Rebinding its name to 127.0.0.1 does not make this page, and what it may ask, another's."""
    answer = await api_over_tcp.get("/ui", headers={"Host": "evil.example:80"})
    assert answer.status_code == 403


def test_all_of_it_comes_with_the_package_and_nothing_from_elsewhere() -> None:
    assert set(FILES) == set(routes_ui.files()), "a file whose ending has no content type is not served"
    for name in FILES:
        elsewhere = re.sub(r"http://www\.w3\.org/2000/svg", "", text_of(name))
        assert not re.search(r"https?://|//cdn|@import|url\(", elsewhere), name


def test_nothing_is_inline_and_no_text_becomes_markup() -> None:
    page = text_of("index.html")
    assert not re.search(r"<style|style=|<script(?![^>]*\bsrc=)|\son\w+=|javascript:", page)
    for name in FILES:
        if name.endswith(".js"):
            assert not re.search(r"innerHTML|outerHTML\s*=|insertAdjacentHTML|document\.write|eval\(", text_of(name)), (
                name
            )


def test_every_module_and_address_that_is_named_is_there() -> None:
    for name in FILES:
        for target in re.findall(r'from "\./([^"]+)"', text_of(name)):
            assert target in FILES, f"{name} imports {target}"
    assert {
        name.removeprefix("ui/") for name in re.findall(r'(?:href|src)="(ui/[^"]+)"', text_of("index.html"))
    } <= set(FILES)


def test_the_scripts_are_short_as_other_files_are() -> None:
    assert [name for name in FILES if name != "index.html" and text_of(name).count("\n") > 350] == []


def test_its_colours_are_those_of_the_pictures() -> None:
    light, dark = text_of("page.css").split("@media (prefers-color-scheme: dark)", 1)
    for place, hue in enumerate(style.HUES):
        assert f"--h{place}: {hue.fill}; --h{place}-edge: {hue.edge};" in light
        assert f"--h{place}: {hue.dark_fill}; --h{place}-edge: {hue.dark_edge};" in dark
    assert f"--paper: {style.PAPER}; --ink: {style.INK}; --soft: {style.SOFT};" in light
    assert f"--paper: {style.DARK_PAPER}; --ink: {style.DARK_INK}; --soft: {style.DARK_SOFT};" in dark


def test_the_examples_are_those_of_the_checkout() -> None:
    configs = json.loads((ROOT / "tests/data/models/configs.json").read_text())["configs"]
    for example in json.loads(text_of("examples.json")):
        if "request" in example:
            assert example["request"] == json.loads((ROOT / f"examples/{example['name']}.json").read_text())
        else:
            assert example["config"] == configs[example["name"]]
