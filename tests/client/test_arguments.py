"""What a program passes by mistake is refused by name, before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvpage
from kvpage.client.http import Client
from kvpage.errors import DeviceUnavailable, SpecInvalid, TooLarge
from support.blocking_client import BOTH_CLIENTS

pytestmark = pytest.mark.usefixtures("no_leaks")

NO_TEXT = [b"mimo", 7, True, ["mimo"], {"mimo"}, object(), "\udc80", "a\ud800b"]
NO_SECONDS = [-1, -0.001, float("nan"), float("inf"), True, "1", b"1", None, [1], 10**400]
NO_PATH = [7, True, ["/tmp"], "/tmp/\0", "/tmp/\ud800", b"/tmp/\0"]


@pytest.fixture(params=BOTH_CLIENTS, ids=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> type[Client]:
    found: type[Client] = request.param
    return found


def refused(work: Callable[[], object], field: str) -> None:
    with pytest.raises(SpecInvalid, match=field) as raised:
        work()
    assert len(raised.value.message) < 500


@pytest.mark.parametrize("value", [*NO_TEXT, "", "n" * 257, "\u00e9" * 129], ids=lambda value: repr(value)[:20])
def test_names(run_dir: Path, value: Any) -> None:
    refused(lambda: kvpage.attach(value, run_dir=str(run_dir), timeout_s=0), "name")
    refused(lambda: kvpage.attach("m", client_name=value, device="host", run_dir=str(_with_socket(run_dir))), "name")


def _with_socket(run_dir: Path) -> Path:
    (run_dir / "worker-host.sock").touch()
    return run_dir


@pytest.mark.parametrize("value", NO_TEXT, ids=lambda value: repr(value)[:20])
def test_devices(run_dir: Path, value: Any) -> None:
    refused(lambda: kvpage.attach("mimo", device=value, run_dir=str(run_dir), timeout_s=0), "device")
    refused(lambda: kvpage.connect(value, run_dir=str(run_dir)), "device")


@pytest.mark.parametrize("value", NO_SECONDS, ids=lambda value: repr(value)[:20])
def test_seconds(run_dir: Path, value: Any) -> None:
    refused(lambda: kvpage.attach("mimo", run_dir=str(run_dir), timeout_s=value), "timeout_s")
    refused(lambda: kvpage.connect(run_dir=str(_with_socket(run_dir)), timeout_s=value), "timeout_s")


@pytest.mark.parametrize("value", NO_PATH, ids=lambda value: repr(value)[:20])
def test_folders(kind: type[Client], value: Any) -> None:
    refused(lambda: kvpage.attach("mimo", run_dir=value, timeout_s=0), "run_dir")
    refused(lambda: kvpage.connect(run_dir=value), "run_dir")
    refused(lambda: kind(run_dir=value), "run_dir")


def test_a_folder_may_be_any_kind_of_path(run_dir: Path) -> None:
    for path in (run_dir, str(run_dir)):
        with pytest.raises(DeviceUnavailable, match=str(run_dir)):
            kvpage.attach("mimo", run_dir=path, timeout_s=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [300, 5000])
def test_a_folder_whose_sockets_cannot_be_named(kind: type[Client], length: int) -> None:
    folder = "/tmp/" + "d" * length
    for work in (kvpage.connect, kind, lambda run_dir: kvpage.attach("mimo", run_dir=run_dir, timeout_s=0)):
        with pytest.raises(TooLarge, match="107"):
            work(run_dir=folder)


URLS = ["", "localhost", "127.0.0.1:80", "unix:", "unix:///run/x", "http://", "http://[::1", "http://a:b", "http://:80",
        "http://a:99999", "http://\udc80", "http://a b", "https://", "http://x\n", "HTTP:x", "http://\0"]  # fmt: skip


@pytest.mark.parametrize("url", [*URLS, 7, b"http://x", True], ids=repr)
def test_urls(kind: type[Client], url: Any) -> None:
    refused(lambda: kind(url), "url")


@pytest.mark.parametrize("token", ["", "a b", "\u00e9", "a\n", "\udc80", b"secret", 7], ids=repr)
def test_a_token_is_refused_and_not_shown(kind: type[Client], token: Any) -> None:
    with pytest.raises(SpecInvalid, match="token") as raised:
        kind("http://test", token=token)
    assert "secret" not in raised.value.message


CALLS: list[tuple[str, Callable[[Client, Any], object], list[Any]]] = [
    ("plan_id", lambda client, value: client.get_plan(value), NO_TEXT),
    ("pool_id", lambda client, value: client.get_pool(value), NO_TEXT),
    ("pool_id", lambda client, value: client.delete_pool(value), NO_TEXT),
    ("pool_id", lambda client, value: client.pool_tensors(value), NO_TEXT),
    ("name", lambda client, value: client.find_pool(value), NO_TEXT),
    ("device", lambda client, value: client.find_pool("mimo", value), NO_TEXT),
    ("name", lambda client, value: client.create_pool({}, name=value), NO_TEXT),
    ("device", lambda client, value: client.create_pool({}, name="mimo", device=value), NO_TEXT),
    ("plan_id", lambda client, value: client.create_pool({}, name="mimo", plan_id=value), NO_TEXT),
    ("wait_s", lambda client, value: client.create_pool({}, name="mimo", wait_s=value), NO_SECONDS),
    ("wait_s", lambda client, value: client.get_pool("pool-1", wait_s=value), NO_SECONDS),
    ("wait_s", lambda client, value: client.delete_pool("pool-1", wait_s=value), NO_SECONDS),
    ("/a", lambda client, value: client.plan({"a": value}), [object(), "\ud800", float]),
]


@pytest.mark.parametrize(
    ("field", "ask", "values"), CALLS, ids=[f"{number}-{call[0]}" for number, call in enumerate(CALLS)]
)
def test_calls(
    run_dir: Path, kind: type[Client], field: str, ask: Callable[[Client, Any], object], values: list[Any]
) -> None:
    with kind(run_dir=str(run_dir)) as client:  # where nobody would answer
        for value in values:
            refused(lambda value=value: ask(client, value), field)  # type: ignore[misc]


@pytest.mark.parametrize("value", NO_SECONDS, ids=lambda value: repr(value)[:20])
def test_the_timeout_of_a_client(kind: type[Client], value: Any) -> None:
    refused(lambda: kind("http://test", timeout_s=value), "timeout_s")
