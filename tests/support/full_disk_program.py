"""A program in a mount namespace of its own: keeps an audit log on a disk of 64 KiB, and tells what becomes of it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

from kvpage.errors import AuditUnavailable
from kvpage_server.audit_log import AuditLog

NO_DISK = 77
LINE = json.dumps({"event": "x" * 500}).encode()


async def main(folder: Path) -> dict[str, object]:
    filler = folder / "filler"
    filler.write_bytes(b"x" * (40 << 10))
    log = AuditLog(folder / "audit.jsonl")
    refused: list[str] = []
    while len(refused) < 3:
        try:
            await log.intend(LINE)
        except AuditUnavailable as error:
            refused.append(error.message.rpartition(": ")[2])
    filler.unlink()
    await log.intend(b'"after"')
    log.close()
    lines = (folder / "audit.jsonl").read_bytes().split(b"\n")[:-1]
    whole = lines.count(LINE)
    return {
        "refused": refused,
        "whole_lines": whole,
        "torn_lines": len(lines) - whole - 1,
        "last_lines": [json.loads(line) for line in lines[-1:]],
    }


if __name__ == "__main__":
    place = sys.argv[1]
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "kvpage-test", place], check=False)
    if mounted.returncode != 0:
        sys.exit(NO_DISK)
    print(json.dumps(asyncio.run(main(Path(place)))))
