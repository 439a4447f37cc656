"""A process of the demo: `python -m kvpage.cli.demo_process write|check POOL RUN_DIR`. Prints one JSON line."""

from __future__ import annotations

import json
import os
import sys
import time

import kvpage
from kvpage.cli.demo_pattern import check_pool, write_pool


def main(role: str, pool: str, run_dir: str) -> int:
    """Attach, do the work of `role`, report it. 0 when every value is right."""
    started = time.perf_counter()
    with kvpage.attach(pool, run_dir=run_dir) as kv:
        attach_s = time.perf_counter() - started
        report = {"pid": os.getpid(), "attach_s": attach_s}
        if role == "write":
            report["values"] = write_pool(kv)
        else:
            counts = check_pool(kv)
            report |= {"values": counts.values, "untouched_bytes": counts.untouched_bytes}
    report["total_s"] = time.perf_counter() - started
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
