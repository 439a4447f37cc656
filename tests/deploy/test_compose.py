"""deploy/compose*.yaml: by the rules of Compose, and what they start fits together. No engine runs them here."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from kvpage.errors import SpecInvalid
from support.checkout import ROOT
from support.deployment import DEPLOY, Started, faults_between, is_probe, started
from support.dockerfile import Dockerfile

DOCKERFILE = Dockerfile.read(ROOT / "Dockerfile")
DEFAULT = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


def interpolated(text: str, **variables: str) -> str:
    return DEFAULT.sub(lambda found: variables.get(found[1], found[2] or ""), text)


def compose(*names: str, **variables: str) -> dict[str, Any]:
    """The files together, services merged as Compose merges them: lists and values of later files take their place."""
    merged: dict[str, Any] = {}
    for name in names:
        for section, entries in yaml.safe_load(interpolated((DEPLOY / name).read_text(), **variables)).items():
            if section.startswith("x-") or not isinstance(entries, dict):
                continue
            for key, value in entries.items():
                merged.setdefault(section, {}).setdefault(key, {}).update(value)
    return merged


def services(found: dict[str, Any], *profiles: str) -> dict[str, dict[str, Any]]:
    every = found["services"].items()
    return {name: service for name, service in every if set(service.get("profiles", [])) <= set(profiles)}


def programs(found: dict[str, Any], *profiles: str) -> list[Started]:
    image = DOCKERFILE.environment("planner")
    own = {name: value for name, value in image.items() if name.startswith("KVPAGE_")}
    return [
        started(service["command"], own | kvpage_variables(service.get("environment", {})))
        for service in services(found, *profiles).values()
    ]


def kvpage_variables(environment: dict[str, str]) -> dict[str, str]:
    return {name: str(value) for name, value in environment.items() if name.startswith("KVPAGE_")}


def validated(text: str) -> list[str]:
    """Names of the services. Raises ValueError for what is no Compose file."""
    library: Any = pytest.importorskip("compose_spec", reason="compose-spec has no build for this platform")
    file = library.PyCompose.from_yaml(yaml.safe_dump(yaml.safe_load(interpolated(text))))
    file.validate()
    names: list[str] = file.service_names()
    return names


def test_they_are_compose_files() -> None:
    assert sorted(validated((DEPLOY / "compose.yaml").read_text())) == ["api", "worker-gpu", "worker-host"]
    assert validated((DEPLOY / "compose.tcp.yaml").read_text()) == ["api"]


@pytest.mark.parametrize(
    ("said", "instead"),
    [("stop_grace_period:", "stop_grace_perod:"), ("retries:", "retrys:"), ("interval: 10s", "interval: soon")],
)
def test_the_rules_find_a_mistake(said: str, instead: str) -> None:
    text = (DEPLOY / "compose.yaml").read_text()
    assert said in text
    with pytest.raises(ValueError, match=instead.split()[0].strip(":")):
        validated(text.replace(said, instead))


def test_what_is_started_serves_together() -> None:
    assert faults_between(programs(compose("compose.yaml"))) == []
    assert faults_between(programs(compose("compose.yaml", KVPAGE_DEVICES="host,cuda:0"), "gpu")) == []
    over_tcp = compose("compose.yaml", "compose.tcp.yaml")
    assert faults_between(programs(over_tcp)) == []
    [api] = [settings for program, settings in programs(over_tcp) if program == "serve"]
    assert over_tcp["services"]["api"]["ports"] == [f"127.0.0.1:{api.port}:{api.port}"]


def test_a_device_that_nobody_serves_and_a_flag_that_is_none_are_found() -> None:
    assert faults_between(programs(compose("compose.yaml", KVPAGE_DEVICES="host,cuda:0")))
    with pytest.raises(SystemExit):
        started(["serve", "--external-worker"], {})
    with pytest.raises(SpecInvalid, match="KVPAGE_DEVICE_S is no setting"):
        started(["serve"], {"KVPAGE_DEVICE_S": "host"})
    with pytest.raises(AssertionError):
        started(["worker", "--device", "host"], {"KVPAGE_FOO_BAR_BAZ": "1"})
    with pytest.raises(SpecInvalid, match="tls"):
        started(["serve", "--external-workers", "--host=0.0.0.0", "--port=1", "--token-file=/t"], {})
    with pytest.raises(SpecInvalid, match="lots"):
        started(["worker", "--device", "host"], {"KVPAGE_MEMORY": "lots"})


def test_every_service_has_no_more_rights_than_it_needs() -> None:
    found = compose("compose.yaml")
    for name, service in services(found, "gpu").items():
        assert service["user"] == DOCKERFILE.last("planner", "USER").text, name
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["read_only"] is True
        assert service["network_mode"] == "none"
        assert service["init"] is True
        assert service["restart"] == "on-failure"
        assert "privileged" not in service
        assert "ipc" not in service
        assert "pid" not in service
        assert service["volumes"] == [f"run:{DOCKERFILE.last('planner', 'VOLUME').text}"]
    assert set(found["volumes"]) == {"run"}


def test_the_api_is_asked_how_it_is_and_workers_are_not() -> None:
    found = services(compose("compose.yaml"), "gpu")
    command, *probe = found.pop("api")["healthcheck"]["test"]
    assert command == "CMD"
    assert is_probe(probe)
    assert [service["healthcheck"] for service in found.values()] == [{"disable": True}] * 2
    assert not is_probe(["kvpage", "health", "--alive"])


def test_secrets_are_read_where_they_are_mounted() -> None:
    found = compose("compose.yaml", "compose.tcp.yaml")
    [api] = [settings for program, settings in programs(found) if program == "serve"]
    files = {str(path) for path in (api.token_file, api.tls_cert_file, api.tls_key_file)}
    assert files == {f"/run/secrets/{name}" for name in found["services"]["api"]["secrets"]}
    assert set(found["services"]["api"]["secrets"]) == set(found["secrets"])
