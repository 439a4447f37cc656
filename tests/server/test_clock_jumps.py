"""The wall clock may be set to anything, at any moment: nothing depends on it but what is shown."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time

import pytest

from kvpage.pages.machine_time import offset_s
from kvpage_server.lease_owners import born
from support.clock_jumps import DAY_S, JUMPS_S, clock_jumps, shifted_clock

_IN_A_NAMESPACE = ["unshare", "-rT", "--monotonic", str(DAY_S), "--boottime", str(-3), "--fork"]


def test_all_that_has_to_do_with_time_goes_on_when_the_wall_clock_jumps(no_leaks: None) -> None:
    with shifted_clock() as (before, jump):
        clock_jumps({"before the epoch": JUMPS_S["before the epoch"]}, before, jump).require_nothing_lost()


@pytest.mark.long
def test_the_check_fires_where_the_clock_does_not_jump(no_leaks: None) -> None:
    """What the log shows is how the check knows."""
    with shifted_clock() as (before, jump):
        without_library = [word for word in before if not word.startswith("LD_PRELOAD")]
        tally = clock_jumps({"a year": 365 * DAY_S}, without_library, jump)
        assert [loss.partition(":")[0] for loss in tally.losses] == ["the time in the log, a year"]


def test_a_process_in_a_time_namespace_tells_times_as_others_do(no_leaks: None) -> None:
    """The deadline of a lease and the time its owner was born are read by the next worker."""
    if shutil.which("unshare") is None or subprocess.run([*_IN_A_NAMESPACE, "true"], check=False).returncode:
        pytest.skip("this process may make no time namespace (unshare -rT)")
    program = (
        "import sys, time; from kvpage.pages.machine_time import offset_s; from kvpage_server.lease_owners import born;"
        "print(time.monotonic(), offset_s('monotonic'), born(int(sys.argv[1])))"
    )
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        command = [*_IN_A_NAMESPACE, sys.executable, "-c", program, str(sleeper.pid)]
        before_s = time.monotonic()
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        after_s = time.monotonic()
        assert float(said[1]) == DAY_S != offset_s("monotonic")
        assert before_s <= float(said[0]) - float(said[1]) <= after_s
        assert int(said[2]) == born(sleeper.pid) != 0
    finally:
        sleeper.kill()
        sleeper.wait()
