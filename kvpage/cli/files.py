"""Reading a request from a file: JSON or YAML, `-` for standard input."""

from __future__ import annotations

import sys
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from kvpage.errors import JsonInvalid, NotFound, TooLarge, shorten
from kvpage.strict_json import loads

MAX_FILE_BYTES = 4 << 20


DEFAULT_STRATEGY = "unify"  # the best there is so far


def read_request(name: str) -> Any:
    """The request in file `name`: JSON by its first character or `.json`, else YAML. A person may leave the strategy
    out.

    Raises `NotFound`, `TooLarge`, `JsonInvalid` (for YAML too) naming the file.
    """
    data = _read(name)
    if name.endswith(".json") or data.lstrip()[:1] == b"{":
        request = loads(data, max_bytes=MAX_FILE_BYTES)
    else:
        request = _load_yaml(data, name)
    return {"strategy": DEFAULT_STRATEGY, **request} if isinstance(request, dict) else request


def _read(name: str) -> bytes:
    try:
        if name == "-":
            data = sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
        else:
            with Path(name).open("rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise NotFound(f"cannot read {shorten(name)!r}: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise TooLarge(f"{shorten(name)!r} has more than {MAX_FILE_BYTES} bytes; requests are smaller")
    return data


class _PlainLoader(yaml.SafeLoader):
    """YAML as a notation for JSON: no aliases (they can grow without bound), no key twice."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.get_mark()
            raise yaml.composer.ComposerError(None, None, "aliases (*name) are not allowed", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[object] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {shorten(str(key.value))!r} stands here twice", key.start_mark
                )
            seen.add(key.value if isinstance(key.value, str) else id(key))
        return super().construct_mapping(node, deep)


def _load_yaml(data: bytes, name: str) -> Any:
    try:
        return yaml.load(data, Loader=_PlainLoader)
    except RecursionError:
        raise JsonInvalid(f"{shorten(name)!r} is nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date or number that is none
        raise JsonInvalid(f"{shorten(name)!r} is not YAML: {shorten(' '.join(str(error).split()))}") from error
