"""What `kvpage serve` runs with: made from what was given, and refused where it cannot be served."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from kvpage.errors import SpecInvalid
from kvpage.run_directory import RunDirectory
from kvpage_server.configured import from_command_line
from kvpage_server.setting_fields import Fields, fields_of, variable_of
from kvpage_server.setting_sources import resolve
from kvpage_server.settings import Settings

TEXTS = {
    "devices": "cuda:0,cuda:1", "external_workers": "yes", "leave_workers": "1", "memory": "0.25", "group": "0",
    "adopt_within_s": "3.5", "host": "localhost", "port": "81", "token_file": "/t", "tls_cert_file": "/c",
    "tls_key_file": "/k", "tls_client_ca_file": "/ca", "insecure": "true", "audit_log": "/a", "rate_limit_per_s": "7",
    "fleet": "auto", "log_format": "text", "log_level": "debug",
}  # fmt: skip
"""A value of each setting as a variable has it, none of them the default."""


def test_defaults_serve_the_host_on_the_unix_socket_only() -> None:
    settings = from_command_line(["--run-dir", "/run/here"], {})
    assert settings == Settings(run_directory=RunDirectory(Path("/run/here")))
    assert settings.devices == ("host",)
    assert settings.port is None


def test_every_setting_of_serve_is_handed_on_with_the_same_default() -> None:
    names = {name for name, _ in fields_of("serve")} - {"run_dir"}
    own = {"run_directory", "ready_fd", "intake", "plan_cache_bytes"}
    assert {field.name for field in fields(Settings)} == names | own
    environ = {"KVPAGE_CONFIG": "/dev/null"} | {variable_of(name): text for name, text in TEXTS.items()}
    settings = from_command_line(["--run-dir", "/r"], environ)
    values = {name: getattr(settings, name) for name in TEXTS}
    assert values == {name: getattr(resolve({}, environ).fields, name) for name in TEXTS}
    assert all(value != getattr(Fields(), name) for name, value in values.items())
    assert names == TEXTS.keys()


@pytest.mark.parametrize("arguments", [["--port"], ["--nonsense"], ["--lea"], ["extra"]])
def test_unknown_arguments_end_with_a_usage_message(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        from_command_line(["--run-dir", "/r", *arguments], {})
    assert ended.value.code == 2
    assert "usage: kvpage serve" in capsys.readouterr().err


@pytest.mark.parametrize(
    "changes",
    [
        {"devices": ()},
        {"devices": ("host", "host")},
        {"devices": ("../escape",)},
        {"port": 65536},
        {"port": -1},
        {"port": 80, "host": "0.0.0.0"},
        {"port": 80, "host": "192.0.2.1"},
        {"port": 80, "host": "::"},
        {"port": 80, "host": "example.org"},
    ],
)
def test_what_cannot_be_served_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(SpecInvalid):
        Settings(run_directory=RunDirectory(Path("/r")), **changes)


FILES = {name: Path(f"/{name}") for name in ("token_file", "tls_cert_file", "tls_key_file", "tls_client_ca_file")}


def exposed(host: str, *names: str, **changes: Any) -> Settings:
    """With those of the files."""
    files: dict[str, Any] = {name: FILES[name] for name in names}
    return Settings(run_directory=RunDirectory(Path("/r")), port=80, host=host, **files, **changes)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::", "example.org", "169.254.0.1"])
def test_other_machines_are_served_with_a_token_and_over_tls_only(host: str) -> None:
    tls = ("tls_cert_file", "tls_key_file")
    assert exposed(host, "token_file", *tls).host == host
    assert exposed(host, "token_file", insecure=True).host == host
    for names, insecure in [((), False), (tls, False), (("token_file",), False), ((), True), (tls, True)]:
        with pytest.raises(SpecInvalid, match="other machines"):
            exposed(host, *names, insecure=insecure)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.1.2.3"])
def test_this_machine_is_served_without_either(host: str) -> None:
    assert exposed(host).host == host


@pytest.mark.parametrize("names", [("tls_cert_file",), ("tls_key_file",), ("tls_client_ca_file",)])
def test_half_of_tls_is_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(SpecInvalid, match="--tls-"):
        exposed("127.0.0.1", *names)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tls_cert_file": Path("/c"), "tls_key_file": Path("/k")}, "--tls-cert-file, --tls-key-file"),
        ({"tls_client_ca_file": Path("/c")}, "--tls-client-ca-file"),
        ({"host": "0.0.0.0"}, "host 0.0.0.0"),
        ({"insecure": True}, "--insecure"),
    ],
)
def test_what_is_of_tcp_only_is_refused_without_a_port(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(SpecInvalid, match=f"^{named} would have no effect: without --port"):
        Settings(run_directory=RunDirectory(Path("/r")), **changes)


def test_a_token_file_without_a_port_may_be_there_for_clients() -> None:
    assert Settings(run_directory=RunDirectory(Path("/r")), token_file=Path("/t")).port is None


def test_groups_are_found_by_number_and_name() -> None:
    directory = RunDirectory(Path("/r"))
    assert Settings(run_directory=directory).group_gid is None
    assert Settings(run_directory=directory, group="12345").group_gid == 12345
    assert Settings(run_directory=directory, group="root").group_gid == 0
    with pytest.raises(SpecInvalid):
        _ = Settings(run_directory=directory, group="no-such-group-here").group_gid
