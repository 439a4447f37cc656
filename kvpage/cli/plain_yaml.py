"""YAML as another notation for JSON: mappings with text for keys, sequences, text, numbers, true, false, null.

YAML's own constructors are not used: aliases can grow without bound, `1:30` is ninety, and several of them raise
whatever they run into. Whatever JSON has no word for is refused, with its line.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from kvpage.errors import JsonInvalid, shorten
from kvpage.strict_json import MAX_DEPTH, MAX_INTEGER_DIGITS

_PREFIX = "tag:yaml.org,2002:"
_INTEGER = re.compile(rf"[-+]?(0|[1-9][0-9_]{{0,{MAX_INTEGER_DIGITS - 1}}})")
_FLOAT = re.compile(r"[-+]?[0-9]{1,32}\.[0-9]{0,32}([eE][-+]?[0-9]{1,2})?")
_TRUE, _FALSE = ("true", "yes", "on"), ("false", "no", "off")


def load(data: bytes) -> Any:
    """The value `data` spells. Raises `JsonInvalid` for everything else."""
    try:
        root = yaml.compose(data, Loader=_Loader)
    except RecursionError:
        raise JsonInvalid(f"the YAML nests deeper than {MAX_DEPTH} levels; no kvpage document needs that") from None
    except yaml.YAMLError as error:
        raise JsonInvalid(f"not YAML: {shorten(' '.join(str(error).split()))}") from None
    except (ValueError, OverflowError) as error:
        raise JsonInvalid(f"not YAML: an escape in it names no character ({shorten(str(error))})") from None
    return None if root is None else _value(root, depth=0)


class _Loader(yaml.SafeLoader):
    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "aliases (*name) are not allowed", self.get_mark())
        return super().compose_node(parent, index)


def _value(node: yaml.Node, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise _fault(node, f"this nests deeper than {MAX_DEPTH} levels")
    tag = node.tag.removeprefix(_PREFIX)
    if isinstance(node, yaml.MappingNode) and tag == "map":
        return _mapping(node, depth)
    if isinstance(node, yaml.SequenceNode) and tag == "seq":
        return [_value(item, depth + 1) for item in node.value]
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node, tag)
    raise _fault(node, f"what is tagged {shorten(node.tag)} is nothing JSON has a word for; leave the tag out")


def _mapping(node: yaml.MappingNode, depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != f"{_PREFIX}str":
            raise _fault(key_node, "a key is text; write it in quotes")
        key = _text(key_node)
        if key in found:
            raise _fault(key_node, f"the key '{shorten(key)}' stands here twice; keep one of them")
        found[key] = _value(value_node, depth + 1)
    return found


def _scalar(node: yaml.ScalarNode, tag: str) -> Any:
    text = _text(node)
    if tag == "str":
        return text
    if tag == "null" and text.lower() in ("", "~", "null"):
        return None
    if tag == "bool" and text.lower() in (*_TRUE, *_FALSE):
        return text.lower() in _TRUE
    if tag == "int" and _INTEGER.fullmatch(text):
        return int(text)
    if tag == "float" and _FLOAT.fullmatch(text):
        return float(text)
    raise _fault(
        node,
        f"'{shorten(text)}' is read as {shorten(tag)} here, which JSON has no word for: write text in quotes, "
        f"integers in decimal with at most {MAX_INTEGER_DIGITS} digits",
    )


def _text(node: yaml.ScalarNode) -> str:
    """Pairs of surrogate escapes are joined, as JSON has them."""
    try:
        return str(node.value).encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        raise _fault(node, "half of a surrogate pair is no character") from None


def _fault(node: yaml.Node, why: str) -> JsonInvalid:
    line, column = node.start_mark.line + 1, node.start_mark.column + 1
    return JsonInvalid(f"line {line}, column {column}: {why}", details={"line": line, "column": column})
