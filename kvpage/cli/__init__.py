"""What a person types: `kvpage plan`, `serve`, `worker`, `pools`, `events`, `top`, `health`, `demo`."""

from __future__ import annotations

import sys

from kvpage.program_end import end_at_once_when_interrupted, end_of


def main() -> None:
    """Entry point of the console script. Ends the process; `kvpage.exit_status` says with what."""
    end_at_once_when_interrupted()
    if sys.argv[1:2] == ["health"]:  # a probe that runs every few seconds must not pay for the rest
        from kvpage.cli import health

        asked = health.parse(sys.argv[2:])
        if asked is not None:
            sys.exit(end_of(lambda: health.check(asked), as_json=asked.as_json))
    from kvpage.cli.commands import run

    run()
