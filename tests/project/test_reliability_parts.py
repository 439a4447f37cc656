"""`make reliability` runs the parts that are named, and knows them."""

from __future__ import annotations

import subprocess
import sys

from support.checkout import ROOT


def test_a_part_that_is_unknown_is_refused_before_anything_runs() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "reliability.py"), "attack", "atack"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2
    assert done.stderr == "no part atack; there are upgrade, exhaustion, kills, leases, attack\n"
