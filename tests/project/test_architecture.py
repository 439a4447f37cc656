"""Imports go down the layers, and heavy libraries stay behind the doors that are theirs."""

from __future__ import annotations

import pytest

from support.checkout import ROOT, python_sources
from support.imports import imported_modules, upward_imports

LAYERS = (
    ("kvpage.cli",),
    ("kvpage.integrations",),
    ("kvpage.fleet",),
    ("kvpage.client",),
    ("kvpage.doctor",),
    ("kvpage.planner",),
    ("kvpage.drawing",),
    ("kvpage.wire",),
    (
        "kvpage.request",
        "kvpage.request_kinds",
        "kvpage.request_layers",
        "kvpage.request_backends",
        "kvpage.request_faults",
        "kvpage.request_shape",
        "kvpage.request_model",
        "kvpage.request_ranks",
        "kvpage.request_search",
        "kvpage.ranked_request",
        "kvpage.pointers",
    ),
    ("kvpage.ranked_plan",),
    ("kvpage.simulation",),
    ("kvpage.regions",),
    ("kvpage.pages",),
    ("kvpage.plans", "kvpage.plan_check"),
    ("kvpage.layers",),
    ("kvpage.latent_specs",),
    ("kvpage.specs", "kvpage.backends"),
    ("kvpage.rows",),
    ("kvpage.models",),
    ("kvpage.memory", "kvpage.run_directory", "kvpage.strict_json", "kvpage.token_file"),
    ("kvpage.dtypes", "kvpage.strides", "kvpage.owned", "kvpage.exit_status", "kvpage.program_end"),
    ("kvpage.errors", "kvpage._version"),
)

# Library -> the only modules (with what lies in them) that may import it. What is not named here is free.
DOORS = {
    "torch": (
        "kvpage.client.views",
        "kvpage.client.attachment",
        "kvpage.client.paging",
        "kvpage.integrations",
        "kvpage.cli.demo_pattern",
    ),
    "transformers": ("kvpage.integrations.transformers",),
    "vllm": ("kvpage.integrations.vllm.connector",),
    "pydantic": (
        "kvpage.request",
        "kvpage.request_layers",
        "kvpage.request_backends",
        "kvpage.request_kinds",
        "kvpage.request_shape",
        "kvpage.request_ranks",
        "kvpage.request_search",
        "kvpage.pointers",
        "kvpage_server",
    ),
    "httpx": (
        "kvpage.client.http",
        "kvpage.client.async_http",
        "kvpage.client.address",
        "kvpage.client.unix_transport",
    ),
    "cuda": ("kvpage.memory.cuda_driver", "kvpage.client.views"),
    "ray": ("kvpage.fleet.ray_cluster",),
    "typer": ("kvpage.cli",),
    "rich": ("kvpage.cli",),
    "yaml": ("kvpage.cli",),
    "fastapi": ("kvpage_server",),
    "starlette": ("kvpage_server",),
    "uvicorn": ("kvpage_server",),
    "pydantic_settings": ("kvpage_server",),
    "structlog": ("kvpage_server",),
    "kvpage_server": ("kvpage_server",),  # the library reaches the server as a program only
}


def project_imports() -> dict[str, set[str]]:
    """Every module of the two packages, with what it imports."""
    found = {}
    for folder in (ROOT, ROOT / "server"):
        for path in python_sources(*(f"{folder}/{name}" for name in ("kvpage", "kvpage_server"))):
            parts = path.relative_to(folder).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            module = ".".join(parts[:-1] if is_package else parts)
            found[module] = imported_modules(path.read_text(), module, is_package=is_package)
    return found


def within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def misplaced(imports: dict[str, set[str]]) -> list[str]:
    """One line for each import of a library by a module that is not among its doors."""
    return [
        f"{module} imports {library}"
        for module, names in sorted(imports.items())
        for library, doors in DOORS.items()
        if any(within(name, (library,)) for name in names) and not within(module, doors)
    ]


def test_imports_go_down_the_layers() -> None:
    library = {module: names for module, names in project_imports().items() if within(module, ("kvpage",))}
    del library["kvpage"]  # the lazy front door names everything and is imported by nothing below
    assert list(upward_imports(library, LAYERS)) == []


def test_the_library_never_imports_its_own_front_door() -> None:
    submodules = {name.split(".")[1] for name in project_imports() if name.startswith("kvpage.")}
    users = [
        f"{module} imports {name}"
        for module, names in project_imports().items()
        for name in sorted(names)
        if module.startswith("kvpage.") and name.startswith("kvpage.") and name.split(".")[1] not in submodules
    ]
    assert [user for user in users if not user.startswith("kvpage.cli")] == []


def test_heavy_libraries_stay_behind_their_doors() -> None:
    assert misplaced(project_imports()) == []


def test_the_worker_side_of_the_server_reaches_neither_planner_nor_web() -> None:
    graph = project_imports()
    reached = closure("kvpage_server.worker", graph)
    libraries = {name.split(".")[0] for module in reached for name in graph[module]}
    assert libraries.isdisjoint(
        {"torch", "fastapi", "starlette", "uvicorn", "pydantic", "pydantic_settings", "structlog", "httpx"}
    )
    assert not [module for module in reached if within(module, ("kvpage.planner", "kvpage.client", "kvpage.cli"))]


def closure(start: str, graph: dict[str, set[str]]) -> set[str]:
    """Project modules that importing `start` can load, itself included."""
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        module = waiting.pop()
        if module not in reached:
            reached.add(module)
            waiting += graph[module] & graph.keys() - {"kvpage"}  # the front door is lazy
    return reached


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import kvpage.cli", {"kvpage.cli"}),
        ("def f():\n    from kvpage import cli", {"kvpage", "kvpage.cli"}),
        ("from ..planner import align as a", {"kvpage.planner", "kvpage.planner.align"}),
        ("from . import channel", {"kvpage.wire", "kvpage.wire.channel"}),
        ("if TYPE_CHECKING:\n    from kvpage.plans import Plan", {"kvpage.plans", "kvpage.plans.Plan"}),
    ],
)
def test_the_check_sees_every_form_of_import(source: str, expected: set[str]) -> None:
    assert imported_modules(source, "kvpage.wire.messages") == expected


def test_the_layer_check_fires() -> None:
    imports = {"kvpage.errors": {"kvpage.plans", "os"}, "kvpage.plans": {"kvpage.errors"}, "kvpage.new": set()}
    assert list(upward_imports(imports, LAYERS)) == [
        "kvpage.errors imports kvpage.plans, which is above it",
        "kvpage.new is in no layer: put it into the list",
    ]


def test_the_door_check_fires() -> None:
    imports = {
        "kvpage.plans": {"torch.nn"},
        "kvpage.client.views": {"torch"},
        "kvpage.cli.serve": {"kvpage_server.app"},
    }
    assert misplaced(imports) == ["kvpage.cli.serve imports kvpage_server", "kvpage.plans imports torch"]


def test_the_worker_check_sees_indirect_imports() -> None:
    graph = {"a": {"b", "os"}, "b": {"c.d"}, "c.d": {"a"}, "e": {"a"}}
    assert closure("a", graph) == {"a", "b", "c.d"}
