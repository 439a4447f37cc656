"""What a person types: `kvpage plan`, `serve`, `worker`, `pools`, `events`, `top`, `health`, `demo`."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the console script. Ends the process; `kvpage.exit_status` says with what."""
    if sys.argv[1:2] == ["health"]:  # a probe that runs every few seconds must not pay for the rest
        from kvpage.cli import health

        asked = health.parse(sys.argv[2:])
        if asked is not None:
            sys.exit(health.check(asked))
    from kvpage.cli.commands import run

    run()
