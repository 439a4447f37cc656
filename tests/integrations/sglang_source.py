"""What kvpage would hook into in SGLang, read from its source without running it.

python tests/integrations/sglang_source.py FOLDER > tests/data/readers/sglang.json
"""

from __future__ import annotations

import ast
import json
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, TypeVar

Json = dict[str, Any]
Definition = TypeVar("Definition", ast.FunctionDef, ast.ClassDef)
PLUGINS = "sglang/srt/plugins/__init__.py"
REGISTRY = "sglang/srt/plugins/hook_registry.py"
POOL_HOOK = "sglang/srt/mem_cache/utils.py"
POOLS = "sglang/srt/mem_cache/memory_pool.py"
SCHEDULER = "sglang/srt/managers/scheduler.py"
TARGET = "maybe_init_custom_mem_pool"
POOL = "MHATokenToKVPool"


class Missing(LookupError):
    """Something that a hook needs is not there."""


class Module:
    """One file, parsed."""

    def __init__(self, source: Path, path: str) -> None:
        self.path = path
        try:
            self.tree = ast.parse((source / path).read_text())
        except OSError as error:
            raise Missing(f"{path}: {error.strerror}") from error

    def constant(self, name: str) -> object:
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
                return ast.literal_eval(node.value)
        raise Missing(f"{self.path} has no constant {name}")

    def function(self, name: str) -> ast.FunctionDef:
        return self._found(self.tree, name, ast.FunctionDef)

    def class_(self, name: str) -> ast.ClassDef:
        return self._found(self.tree, name, ast.ClassDef)

    def method(self, owner: str, name: str) -> ast.FunctionDef:
        return self._found(self.class_(owner), name, ast.FunctionDef)

    def _found(self, inside: ast.Module | ast.ClassDef, name: str, kind: type[Definition]) -> Definition:
        for node in inside.body:
            if isinstance(node, kind) and node.name == name:
                return node
        owner = f"{inside.name} of " if isinstance(inside, ast.ClassDef) else ""
        raise Missing(f"{owner}{self.path} has no {name}")

    def needs_call(self, function: ast.FunctionDef, called: str) -> None:
        """Raises `Missing` unless the function calls `called`, written so."""
        calls = {ast.unparse(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)}
        if called not in calls:
            raise Missing(f"{function.name} of {self.path} does not call {called}")


def parameters(function: ast.FunctionDef) -> list[str]:
    given = function.args
    return [argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)]


def facts(source: Path) -> Json:
    """`source` holds the package. Raises `Missing` where anything that a hook needs is not there."""
    return {"sglang": version(source), "plugins": _plugins(source), "pool": _pool(source), "hook": _hook(source)}


def version(source: Path) -> str:
    found = [found.version for found in distributions(name="sglang", path=[str(source)])]
    return found[0] if found else "unknown"


def _plugins(source: Path) -> Json:
    plugins, registry = Module(source, PLUGINS), Module(source, REGISTRY)
    plugins.needs_call(plugins.function("load_plugins"), "HookRegistry.apply_hooks")
    scheduler = Module(source, SCHEDULER)
    scheduler.needs_call(scheduler.function("run_scheduler_process"), "load_plugins")
    kinds = [node.targets[0] for node in registry.class_("HookType").body if isinstance(node, ast.Assign)]
    names = [ast.unparse(kind) for kind in kinds]
    for kind in ("AROUND", "REPLACE"):
        if kind not in names:
            raise Missing(f"HookType of {REGISTRY} has no {kind}")
    return {
        "entry_point_group": plugins.constant("GENERAL_PLUGINS_GROUP"),
        "HookRegistry.register": parameters(registry.method("HookRegistry", "register")),
        "HookType": names,
    }


def _hook(source: Path) -> Json:
    target = Module(source, POOL_HOOK).function(TARGET)
    importers = [
        str(path.relative_to(source))
        for path in sorted((source / "sglang/srt").rglob("*.py"))
        if TARGET in (text := path.read_text()) and _imports_target(text)
    ]
    return {
        "name": f"{POOL_HOOK.removesuffix('.py').replace('/', '.')}.{TARGET}",
        "parameters": parameters(target),
        "returns": ast.unparse(target.returns) if target.returns else None,
        "imported_by_name_in": importers,
    }


def _imports_target(text: str) -> bool:
    imports = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom))
    return any(alias.name == TARGET for node in imports for alias in node.names)


def _pool(source: Path) -> Json:
    pools = Module(source, POOLS)
    pool = pools.class_(POOL)
    pools.needs_call(pools.method("KVCache", "__init__"), TARGET)
    pools.needs_call(pools.method(POOL, "__init__"), "self._create_buffers")
    pools.needs_call(pools.method(POOL, "_create_buffers"), "self._create_buffers_normal")
    pools.needs_call(pools.method(POOL, "_create_buffers_normal"), "torch.cuda.use_mem_pool")
    return {
        "name": f"{POOLS.removesuffix('.py').replace('/', '.')}.{POOL}",
        "bases": [ast.unparse(base) for base in pool.bases],
        "buffers_made_by": ["_create_buffers", "_create_buffers_normal"],
        "replaced_in": [
            node.name
            for node in pools.tree.body
            if isinstance(node, ast.ClassDef)
            and POOL in map(ast.unparse, node.bases)
            and any(isinstance(part, ast.FunctionDef) and part.name == "_create_buffers" for part in node.body)
        ],
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(facts(Path(sys.argv[1])), indent=1) + "\n")
