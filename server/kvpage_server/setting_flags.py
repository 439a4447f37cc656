"""The command lines of `kvpage serve` and `kvpage worker`, made from the table of settings."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

from kvpage.errors import nearest
from kvpage_server.setting_fields import Program, fields_of, flag_of, is_switch, setting_of, variable_of

_FLAG = re.compile(r"--?[a-z][a-z0-9-]{0,40}")


class FlagParser(argparse.ArgumentParser):
    """Knows only what is given, so that other sources fill the rest; and repeats no value, which may be a secret."""

    def error(self, message: str) -> NoReturn:
        self.refuse(re.sub("'.*'", "(not shown)", message))

    def refuse(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: error: {message}\n")

    def parse(self, arguments: Sequence[str]) -> dict[str, Any]:
        """What was given, by name. Ends the process with status 2 for what it does not know."""
        known, extra = self.parse_known_args(arguments)
        if extra:
            self.refuse(_unknown(extra, [flag for action in self._actions for flag in action.option_strings]))
        return vars(known)


def parser_of(
    program: Program,
    description: str,
    *,
    command: str = "",
    only: Collection[str] | None = None,
    epilog: str | None = None,
) -> FlagParser:
    """`command`: what is typed behind the program. `only`: the settings it takes; default all of the program."""
    parser = FlagParser(
        prog=f"kvpage {program} {command}".rstrip(),
        description=description,
        epilog=epilog,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--config", metavar="FILE", help="TOML file of settings (KVPAGE_CONFIG); without it /etc/kvpage/kvpage.toml"
    )
    for name, field in fields_of(program):
        if only is not None and name not in only:
            continue
        text = f"{field.description} ({variable_of(name)})"
        if is_switch(name):
            parser.add_argument(flag_of(name), dest=name, action=argparse.BooleanOptionalAction, help=text)
        else:
            action = "append" if name == "devices" else "store"
            parser.add_argument(
                flag_of(name), dest=name, action=action, metavar=setting_of(name).metavar, help=text.replace("%", "%%")
            )
    return parser


def _unknown(extra: Sequence[str], flags: Sequence[str]) -> str:
    """Names the flags only: what stands beside them may be a secret."""
    names = [found[0] for word in extra if (found := _FLAG.match(word))]
    if not names:
        return f"{len(extra)} words too many"
    meant = nearest(names[0].lstrip("-"), [flag.lstrip("-") for flag in flags]).replace("'", "'--", 1)
    return f"unrecognized arguments: {' '.join(names)}{meant}"
