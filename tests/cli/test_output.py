"""What other processes call themselves is shown, never obeyed."""

from __future__ import annotations

import pytest

from kvpage.cli import output, pools
from kvpage.client.resources import Failure, Holder, Pool
from kvpage.errors import FieldError, SpecInvalid, printable, shorten

ESCAPES = "a\x1b[31mb\x9b2J\u202ec\rd"


def test_a_pool_prints_nothing_a_terminal_obeys(capsys: pytest.CaptureFixture[str]) -> None:
    pool = Pool(
        id="pool-0123456789abcdef", name=ESCAPES, device="host", state="failed", plan_id="sha256:00", epoch="0",
        buffer_size_bytes=1, committed_bytes=1, num_holders=3,
        error=Failure(code="internal", message=ESCAPES, details={}),
        holders=[Holder(pid=1, uid=2, client_name=ESCAPES)],
    )  # fmt: skip
    pools._print(pool, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert all(line.isprintable() for line in lines), lines
    assert sum("\\x1b[31m" in line for line in lines) == 3
    assert lines[-1].strip() == "and 2 more"


def test_an_error_prints_nothing_a_terminal_obeys(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_error(SpecInvalid(ESCAPES, errors=[FieldError(ESCAPES, "other"), FieldError("/a", ESCAPES)]))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all(line.isprintable() for line in lines), lines


def test_text_is_shortened_after_it_is_escaped() -> None:
    assert printable("é ok") == "é ok"
    assert printable("\x1b") == "\\x1b"
    assert printable("\ud800") == "\\ud800"
    assert len(shorten("\x1b" * 500)) == 200
