"""`python -m kvpage_server PROGRAM …`: programs that share little, so each imports only its own part.

`start-worker` is what a person means by `kvpage worker`; it ends by becoming `worker`.
"""

from __future__ import annotations

import sys

_USAGE = "usage: python -m kvpage_server {serve,start-worker,worker,config} …\n"


def main() -> int:
    program, arguments = sys.argv[1:2], sys.argv[2:]
    if program in (["start-worker"], ["worker"]) and arguments[:1] in (["drain"], ["replace"]):
        from kvpage_server import worker_commands

        return worker_commands.main(arguments)
    if program == ["worker"]:
        from kvpage_server import worker

        return worker.main(arguments)
    if program == ["start-worker"]:
        from kvpage_server import start_worker

        return start_worker.main(arguments)
    if program == ["config"]:
        from kvpage_server import config_command

        return config_command.main(arguments)
    if program == ["serve"]:
        from kvpage_server import serve

        return serve.main(arguments)
    sys.stderr.write(_USAGE)
    return 2


if __name__ == "__main__":
    sys.exit(main())
