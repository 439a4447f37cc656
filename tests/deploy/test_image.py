"""The Dockerfile's instructions are really run, stage by stage, and the service of the result is used.

No image is built here: `support.image` says what stands in for what.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

import kvpage
from support.api_service import children_of
from support.checkout import ROOT
from support.dockerfile import Dockerfile, Instruction, Stage
from support.eventually import until
from support.image import Builder, Built, NotHere, admitted, check_sources

DOCKERFILE = Dockerfile.read(ROOT / "Dockerfile")
NO_INDEX = "(from versions: none)"


class Image:
    """A target that was built, and what can be run in it."""

    def __init__(self, builder: Builder, target: str) -> None:
        self.target, self._builder = target, builder
        self.built: Built = builder.build(target)

    @property
    def enter(self) -> list[str]:
        return self._builder.enter

    def command(self, *argv: str, as_pid_1: bool = False) -> list[str]:
        return self._builder.command(self.built, *argv, as_pid_1=as_pid_1)

    def run(self, *argv: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.command(*argv), input=stdin, capture_output=True, text=True, check=False, timeout=60)

    def output(self, *argv: str, stdin: str = "") -> str:
        done = self.run(*argv, stdin=stdin)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


def built(target: str, arguments: Mapping[str, str]) -> Iterator[Image]:
    folder = Path(tempfile.mkdtemp(prefix="kvp-image-"))
    try:
        with Builder(DOCKERFILE, ROOT, folder, arguments) as builder:
            yield Image(builder, target)
    except NotHere as error:
        pytest.skip(f"the Dockerfile's instructions cannot be run: {error}")
    except AssertionError as error:
        if NO_INDEX in str(error):
            pytest.skip("pip reaches no index that has what the Dockerfile installs")
        raise
    finally:
        folder.rmdir()


@pytest.fixture(scope="module")
def planner() -> Iterator[Image]:
    yield from built("planner", {})


@pytest.fixture(scope="module", params=["", "torch"], ids=["without-torch", "with-torch"])
def device(request: pytest.FixtureRequest) -> Iterator[Image]:
    torch = os.environ.get("KVPAGE_TORCH") or installed_torch() if request.param else ""
    yield from built("device", {"TORCH": torch})


def installed_torch() -> str:
    """The build that is installed here, so that the tests fetch no larger one."""
    import torch

    return f"torch=={torch.__version__}"


def modules(image: Image, *names: str) -> dict[str, bool]:
    look = f"{{name: find_spec(name) is not None for name in {names}}}"
    script = f"import json; from importlib.util import find_spec; print(json.dumps({look}))"
    found: dict[str, bool] = json.loads(image.output("python", "-c", script))
    return found


def test_it_is_the_version_of_the_checkout(planner: Image) -> None:
    assert planner.output("kvpage", "--version") == f"kvpage {kvpage.__version__}"


def test_the_planner_serves_and_has_neither_torch_nor_pip(planner: Image) -> None:
    assert modules(planner, "kvpage_server", "uvicorn", "torch", "cuda", "pip") == {
        "kvpage_server": True, "uvicorn": True, "torch": False, "cuda": False, "pip": False,
    }  # fmt: skip


def test_it_plans_as_the_checkout_does(planner: Image) -> None:
    request = (ROOT / "examples/mimo.json").read_text()
    told = json.loads(planner.output("kvpage", "plan", "-", "--json", stdin=request))
    assert told["plan_id"] == kvpage.plan(json.loads(request)).plan_id


def test_the_image_holds_the_environment_and_a_user_and_nothing_of_the_build(planner: Image) -> None:
    own = [layer for layer in planner.built.layers if layer.parent.name in ("base", "planner")]
    assert len(own) == 2
    written = {Path(line) for layer in own for line in files_in(planner, layer)}
    assert {path.parts[0] for path in written} == {"etc", "venv"}
    assert {path.name.rstrip("-") for path in written if path.parts[0] == "etc"} <= {
        ".pwd.lock", "group", "gshadow", "passwd", "shadow", "subgid", "subuid",
    }  # fmt: skip


def files_in(image: Image, layer: Path) -> list[str]:
    """Of what instructions wrote, as seen in the builder's namespace."""
    command = [*image.enter, "find", str(layer), "-type", "f", "-printf", "%P\\n"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_it_runs_as_a_user_without_rights_who_can_write_to_the_run_directory_only(planner: Image) -> None:
    assert planner.output("id", "-u", "-n") == "kvpage"
    assert planner.output("sh", "-c", "id -u; id -g; id -G") == "10001\n10001\n10001"
    assert planner.output("stat", "-c", "%U:%G %a", "/run/kvpage") == "kvpage:kvpage 750"
    assert planner.run("sh", "-c", "touch /venv/x").returncode != 0
    assert planner.run("sh", "-c", "touch /run/kvpage/x && rm /run/kvpage/x").returncode == 0


def test_the_service_becomes_healthy_and_ends_at_its_stop_signal_as_the_first_process(planner: Image) -> None:
    assert_serves(planner)


def assert_serves(image: Image) -> None:
    start = DOCKERFILE.last(image.target, "ENTRYPOINT").words + DOCKERFILE.last(image.target, "CMD").words
    health = DOCKERFILE.last(image.target, "HEALTHCHECK").text.partition("CMD ")[2]
    stop = signal.Signals[DOCKERFILE.last(image.target, "STOPSIGNAL").text]
    assert image.run(*json.loads(health)).returncode == 1
    outer = subprocess.Popen(image.command(*start, as_pid_1=True), stderr=subprocess.PIPE, text=True)
    try:
        assert outer.stderr is not None
        until(lambda: outer.poll() is not None or image.run(*json.loads(health)).returncode == 0)
        assert outer.poll() is None, outer.stderr.read()
        [first] = children_of(outer.pid)
        assert Path(f"/proc/{first}/status").read_text().split("NSpid:")[1].split()[:2] == [str(first), "1"]
        os.kill(first, stop)
        log = outer.communicate(timeout=60)[1]
    finally:
        outer.kill()
        outer.communicate()
    assert outer.returncode == 0, log
    assert image.output("ls", "/run/kvpage").split() == ["kvpage.lock", "worker-host.lock", "worker-host.log"]


@pytest.mark.long
def test_the_device_image_has_the_drivers_bindings_and_torch_unless_it_was_left_out(
    device: Image, request: pytest.FixtureRequest
) -> None:
    has_torch = "with-torch" in request.node.name
    wanted = {"kvpage_server": True, "cuda.bindings": True, "torch": has_torch, "pip": False}
    assert modules(device, *wanted) == wanted
    assert_serves(device)


def test_a_source_that_the_builder_would_not_see_is_said() -> None:
    outside = replace(DOCKERFILE, stages={"one": Stage("one", "image", (Instruction("COPY", "kvpage tests ./"),))})
    with pytest.raises(AssertionError, match="COPY tests: "):
        check_sources(outside, admitted(ROOT))
