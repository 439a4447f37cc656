"""What a person types: `kvpage plan`, `serve`, `worker`, `pools`, `top`, `demo`."""

from __future__ import annotations


def main() -> None:
    """Entry point of the console script. Ends the process: 0 fine, 1 failed, 2 the input or command line is wrong."""
    from kvpage.cli.commands import run  # the console script must not pay for typer before it knows it is needed

    run()
