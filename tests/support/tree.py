"""Judgements on the files of the checkout: what they must not mention, and how long they may be."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

MAX_FILE_LINES = 350
MAX_FUNCTION_LINES = 55

# A file that names a personal folder or a package host works on one machine only. In pieces, so that this file passes.
FORBIDDEN = {
    "a personal folder": re.compile(r"(?<![\w.])/" + r"(root|work|home/\w+|Users/\w+)/"),
    "a package registry": re.compile(
        r"py" + r"pi\.org|pythonho" + r"sted\.|download\.py" + r"torch\.|registry\.np" + "m"
    ),
    # It is on no index: whoever took the name there would be installed, and run as a service.
    "kvpage as if it were on an index": re.compile(r"(?<!&& )install(?: -[-\w=]+)* ['\"]?kvpage(?=[\[=<>~'\"\s]|$)"),
    "a merge conflict": re.compile(r"^(<{7}|>{7}) ", re.MULTILINE),
}


def forbidden_mentions(text: str) -> list[str]:
    """One line for each forbidden thing in `text`."""
    return [
        f"line {text.count(chr(10), 0, match.start()) + 1} mentions {what}: {match.group()}"
        for what, pattern in FORBIDDEN.items()
        for match in pattern.finditer(text)
    ]


def too_long(source: str, name: str) -> Iterator[str]:
    """Names of what is too long in a Python file: the file itself, or "file:function"."""
    if len(source.splitlines()) > MAX_FILE_LINES:
        yield name
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield f"{name}:{node.name}"
