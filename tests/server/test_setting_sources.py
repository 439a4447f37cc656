"""Flags go before variables, variables before the file, the file before defaults; a wrong value is told by source."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kvpage.errors import SpecInvalid
from kvpage_server import setting_sources
from kvpage_server.configured import settings_of
from kvpage_server.setting_fields import Fields, flag_of, setting_of, variable_of
from kvpage_server.setting_flags import parser_of
from kvpage_server.setting_sources import MAX_FILE_BYTES, MAX_LINE_CHARS, Resolved, resolve


def read(tmp_path: Path, text: str, environ: dict[str, str] | None = None, **flags: Any) -> Resolved:
    """With a file of that text."""
    file = tmp_path / "kvpage.toml"
    file.write_text(text)
    return resolve({"config": str(file), **flags}, environ or {}, system_file=tmp_path / "absent")


def refusal(tmp_path: Path, text: str = "", environ: dict[str, str] | None = None, **flags: Any) -> list[str]:
    """The lines of the error."""
    with pytest.raises(SpecInvalid) as refused:
        read(tmp_path, text, environ, **flags)
    return refused.value.message.splitlines()


def test_the_strongest_source_that_has_a_setting_gives_it(tmp_path: Path) -> None:
    text = "host = 'file'\nport = 1\nmemory = '1GiB'\n"
    resolved = read(tmp_path, text, {"KVPAGE_PORT": "2", "KVPAGE_MEMORY": "2GiB"}, memory="3GiB")
    fields = resolved.fields
    assert (fields.host, fields.port, fields.memory, fields.log_level) == ("file", 2, "3GiB", "info")
    origins = {name: str(origin) for name, origin in resolved.origins.items()}
    assert origins == {"host": f"{tmp_path}/kvpage.toml:1", "port": "KVPAGE_PORT", "memory": "--memory"}


def test_a_switch_can_be_turned_off_again(tmp_path: Path) -> None:
    on = "insecure = true"
    assert read(tmp_path, on).fields.insecure
    assert not read(tmp_path, on, {"KVPAGE_INSECURE": "false"}).fields.insecure
    flags = parser_of("serve", "").parse(["--no-insecure"])
    assert not read(tmp_path, on, {"KVPAGE_INSECURE": "true"}, **flags).fields.insecure


def test_the_file_has_numbers_where_the_command_line_has_text(tmp_path: Path) -> None:
    fields = read(tmp_path, "memory = 0.5\ngroup = 1000\ndevices = ['host', 'cuda:0']\nrun_dir = '/r'\n").fields
    assert (fields.memory, fields.group, fields.devices, fields.run_dir) == (
        "0.5",
        "1000",
        ("host", "cuda:0"),
        Path("/r"),
    )


def test_a_file_may_begin_with_the_mark_of_windows(tmp_path: Path) -> None:
    assert read(tmp_path, "\ufeffport = 1\n").fields.port == 1


def test_an_empty_variable_is_one_that_is_not_set(tmp_path: Path) -> None:
    assert read(tmp_path, "port = 1", {"KVPAGE_PORT": "", "KVPAGE_TOKEN_FILE": ""}).fields.port == 1


def test_every_setting_says_what_it_takes_and_means() -> None:
    for name, field in Fields.model_fields.items():
        assert setting_of(name).takes
        assert (field.description or "").endswith(".")
        assert setting_of(name).metavar or field.annotation is bool


# --- which file -------------------------------------------------------------------------------------------------------


def test_the_file_is_the_one_named_or_else_that_of_the_system(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("flag", "variable", "system")]
    for port, file in enumerate(files):
        file.write_text(f"port = {port}")
    flag, variable, system = files
    chosen = [
        resolve({"config": str(flag)}, {"KVPAGE_CONFIG": str(variable)}, system_file=system),
        resolve({}, {"KVPAGE_CONFIG": str(variable)}, system_file=system),
        resolve({}, {}, system_file=system),
        resolve({}, {"KVPAGE_CONFIG": os.devnull}, system_file=system),
        resolve({}, {}, system_file=tmp_path / "absent" / "absent"),
    ]
    assert [(resolved.fields.port, resolved.file) for resolved in chosen] == [
        (0, flag), (1, variable), (2, system), (None, Path(os.devnull)), (None, None)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: None, "No such file"),
        (lambda path: path.mkdir(), "Is a directory"),
        (lambda path: path.write_bytes(b"\xff"), "not UTF-8"),
        (lambda path: path.write_text("port = \n"), "is not TOML"),
        (lambda path: path.write_text("#" * (MAX_FILE_BYTES + 1)), "longer than"),
        (lambda path: path.symlink_to("/dev/zero"), "not an ordinary file"),
        (os.mkfifo, "not an ordinary file"),
        (lambda path: path.write_text("port=" + "9" * (MAX_LINE_CHARS + 1)), "a line may have"),
        (lambda path: path.write_text(".".join("a" * 20_000) + " = 1"), "a line may have"),
        (lambda path: path.write_text("devices = [\n" + "[\n" * 20_000), "too deep"),
        (lambda path: path.write_text("port" + ".a" * 1500 + " = 1"), "too deep"),
        (lambda path: path.write_text("port = 0x" + "f" * 4000), "too many digits"),
    ],
    ids=[
        "missing",
        "folder",
        "binary",
        "no TOML",
        "long",
        "endless",
        "pipe",
        "long number",
        "long key",
        "deep list",
        "deep table",
        "large number",
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, make: Any, reason: str) -> None:
    path = tmp_path / "kvpage.toml"
    make(path)
    with pytest.raises(SpecInvalid, match=reason) as refused:
        resolve({"config": str(path)}, {})
    assert str(path) in refused.value.message


def test_the_systems_file_is_read_when_there_is_one_even_where_it_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(SpecInvalid, match="/dev/null for none"):
        resolve({}, {}, system_file=tmp_path / "dangling")


# --- wrong values -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", '"8080"'), ("port", "true"), ("port", "80.5"), ("port", "65536"), ("port", "-1"), ("port", "[80]"),
        ("insecure", '"true"'), ("insecure", "1"), ("devices", "1"), ("devices", "[1]"), ("memory", "true"),
        ("memory", "{a = 1}"), ("adopt_within_s", '"1"'), ("adopt_within_s", "nan"), ("adopt_within_s", "-1"),
        ("rate_limit_per_s", "0"), ("rate_limit_per_s", "inf"), ("log_level", '"loud"'), ("log_format", "1"),
        ("token_file", "1"), ("host", '"a b"'), ("host", "127"), ("memory", '"lots"'), ("memory", "1.5"),
    ],
)  # fmt: skip
def test_a_wrong_value_in_the_file_is_told_with_its_line_and_what_it_takes(
    tmp_path: Path, name: str, value: str
) -> None:
    [line] = refusal(tmp_path, f"# first\n{name} = {value}\n")
    assert line.startswith(f"{name} in {tmp_path}/kvpage.toml:2 is ")
    assert line.endswith(f"; it takes {setting_of(name).takes}")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("port", "x"), ("port", "65536"), ("port", "1.5"), ("port", "8_080"),
        ("port", "\uff18"), ("insecure", "perhaps"), ("adopt_within_s", "1h"),
        ("adopt_within_s", "3601"), ("rate_limit_per_s", "nan"),
        ("rate_limit_per_s", "1e-320"), ("log_level", "DEBUG"), ("log_format", "xml"),
        ("host", "http://127.0.0.1"),
    ],
)  # fmt: skip
def test_a_wrong_variable_or_flag_is_told_by_its_name(tmp_path: Path, name: str, text: str) -> None:
    takes = f"; it takes {setting_of(name).takes}"
    [line] = refusal(tmp_path, "", {variable_of(name): text})
    assert line == f"{variable_of(name)} is {text!r}{takes}"
    if name != "insecure":  # a switch is typed without a value
        [line] = refusal(tmp_path, "", {}, **{name: text})
        assert line == f"{flag_of(name)} is {text!r}{takes}"


def test_all_that_is_wrong_with_a_source_is_told_at_once(tmp_path: Path) -> None:
    assert len(refusal(tmp_path, "port = 'x'\nprot = 1\n[tls]\n")) == 3
    assert len(refusal(tmp_path, "", {"KVPAGE_PORT": "x", "KVPAGE_LOG_LEVEL": "y"})) == 2
    assert len(refusal(tmp_path, "", {"KVPAGE_PROT": "1", "KVPAGE_TOKEN": "y"})) == 2
    assert len(refusal(tmp_path, "memory = 'lots'\nport = 'x'\ndevices = ['hots']\nprot = 1\n")) == 4


def test_of_several_devices_the_wrong_ones_are_named(tmp_path: Path) -> None:
    [line] = refusal(tmp_path, "port = 1\ndevices = ['hots', 'host', 'host']\n")
    assert line.startswith(
        f"devices in {tmp_path}/kvpage.toml:2 is hots,host,host: 'hots' is none, 'host' is named twice;"
    )
    [line] = refusal(tmp_path, "", {}, devices=["host", "gpu"])
    assert line.startswith("--device is host,gpu: 'gpu' is none;")


def test_settings_that_are_wrong_together_are_told_with_their_places(tmp_path: Path) -> None:
    resolved = read(
        tmp_path, "port = 1\nhost = '0.0.0.0'\n", {"KVPAGE_TLS_KEY_FILE": "/k", "KVPAGE_TLS_CERT_FILE": "/c"}
    )
    with pytest.raises(SpecInvalid, match=r"other machines.*\(host in .*kvpage.toml:2\)$"):
        settings_of(resolved)
    resolved = read(tmp_path, "port = 1\n", {"KVPAGE_TLS_KEY_FILE": "/k"})
    with pytest.raises(SpecInvalid, match=r"no group .*\(group in .*kvpage.toml:2\)$"):
        settings_of(read(tmp_path, "port = 1\ngroup = 'no-such-group-here'\n"))
    with pytest.raises(SpecInvalid, match=r"needs both \(tls_key_file in KVPAGE_TLS_KEY_FILE\)$"):
        settings_of(resolved)


@pytest.mark.parametrize(
    ("key", "meant"), [("prot", "port"), ("Port", "port"), ("token", "token_file"), ("tls", "tls_cert_file")]
)
def test_an_unknown_key_is_answered_with_the_nearest(tmp_path: Path, key: str, meant: str) -> None:
    [line] = refusal(tmp_path, f"{key} = 1")
    assert line == f"{key} in {tmp_path}/kvpage.toml:1 is no setting; did you mean {meant!r}?"


def test_a_table_is_no_setting(tmp_path: Path) -> None:
    [line] = refusal(tmp_path, "port = 1\n\n[serve]\nport = 1")
    assert line.startswith(f"serve in {tmp_path}/kvpage.toml:3 is no setting")
    assert "has no tables" in line


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("KVPAGE_PROT", "KVPAGE_PORT"), ("KVPAGE_TOKEN", "KVPAGE_TOKEN_FILE"), ("KVPAGE_RUNDIR", "KVPAGE_RUN_DIR"),
        ("KVPAGE_RATE_LIMIT", "KVPAGE_RATE_LIMIT_PER_S"), ("KVPAGE_MEMORY_BYTES", "KVPAGE_MEMORY"),
        ("KVPAGE_LOGLEVEL", "KVPAGE_LOG_LEVEL"), ("KVPAGE_CONFIG_FILE", "KVPAGE_CONFIG"),
    ],
)  # fmt: skip
def test_a_variable_that_looks_like_a_setting_is_refused(tmp_path: Path, variable: str, meant: str) -> None:
    [line] = refusal(tmp_path, "", {variable: "1"})
    assert line.startswith(f"{variable} is no setting; did you mean {meant}?")


def test_variables_of_others_are_left_alone_and_named(tmp_path: Path) -> None:
    """Those that Kubernetes makes for a Service called kvpage, and those of this project's scripts and tests."""
    service = {
        "KVPAGE_SERVICE_HOST": "10.0.0.1", "KVPAGE_SERVICE_PORT": "80", "KVPAGE_SERVICE_PORT_HTTP": "80",
        "KVPAGE_PORT_8000_TCP": "tcp://10.0.0.1:80", "KVPAGE_PORT_8000_TCP_ADDR": "10.0.0.1",
        "KVPAGE_METRICS_PORT": "tcp://10.0.0.1:81",
    }  # fmt: skip
    own = ("FAKECUDA_DIR", "FAKECUDA_LOG", "TEST_TIER", "TORCH", "TORCH_INDEX", "VENV", "GPU_CHECK", "SAMPLE_GPU")
    environ = service | {f"KVPAGE_{name}": "1" for name in own}
    read_by_others = {"KVPAGE_URL": "http://u:p@h", "KVPAGE_WORKER_OF_SERVER": "1", "kvpage_port": "1", "PORT": "1"}
    resolved = read(tmp_path, "", environ | read_by_others)
    assert resolved.ignored_variables == tuple(sorted(environ))
    assert resolved.fields == Fields()


def test_what_kubernetes_puts_in_place_of_a_port_is_explained(tmp_path: Path) -> None:
    [line] = refusal(tmp_path, "", {"KVPAGE_PORT": "tcp://10.0.0.1:80"})
    assert "enableServiceLinks: false" in line


def test_the_line_of_a_key_is_found_as_people_write_it() -> None:
    text = "# port = 1\nmemory = '1'\n  'port'=2\n[serve]\n"
    assert [setting_sources._line_of(name, text) for name in ("memory", "port", "serve", "absent")] == [2, 3, 4, 1]
