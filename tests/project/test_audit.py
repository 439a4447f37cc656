"""`make audit` says that nothing is wrong only when everything was looked at."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest

import audit

FINE = {"name": "fine", "version": "1.0", "vulns": []}
BAD = {"name": "bad", "version": "1.0", "vulns": [{"id": "PYSEC-1", "fix_versions": ["1.1"]}]}
UNSEEN = {"name": "unseen", "skip_reason": "Dependency not found on PyPI and could not be audited"}


@pytest.mark.parametrize(
    ("packages", "status", "said"),
    [
        ([FINE, FINE], audit.CLEAN, "no known vulnerabilities in 2 packages"),
        ([FINE, BAD], audit.VULNERABLE, "bad 1.0: PYSEC-1, mended in 1.1"),
        ([FINE, UNSEEN], audit.UNREACHABLE, "nothing about 1 of 2 packages"),
        ([BAD, UNSEEN], audit.VULNERABLE, "nothing about 1 of 2 packages"),
        ([], audit.UNREACHABLE, "NOT AUDITED"),
    ],
)
def test_what_was_not_looked_at_is_not_clean(packages: list[dict[str, Any]], status: int, said: str) -> None:
    found, lines = audit.verdict({"dependencies": packages})
    assert found == status
    assert said in "\n".join(lines)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("#!/bin/sh\necho ConnectionError: no route >&2\nexit 1\n", "ConnectionError: no route"),
        ("#!/bin/sh\nexit 1\n", "said nothing"),
        (None, "does not start"),
    ],
)
def test_a_service_that_is_not_reached_is_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], program: str | None, said: str
) -> None:
    path = tmp_path / "pip-audit"
    if program is not None:
        path.write_text(program)
        path.chmod(stat.S_IRWXU)
    assert audit.main(str(path)) == audit.UNREACHABLE
    assert said in capsys.readouterr().out
