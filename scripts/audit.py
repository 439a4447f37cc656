"""`make audit`: are there known vulnerabilities in what constraints.txt names? Asks the advisory service of PyPI.

Exits 0 when there are none, 1 when there are some, and 3 when not everything could be looked at: pip-audit alone says
"no known vulnerabilities" then too.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CLEAN, VULNERABLE, UNREACHABLE = 0, 1, 3
TIMEOUT_S = 600
Report = Mapping[str, Any]


def verdict(report: Report) -> tuple[int, list[str]]:
    """The exit status, and the lines that say why."""
    packages = report["dependencies"]
    found = [
        f"{package['name']} {package['version']}: {vulnerability['id']}, mended in "
        f"{', '.join(vulnerability['fix_versions']) or 'no version yet'}"
        for package in packages
        for vulnerability in package.get("vulns", ())
    ]
    unseen = [package["name"] for package in packages if "skip_reason" in package]
    lines = list(found)
    if unseen or not packages:
        lines.append(
            f"NOT AUDITED: the advisory service has told nothing about {len(unseen)} of {len(packages)} packages; it "
            "cannot be reached from here, or does not know them"
        )
    if found:
        return VULNERABLE, lines
    if unseen or not packages:
        return UNREACHABLE, lines
    return CLEAN, [f"no known vulnerabilities in {len(packages)} packages"]


def audited(pip_audit: str) -> Report | str:
    """What pip-audit found; or why it found nothing out."""
    command = [pip_audit, "--requirement", str(ROOT / "constraints.txt"), "--no-deps", "--disable-pip"]
    command += ["--progress-spinner", "off", "--format", "json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
        report: Report = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return f"no answer within {TIMEOUT_S} s"
    except OSError as error:
        return f"{pip_audit} does not start: {error.strerror}"
    except ValueError:
        return (done.stderr.strip().splitlines() or ["pip-audit said nothing"])[-1]
    return report


def main(pip_audit: str) -> int:
    report = audited(pip_audit)
    if isinstance(report, str):
        print(f"NOT AUDITED: the advisory service cannot be reached: {report}")
        return UNREACHABLE
    status, lines = verdict(report)
    print("\n".join(lines))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
