"""Checks on a real GPU what the driver double cannot show, and writes docs/gpu-report.md. Under three minutes.

    python scripts/gpu_check.py            or: make gpu-check

Each check runs in a process of its own with a time limit, takes at most 2 GiB of device memory (one takes 80 % of what
is free), and changes no setting of the device. A line of JSON for each goes to standard output. Without a GPU the
report says so and the exit status is 0; it is 1 when a check failed, or a GPU is there and cannot be used.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
TOTAL_S = 165.0  # for all checks; what else there is takes seconds

sys.path.insert(0, str(ROOT / "scripts"))


def find_kvpage() -> None:
    """Let this process and those it starts import the checkout, where kvpage is not installed."""
    if importlib.util.find_spec("kvpage") is None:
        folders = [str(ROOT), str(ROOT / "server")]
        sys.path += folders
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), *folders]))


find_kvpage()

from gpu_checks import report  # noqa: E402 - found by the lines above
from gpu_checks.outcome import Check, Outcome, machine_fact, not_run  # noqa: E402
from gpu_checks.runner import adopt_orphans, run, run_all  # noqa: E402


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Check kvpage on a GPU and write the report.")
    parser.add_argument("--report", type=Path, default=DOCS / "gpu-report.md", help="where to write it")
    parser.add_argument("--catalogue", default="gpu_checks.catalogue", help="module that names the checks")
    parser.add_argument("--only", nargs="+", metavar="CHECK", help="run these; the report says 'not run' of the others")
    options = parser.parse_args(arguments)
    catalogue = importlib.import_module(options.catalogue)
    adopt_orphans()
    machine = run(catalogue.MACHINE, "")
    if machine.status == "skip":
        return _no_gpu(options.report, machine.reason, catalogue.CHECKS)
    outcomes = [_told(machine)]
    wanted = [check for check in catalogue.CHECKS if options.only is None or check.name in options.only]
    if machine.status == "pass":
        outcomes += map(_told, run_all(wanted, machine_fact(machine, "UUID"), TOTAL_S))
    else:
        outcomes += [not_run(check, "the GPU cannot be used") for check in wanted]
    outcomes += [not_run(check, "not asked for") for check in catalogue.CHECKS if check not in wanted]
    order = [catalogue.MACHINE.name, *(check.name for check in catalogue.CHECKS)]
    outcomes.sort(key=lambda outcome: order.index(outcome.check))
    try:
        report.write(options.report, report.render(machine, outcomes), machine, DOCS)
    except report.NoReport as refusal:
        _say(str(refusal))
        return 1
    failed = [outcome.check for outcome in outcomes if outcome.status == "fail"]
    _say(f"{options.report} is written; {'failed: ' + ', '.join(failed) if failed else 'no check failed'}")
    return 1 if failed else 0


def _no_gpu(path: Path, reason: str, checks: Sequence[Check]) -> int:
    _say(f"not run: {reason}")
    if report.has_results(path):
        _say(f"{path} has the results of an earlier run on a GPU and stays as it is")
    else:
        path.write_text(report.render_not_run(reason, checks), encoding="utf-8")
    return 0


def _told(outcome: Outcome) -> Outcome:
    print(outcome.line(), flush=True)
    _say(f"{outcome.status:8}{outcome.check:18}{outcome.took_s:6.1f} s  {outcome.reason}")
    return outcome


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
