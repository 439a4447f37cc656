"""deploy/systemd: judged by systemd's own tools, and their command lines really run side by side."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvpage.cli import health
from kvpage.client.http import Client
from kvpage_server.start_errors import WRONG_SETTINGS
from support.deployment import DEPLOY, Started, faults_between, output_of, started
from support.eventually import until
from support.plan_requests import small_request

SYSTEMD = DEPLOY / "systemd"
API, WORKER = "kvpage-api.service", "kvpage-worker@.service"
INSTALLED = "/opt/kvpage/bin/kvpage"
MAX_EXPOSURE = 4.0


class Unit(configparser.RawConfigParser):
    """A unit file; what is said several times is one text of several lines."""

    def __init__(self, name: str, instance: str = "") -> None:
        super().__init__(strict=False, comment_prefixes=("#",), delimiters=("=",), interpolation=None, dict_type=_Lists)
        self.optionxform = str  # type: ignore[assignment,method-assign]
        self.read_string((SYSTEMD / name).read_text().replace("%i", instance))

    def all(self, key: str) -> list[str]:
        return self["Service"][key].split("\n") if key in self["Service"] else []

    def command(self) -> list[str]:
        """Of the program that is installed, without its path."""
        program, *arguments = shlex.split(self["Service"]["ExecStart"])
        assert program == INSTALLED
        return arguments


class _Lists(dict):  # type: ignore[type-arg]
    """Appends what comes again, as systemd does."""

    def __setitem__(self, key: object, value: object) -> None:
        if isinstance(value, list) and isinstance(self.get(key), list):
            value = [*self[key], *value]
        super().__setitem__(key, value)


def environment_file() -> dict[str, str]:
    lines = (SYSTEMD / "kvpage.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


@pytest.fixture(scope="module")
def analyze() -> str:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("no systemd-analyze on this machine (it comes with systemd)")
    return program


def exposure(analyze: str, unit: Path) -> float:
    """How much a service may do, from 0 to 10."""
    status, told = output_of(analyze, "security", "--offline=true", "--no-pager", str(unit))
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", told)
    assert status == 0, told
    assert found, told
    return float(found[1])


@pytest.mark.parametrize("name", [API, WORKER])
def test_a_unit_may_do_little(analyze: str, name: str) -> None:
    assert exposure(analyze, SYSTEMD / name) < MAX_EXPOSURE


def test_a_unit_that_may_do_everything_is_found(analyze: str, tmp_path: Path) -> None:
    unit = tmp_path / "open.service"
    unit.write_text("[Service]\nExecStart=/bin/true\n")
    assert exposure(analyze, unit) > MAX_EXPOSURE


def verify(analyze: str, folder: Path, name: str, text: str) -> str:
    """What systemd says of a unit whose program is installed."""
    kvpage = Path(sys.executable).with_name("kvpage")
    (folder / name).write_text(text.replace(INSTALLED, str(kvpage)))
    named = name.replace("@.", "@host.")
    return output_of(analyze, "verify", "--man=no", str(folder / named))[1]


@pytest.mark.parametrize("name", [API, WORKER])
def test_systemd_understands_every_line(analyze: str, name: str, tmp_path: Path) -> None:
    assert verify(analyze, tmp_path, name, (SYSTEMD / name).read_text()) == ""


def test_a_line_that_it_does_not_understand_is_found(analyze: str, tmp_path: Path) -> None:
    text = (SYSTEMD / API).read_text().replace("NoNewPrivileges=", "NoNewPriviledges=")
    assert "NoNewPriviledges" in verify(analyze, tmp_path, API, text)


def programs(*instances: str, variables: Mapping[str, str]) -> list[Started]:
    units = [Unit(API), *(Unit(WORKER, instance) for instance in instances)]
    return [started(unit.command(), variables) for unit in units]


def test_what_the_units_start_serves_together() -> None:
    assert faults_between(programs("host", variables=environment_file())) == []
    on_gpus = environment_file() | {"KVPAGE_DEVICES": "host,cuda:0,GPU-5b1f0c1e-0000-4000-8000-000000000001"}
    instances = ("host", "cuda:0", "GPU-5b1f0c1e-0000-4000-8000-000000000001")
    assert faults_between(programs(*instances, variables=on_gpus)) == []
    assert faults_between(programs("cuda:0", variables=environment_file()))


def test_the_settings_that_are_commented_out_exist() -> None:
    lines = re.findall(r"^#(KVPAGE_\w+=.*)$", (SYSTEMD / "kvpage.env").read_text(), re.MULTILINE)
    assert len(lines) >= 4
    for line in lines:
        started(["serve"], dict([line.replace("engines", "0").split("=", 1)]))  # a group that every machine has


def test_a_device_names_its_unit_without_escaping() -> None:
    """Which letters a name may have: systemd.unit(5). %i is the name as it was typed."""
    for device in ("host", "cuda:0", "GPU-5b1f0c1e-0000-4000-8000-000000000001"):
        assert re.fullmatch(r"[A-Za-z0-9:_.-]+", device)
    assert "%I" not in (SYSTEMD / WORKER).read_text()


def test_neither_unit_takes_the_other_along() -> None:
    for name in (API, WORKER):
        unit = Unit(name)
        told = (SYSTEMD / name).read_text()
        assert not re.search(r"^(Requires|BindsTo|PartOf|Requisite|PropagatesStopTo|Conflicts)=", told, re.MULTILINE)
        service = unit["Service"]
        assert (service["RuntimeDirectory"], service["RuntimeDirectoryPreserve"]) == ("kvpage", "yes")
        assert (service["Restart"], unit["Unit"]["StartLimitIntervalSec"]) == ("on-failure", "0")
    assert Unit(WORKER)["Service"]["KillMode"] == "process"


@pytest.mark.parametrize("name", [API, WORKER])
def test_wrong_settings_are_no_reason_to_start_again(name: str) -> None:
    assert Unit(name)["Service"]["RestartPreventExitStatus"] == str(WRONG_SETTINGS)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "instance"), [(API, ""), (WORKER, "host")])
def test_what_the_units_start_says_wrong_settings_by_its_exit_status(name: str, instance: str, tmp_path: Path) -> None:
    unit = Unit(name, instance)
    command = [str(Path(sys.executable).with_name("kvpage")), *unit.command()]
    wrong = os.environ | {"KVPAGE_MEMORY": "much", "KVPAGE_RUN_DIR": str(tmp_path), "KVPAGE_CONFIG": os.devnull}
    done = subprocess.run(command, env=wrong, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, "KVPAGE_MEMORY" in done.stderr) == (WRONG_SETTINGS, True)


def test_both_units_run_as_the_user_that_is_made() -> None:
    [made] = re.findall(r"^u (\S+) ", (SYSTEMD / "kvpage.sysusers").read_text(), re.MULTILINE)
    assert {Unit(name)["Service"]["User"] for name in (API, WORKER)} == {made}


def test_a_line_that_is_said_again_adds_to_what_was_said() -> None:
    assert Unit(API).all("SystemCallFilter") == ["@system-service", "~@privileged", "@chown"]
    assert len(Unit(WORKER, "host").all("EnvironmentFile")) == 2


@contextmanager
def running(unit: Unit, run_dir: Path, variables: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """The unit's command line as a process, in a run directory of the test."""
    arguments = [str(run_dir) if word == "/run/kvpage" else word for word in unit.command()]
    environment = {**os.environ, **variables, "KVPAGE_MEMORY": "64MiB", "KVPAGE_CONFIG": os.devnull}
    command = [str(Path(sys.executable).with_name("kvpage")), *arguments]
    with (run_dir.with_name(run_dir.name + ".log")).open("ab") as log:
        child = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def test_the_units_command_lines_keep_each_others_pools(no_leaks: None, run_dir: Path) -> None:
    def epoch() -> str | None:
        with Client(run_dir=str(run_dir), timeout_s=60) as client:
            [device] = client.devices()
        return device.epoch

    def healthy() -> bool:
        asked = health.parse(["--run-dir", str(run_dir)])
        assert asked is not None
        return health.check(asked) == 0

    variables = environment_file()
    with running(Unit(API), run_dir, variables) as api:
        with running(Unit(WORKER, "host"), run_dir, variables) as worker:
            until(healthy)
            with Client(run_dir=str(run_dir), timeout_s=60) as client:
                pool = client.create_pool(small_request(), name="mimo")
            first = epoch()
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(60) == 0
        with running(Unit(WORKER, "host"), run_dir, variables):
            until(healthy)
            assert epoch() == first
            api.send_signal(signal.SIGTERM)
            assert api.wait(60) in (0, -signal.SIGTERM)
            with running(Unit(API), run_dir, variables):
                until(healthy)
                with Client(run_dir=str(run_dir), timeout_s=60) as client:
                    assert [one.id for one in client.pools()] == [pool.id]
                assert epoch() == first
    run_dir.with_name(run_dir.name + ".log").unlink()
