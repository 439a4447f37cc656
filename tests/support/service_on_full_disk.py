"""The disk is full: see `service_on_full_disk_program`, which runs in a mount namespace of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile

import pytest

from support import service_on_full_disk_program
from support.tally import Tally

_NAMESPACE = ["unshare", "-rm", "--propagation", "private"]


def full_disk(*scenes: str, program: str = service_on_full_disk_program.__file__) -> Tally:
    """These scenes, or all. Skips the test where no file system can be mounted."""
    if shutil.which("unshare") is None or subprocess.run([*_NAMESPACE, "true"], check=False).returncode:
        pytest.skip("this process may mount no file system, not even in a namespace of its own (unshare -rm)")
    with tempfile.TemporaryDirectory(prefix="kvp-") as folder:
        command = [*_NAMESPACE, sys.executable, program, folder, *scenes]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)
    tally = Tally()
    for outcome, count in said["outcomes"].items():
        tally.survive(outcome, count)
    for loss in said["losses"]:
        tally.lose(loss)
    return tally
