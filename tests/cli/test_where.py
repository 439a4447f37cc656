"""Which service a command talks to, and how it ends: decided once for all commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvpage.cli.where import Where
from kvpage.errors import (
    ERRORS_BY_CODE,
    FieldError,
    InternalError,
    JsonInvalid,
    KvpageError,
    NotSupported,
    PoolNotFound,
    SpecInvalid,
    TooLarge,
    WorkerLost,
)
from kvpage.exit_status import FAILED, MEANINGS, TRY_AGAIN, WRONG_INPUT, error_json, status_of
from support.command_line import run_here

NOTHING = {"url": None, "run_dir": None, "token_file": None}
ENVIRONMENT = {"KVPAGE_URL": "http://a", "KVPAGE_TOKEN_FILE": "/nowhere"}


def test_what_is_typed_goes_before_the_environment() -> None:
    assert Where.of(NOTHING, {}).url is None
    assert Where.of(NOTHING, ENVIRONMENT).url == "http://a"
    assert Where.of(NOTHING | {"url": "http://b"}, ENVIRONMENT).url == "http://b"
    assert Where.of(NOTHING | {"run_dir": "/r"}, ENVIRONMENT).url is None
    assert Where.of(NOTHING | {"token_file": "/t"}, ENVIRONMENT).token_file == Path("/t")
    assert Where.of(NOTHING | {"ca_file": "/c"}, {"KVPAGE_CA_FILE": "/d"}).ca_file == "/c"
    assert Where.of(NOTHING, {"KVPAGE_URL": "", "KVPAGE_TOKEN_FILE": ""}) == Where.of(NOTHING, {})


def test_a_token_file_is_read_for_a_url_only() -> None:
    """Else a token of the server, in the same variable, would have to be there for every user of the socket."""
    assert Where.of(NOTHING | {"run_dir": "/r"}, ENVIRONMENT).token() is None
    with pytest.raises(SpecInvalid, match="token file"):
        Where.of(NOTHING, ENVIRONMENT).token()


def test_two_services_are_refused() -> None:
    done = run_here("pools", "list", "--url", "http://127.0.0.1:1", "--run-dir", "/r")
    assert done.returncode == WRONG_INPUT
    assert done.stderr == "error spec-invalid: --url and --run-dir name two services; give one of the two\n"


@pytest.mark.parametrize("kind", ERRORS_BY_CODE.values(), ids=ERRORS_BY_CODE)
def test_every_error_has_a_status_that_is_explained(kind: type[KvpageError]) -> None:
    status = status_of(kind("x"))
    assert status in MEANINGS
    assert (status == TRY_AGAIN) == kind.retryable


@pytest.mark.parametrize(
    ("kind", "status"),
    [(SpecInvalid, 2), (NotSupported, 2), (JsonInvalid, 2), (TooLarge, 2), (PoolNotFound, FAILED),
     (InternalError, FAILED), (WorkerLost, TRY_AGAIN)],
)  # fmt: skip
def test_the_status_says_who_has_to_do_something(kind: type[KvpageError], status: int) -> None:
    assert status_of(kind("x")) == status


def test_an_error_as_json_has_what_its_message_says() -> None:
    error = SpecInvalid("two\nlines", details={"limit": 3, "path": Path("/a")}, errors=[FieldError("/a", "b")])
    line = error_json(error)
    assert "\n" not in line
    assert json.loads(line) == {
        "code": "spec-invalid", "message": "two\nlines", "details": {"limit": 3, "path": "/a"}, "retryable": False,
        "errors": [{"pointer": "/a", "detail": "b"}],
    }  # fmt: skip
    assert set(json.loads(error_json(WorkerLost("x")))) == {"code", "message", "details", "retryable"}
