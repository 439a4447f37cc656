"""`python -m kvpage_server serve|worker …`: two programs that share little, so each imports only its own half."""

from __future__ import annotations

import sys

_USAGE = "usage: python -m kvpage_server {serve,worker} …\n"


def main() -> int:
    program, arguments = sys.argv[1:2], sys.argv[2:]
    if program == ["worker"] and arguments[:1] in (["drain"], ["replace"]):
        from kvpage_server import worker_commands

        return worker_commands.main(arguments)
    if program == ["worker"]:
        from kvpage_server import worker

        return worker.main(arguments)
    if program == ["serve"]:
        from kvpage_server import serve

        return serve.main(arguments)
    sys.stderr.write(_USAGE)
    return 2


if __name__ == "__main__":
    sys.exit(main())
