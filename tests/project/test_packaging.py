"""The wheel holds the two packages and nothing else, and under `make test` it is what the tests import."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import kvpage
import kvpage_server
from support.checkout import ROOT, python_sources

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BASE_INSTALL = {"httpcore", "httpx", "msgspec", "numpy", "pydantic", "pyyaml", "rich", "typer"}


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Names of the files in a freshly built wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
        return archive.namelist()


def is_editable(installed: Distribution) -> bool:
    origin = json.loads(installed.read_text("direct_url.json") or "{}")
    return bool(origin.get("dir_info", {}).get("editable", False))


@pytest.fixture
def site_packages() -> Path:
    """Where the wheel is installed; skips where the checkout itself is."""
    installed = distribution("kvpage")
    if is_editable(installed):
        pytest.skip("an editable install (make dev); make test installs the wheel")
    return Path(str(installed.locate_file(""))).resolve()


def test_the_wheel_holds_the_two_packages_and_its_metadata(wheel_names: list[str]) -> None:
    top = {name.split("/")[0] for name in wheel_names}
    assert top == {"kvpage", "kvpage_server", f"kvpage-{kvpage.__version__}.dist-info"}
    assert {"kvpage/py.typed", "kvpage_server/py.typed"} <= set(wheel_names)


def test_the_wheel_holds_every_module(wheel_names: list[str]) -> None:
    modules = {str(path.relative_to(ROOT)) for path in python_sources("kvpage")}
    modules |= {str(path.relative_to(ROOT / "server")) for path in python_sources("server/kvpage_server")}
    assert modules == {name for name in wheel_names if name.endswith(".py")}


def test_the_wheel_holds_the_web_page(wheel_names: list[str]) -> None:
    files = {f"kvpage_server/ui/{path.name}" for path in (ROOT / "server/kvpage_server/ui").iterdir()}
    assert {"kvpage_server/ui/index.html", "kvpage_server/ui/main.js", "kvpage_server/ui/page.css"} <= files
    assert files == {name for name in wheel_names if name.startswith("kvpage_server/ui/")}


def test_the_tests_import_the_installed_wheel(site_packages: Path) -> None:
    assert site_packages.name == "site-packages"
    for package in (kvpage, kvpage_server):
        assert Path(str(package.__file__)).resolve().is_relative_to(site_packages)


def test_children_started_in_the_checkout_import_it_too(site_packages: Path) -> None:
    command = [sys.executable, "-c", "import kvpage; print(kvpage.__file__)"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).resolve().is_relative_to(site_packages)


def test_the_installed_wheel_is_the_checkouts(site_packages: Path) -> None:
    for folder, name in ((ROOT, "kvpage"), (ROOT / "server", "kvpage_server")):
        for path in python_sources(str(folder / name)):
            assert (site_packages / path.relative_to(folder)).read_bytes() == path.read_bytes(), path


def test_the_base_install_is_light() -> None:
    assert {Requirement(text).name for text in PROJECT["dependencies"]} == BASE_INSTALL


def test_the_base_install_has_floors_and_no_ceilings() -> None:
    for text in PROJECT["dependencies"]:
        assert {bound.operator for bound in Requirement(text).specifier} == {">="}, text


def test_the_extras_are_the_documented_ones() -> None:
    assert set(PROJECT["optional-dependencies"]) == {"torch", "server", "fleet", "cuda", "transformers", "dev"}


def test_the_lock_satisfies_the_floors_and_leaves_torch_to_the_user() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    locked = [Requirement(line) for line in lines if line and not line.startswith("#")]
    names = {requirement.name for requirement in locked}
    assert not [name for name in names if name == "torch" or name.startswith(("nvidia-", "cuda-", "triton"))]
    extras = PROJECT["optional-dependencies"]
    for wanted in map(Requirement, PROJECT["dependencies"] + extras["server"] + extras["dev"]):
        if wanted.name.startswith("cuda-"):
            continue  # a CUDA build of torch depends on an exact version
        versions = [next(iter(pin.specifier)).version for pin in locked if pin.name == wanted.name.lower()]
        assert versions, f"{wanted.name} is not in the lock: make lock"
        assert all(wanted.specifier.contains(version) for version in versions), f"{wanted}: make lock"


def test_the_version_has_one_source() -> None:
    assert distribution("kvpage").version == kvpage.__version__
    assert "version" in PROJECT["dynamic"]


def test_the_console_script_is_the_only_entry_point() -> None:
    points = distribution("kvpage").entry_points
    assert [(point.group, point.name, point.value) for point in points] == [
        ("console_scripts", "kvpage", "kvpage.cli:main")
    ]
