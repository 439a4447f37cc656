"""Reads which modules a source file imports, and judges a project module's imports by its layer."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence


def imported_modules(source: str, module: str, *, is_package: bool = False) -> set[str]:
    """Dotted names that `source`, the text of `module`, imports anywhere: inside functions and for types too.

    `from a import b` counts as both `a` and `a.b`, since b may be a module.
    """
    package = module if is_package else module.rpartition(".")[0]
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _base_of(node, package)
            names.add(base)
            names.update(f"{base}.{alias.name}" for alias in node.names)
    return names


def _base_of(node: ast.ImportFrom, package: str) -> str:
    if node.level == 0:
        return node.module or ""
    parents = package.split(".")
    parents = parents[: len(parents) - (node.level - 1)]
    return ".".join([*parents, node.module] if node.module else parents)


def layer_of(module: str, layers: Sequence[Sequence[str]]) -> int | None:
    """Index of the layer that names `module` or a package it lies in; 0 is the top. None where no layer does."""
    for index, members in enumerate(layers):
        if any(module == member or module.startswith(member + ".") for member in members):
            return index
    return None


def upward_imports(imports: Mapping[str, set[str]], layers: Sequence[Sequence[str]]) -> Iterator[str]:
    """One sentence for each import of a project module that does not go down the layers."""
    for module, names in sorted(imports.items()):
        own = layer_of(module, layers)
        if own is None:
            yield f"{module} is in no layer: put it into the list"
            continue
        for name in sorted(names & imports.keys()):
            target = layer_of(name, layers)
            if target is not None and target < own:
                yield f"{module} imports {name}, which is above it"
