"""Which operation a request asks for, known before the framework looks at it: roles, limits and records need it."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fastapi.routing import APIRoute
from starlette.routing import BaseRoute, Mount, Route

from kvpage_server.roles import RULES, Role, Rule

_OF_FILES = frozenset({"GET", "HEAD"})
_REMEMBERED_PATHS = 1024
_MAX_REMEMBERED_CHARS = 256  # longer paths are found anew each time: who sends them pays for them


@dataclass(frozen=True, slots=True)
class Operation:
    name: str
    rule: Rule
    resources: Mapping[str, str]
    """The path's parameters, such as `pool_id`."""


@dataclass(frozen=True, slots=True)
class _Served:
    name: str
    methods: frozenset[str]
    pattern: re.Pattern[str]


class Operations:
    """Finds the operation that the router would serve. Made when the application has all its routes."""

    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        """Raises LookupError for a route that nobody has given a role."""
        self._served = [_served(route) for route in routes]
        self.names = frozenset(served.name for served in self._served)
        missing = sorted(self.names - RULES.keys())
        if missing:
            raise LookupError(f"no role for {', '.join(missing)}: say in kvpage_server/roles.py who may do it")
        self._remembered = functools.lru_cache(_REMEMBERED_PATHS)(self._find)

    def find(self, method: str, path: str) -> Operation:
        """Of what is not there, an operation `none`: open where the path is, and only the method is not."""
        return self._remembered(method, path) if len(path) <= _MAX_REMEMBERED_CHARS else self._find(method, path)

    def _find(self, method: str, path: str) -> Operation:
        is_open = False
        for served in self._served:
            found = served.pattern.match(path)
            if found is not None and method in served.methods:
                return Operation(served.name, RULES[served.name], found.groupdict())
            is_open = is_open or (found is not None and RULES[served.name].is_open)
        return Operation("none", Rule(role=Role.READ, is_open=is_open), {})


def _served(route: BaseRoute) -> _Served:
    assert isinstance(route, (Route, Mount)), route  # there are no others without WebSockets
    operation_id = route.operation_id if isinstance(route, APIRoute) else None
    methods = _OF_FILES if isinstance(route, Mount) else frozenset(route.methods or ())
    return _Served(operation_id or str(route.name), methods, route.path_regex)
