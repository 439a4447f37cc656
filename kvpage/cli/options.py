"""Options that several commands have: written, ordered and explained once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, ParamSpec, TypeVar, get_type_hints

import typer

from kvpage.cli import completion
from kvpage.cli.where import Where

if TYPE_CHECKING:
    from kvpage.client.http import Client

SERVICE = "Which service"
"""Panel of the help."""

Url = Annotated[
    str | None,
    typer.Option(
        "--url", metavar="URL", rich_help_panel=SERVICE,
        help="Of the service, such as http://127.0.0.1:8080, in place of its Unix socket (KVPAGE_URL).",
    ),
]  # fmt: skip
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file", metavar="FILE", rich_help_panel=SERVICE, show_default=False,
        help="With the bearer token for --url (KVPAGE_TOKEN_FILE).",
    ),
]  # fmt: skip
CaFile = Annotated[
    Path | None,
    typer.Option(
        "--ca-file", metavar="FILE", rich_help_panel=SERVICE, show_default=False,
        help="With the authorities (PEM) that vouch for an https service (KVPAGE_CA_FILE).",
    ),
]  # fmt: skip
RunDir = Annotated[
    str | None,
    typer.Option(
        "--run-dir", metavar="DIR", rich_help_panel=SERVICE, show_default=False,
        help="Folder of the service's Unix socket (KVPAGE_RUN_DIR).",
    ),
]  # fmt: skip
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, errors too.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress and no confirmation.")]
Device = Annotated[
    str | None,
    typer.Option("--device", metavar="DEVICE", help="Only on this device.", autocompletion=completion.devices),
]
PoolName = Annotated[
    str, typer.Argument(metavar="POOL", help="Name or id of the pool.", autocompletion=completion.pools)
]
_OF_SERVICE: dict[str, Any] = {"url": Url, "token_file": TokenFile, "ca_file": CaFile, "run_dir": RunDir}

_Typed = ParamSpec("_Typed")
_Result = TypeVar("_Result")


def examples(*lines: str) -> str:
    """The last part of a command's help."""
    return "\n".join(["Examples:", *(f"$ {line}" for line in lines)])


def on_service(command: Callable[Concatenate[Client, _Typed], _Result]) -> Callable[..., _Result]:
    """A command with the options that say which service, in place of its first parameter, the client of that service.

    So every command that talks to a service has them, alike and last.
    """

    @functools.wraps(command)
    def opening(**typed: Any) -> _Result:
        place = {name: typed.pop(name) for name in _OF_SERVICE}
        with connect(place) as client:
            return command(client, **typed)  # type: ignore[call-arg]

    _, *own = inspect.signature(command).parameters.values()
    hints = _annotations_of(command, [one.name for one in own]) | _OF_SERVICE
    named = [one.replace(annotation=hints[one.name], kind=inspect.Parameter.KEYWORD_ONLY) for one in own]
    named += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in _OF_SERVICE]
    signature = inspect.Signature([one.replace(annotation=hints[one.name]) for one in named])
    opening.__signature__ = signature  # type: ignore[attr-defined]
    opening.__annotations__ = hints
    del opening.__wrapped__  # whose parameters are others
    return opening


def _annotations_of(command: Callable[..., Any], names: list[str]) -> dict[str, Any]:
    """Without the client's: its class is loaded when a command runs, not when its help is printed."""
    chosen = {name: command.__annotations__[name] for name in names}
    holder = type("holder", (), {"__annotations__": chosen, "__module__": command.__module__})
    return get_type_hints(holder, include_extras=True)


def connect(typed: Mapping[str, str | Path | None], **options: Any) -> Client:
    """A client of the service that was typed. Raises `SpecInvalid` for what names none."""
    from kvpage.client.http import Client

    where = Where.of(typed)
    return Client(where.url, run_dir=where.run_dir, token=where.token(), ca_file=where.ca_file, **options)
