"""What can never work ends the server at once, with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.api_service import run_refused


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--device", "cuda:0"], "cuda:0"),
        (["--device", "host", "--device", "GPU-1234"], "GPU-1234"),
        (["--memory", "8XB"], "8XB"),
        (["--memory", "1.5"], "1.5"),
        (["--memory", "0"], "0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_start_that_cannot_succeed_is_refused(run_dir: Path, arguments: list[str], named: str) -> None:
    done = run_refused(run_dir, *arguments)
    assert done.returncode == (1 if "cuda:0" in arguments else 2)  # the device may be there another time
    assert named in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(run_dir.glob("*.sock"))
