"""`kvpage config`: every setting with where it came from, what is wrong, and never a secret."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvpage.client.http import Client
from kvpage.errors import KvpageError
from kvpage.token_file import read_token
from kvpage_server import config_command, worker_commands
from kvpage_server.configured import from_command_line
from kvpage_server.setting_fields import Fields, fields_of
from kvpage_server.setting_sources import resolve
from support.command_line import run

SECRET = "Zq7sesame-open-0123456789abcdef"
Capture = pytest.CaptureFixture[str]


def printed(capfd: Capture, environ: dict[str, str], *arguments: str, status: int = 0) -> tuple[str, str]:
    """What goes to standard output and to standard error."""
    assert config_command.main(arguments, {"KVPAGE_CONFIG": "/dev/null"} | environ) == status
    captured = capfd.readouterr()
    return captured.out, captured.err


def test_every_setting_is_printed_with_its_source(tmp_path: Path, capfd: Capture) -> None:
    file = tmp_path / "kvpage.toml"
    file.write_text("\nmemory = 0.25\ndevices = ['host', 'cuda:0']\n")
    environ = {"KVPAGE_CONFIG": str(file), "KVPAGE_GROUP": "0", "KVPAGE_THING": "1", "KVPAGE_RUN_DIR": "/r"}
    told = json.loads(printed(capfd, environ, "--json", "serve", "--port", "80", "--leave-workers")[0])
    settings = {name: (one["value"], one["source"], one["from"]) for name, one in told["settings"].items()}
    assert settings.keys() == {name for name, _ in fields_of("serve")}
    assert settings["memory"] == ("0.25", "file", f"{file}:2")
    assert settings["devices"] == (["host", "cuda:0"], "file", f"{file}:3")
    assert settings["group"] == ("0", "variable", "KVPAGE_GROUP")
    assert settings["port"] == (80, "flag", "--port")
    assert settings["leave_workers"] == (True, "flag", "--leave-workers")
    assert settings["log_level"] == ("info", "default", "default")
    assert (told["file"], told["ignored_variables"]) == (str(file), ["KVPAGE_THING"])


def test_people_get_a_table_of_both_programs_or_of_one(capfd: Capture) -> None:
    environ = {"KVPAGE_RUN_DIR": "/r", "KVPAGE_DEVICES": "host,cuda:1", "KVPAGE_LEAVE_WORKERS": "true", "KVPAGE_X": "1"}
    lines = printed(capfd, environ)[0].splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines[: len(Fields.model_fields) + 1]}
    assert rows.keys() == {"setting", *Fields.model_fields}
    assert rows["devices"] == ["host,cuda:1", "KVPAGE_DEVICES"]
    assert rows["leave_workers"] == ["true", "KVPAGE_LEAVE_WORKERS"]
    assert rows["port"] == ["-", "default"]
    assert lines[-2:] == ["settings file: /dev/null", "ignored, as they are no settings: KVPAGE_X"]
    worker = printed(capfd, environ, "worker")[0]
    assert "adopt_within_s" in worker
    assert "port" not in worker


def test_the_run_directory_that_will_be_used_is_shown(capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVPAGE_RUN_DIR")
    monkeypatch.setattr("os.access", lambda *_, **__: False)  # of the system's folder
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/xdg")
    told = json.loads(printed(capfd, {}, "--json")[0])
    assert told["settings"]["run_dir"] == {"value": "/xdg/kvpage", "source": "default", "from": "default"}


@pytest.mark.parametrize(
    ("environ", "arguments", "faults"),
    [
        ({"KVPAGE_PORT": "x", "KVPAGE_LOG_LEVEL": "y"}, (), 2),
        ({"KVPAGE_PROT": "1"}, (), 1),
        ({"KVPAGE_DEVICES": "host,host"}, (), 1),
        ({"KVPAGE_MEMORY": "lots"}, (), 1),  # of both programs, told once
        ({"KVPAGE_GROUP": "no-such-group-here"}, ("worker",), 1),
        ({}, ("serve", "--port", "80", "--host", "0.0.0.0"), 1),
        ({"KVPAGE_CONFIG": "/nonexistent"}, (), 1),
    ],
)
def test_what_is_wrong_is_told_with_status_2(
    capfd: Capture, environ: dict[str, str], arguments: tuple[str, ...], faults: int
) -> None:
    environ = {"KVPAGE_RUN_DIR": "/r"} | environ
    out, err = printed(capfd, environ, "--check", *arguments, status=2)
    assert (out, err.count("kvpage config: ")) == ("", faults)
    _, err = printed(capfd, environ, "--json", *arguments, status=2)
    assert json.loads(err)["code"] == "spec-invalid"


def test_a_check_of_what_is_right_prints_nothing(capfd: Capture) -> None:
    assert printed(capfd, {"KVPAGE_RUN_DIR": "/r", "KVPAGE_PORT": "80"}, "--check") == ("", "")


@pytest.mark.parametrize("arguments", [("--port", "1"), ("demo",), ("serve", "--prot", "1"), ("worker", "--port", "1")])
def test_what_it_does_not_know_ends_with_a_usage_message(capfd: Capture, arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as ended:
        config_command.main(arguments, {})
    assert ended.value.code == 2
    assert "usage: kvpage" in capfd.readouterr().err


def test_the_command_reaches_it() -> None:
    done = run("config", "serve", "--port", "8123", "--json", KVPAGE_RUN_DIR="/r")
    assert json.loads(done.stdout)["settings"]["port"]["value"] == 8123, done.stderr


# --- secrets ----------------------------------------------------------------------------------------------------------

PASSWORD_URL = f"http://user:{SECRET}@127.0.0.1:1"


@pytest.mark.parametrize(
    ("environ", "arguments", "text"),
    [
        ({"KVPAGE_TOKEN": SECRET}, (), ""),
        ({"KVPAGE_TOKEN_FILE": SECRET}, (), ""),
        ({"KVPAGE_THING": SECRET}, (), ""),
        ({"KVPAGE_URL": PASSWORD_URL}, (), ""),
        ({"KVPAGE_HOST": PASSWORD_URL}, (), ""),
        ({"KVPAGE_HOST": f"user:{SECRET}@127.0.0.1"}, (), ""),
        ({"KVPAGE_MEMORY": PASSWORD_URL}, (), ""),
        ({"KVPAGE_RUN_DIR": PASSWORD_URL}, (), ""),
        ({"KVPAGE_TOKENS": SECRET}, (), ""),
        ({"KVPAGE_AUDIT_LOG": SECRET}, (), ""),
        ({"KVPAGE_PORT": SECRET}, (), ""),
        ({}, ("--port", SECRET), ""),
        ({}, ("--tls-cert-file", SECRET), ""),
        ({}, ("--tls-client-ca-file", SECRET), ""),
        ({}, (), f"log_level = '{SECRET}'"),
        ({}, (), f"tls_key_file = '-----BEGIN PRIVATE KEY-----\\n{SECRET}'"),
        ({}, ("--token", SECRET), ""),
        ({}, (f"--token={SECRET}",), ""),
        ({}, (SECRET,), ""),
        ({}, ("--token-file", SECRET), ""),
        ({}, (f"--insecure={SECRET}",), ""),
        ({}, ("--host", PASSWORD_URL), ""),
        ({}, (), f"token = '{SECRET}'"),
        ({}, (), f"token_file = '{SECRET}'"),
        ({}, (), f"token_file = {SECRET}"),
        ({}, (), f"token_file = ['{SECRET}']"),
        ({}, (), f"[token]\nvalue = '{SECRET}'"),
        ({}, (), f"host = '{PASSWORD_URL}'"),
    ],
)
def test_a_secret_in_a_wrong_place_is_in_no_output_error_or_repr(
    tmp_path: Path, capfd: Capture, environ: dict[str, str], arguments: tuple[str, ...], text: str
) -> None:
    file = tmp_path / "kvpage.toml"
    file.write_text(text)
    environ = {"KVPAGE_CONFIG": str(file), "KVPAGE_RUN_DIR": "/r"} | environ
    seen: list[str] = []

    def attempt(call: Any) -> None:
        try:
            seen.append(repr(call()))
        except (KvpageError, SystemExit) as error:
            seen.extend([str(error), repr(error)])

    for options in ((), ("--json",), ("--check",)):
        attempt(lambda options=options: config_command.main([*options, "serve", *arguments], environ))
        attempt(lambda options=options: config_command.main([*options], environ))
    attempt(lambda: from_command_line(arguments, environ))
    attempt(lambda: resolve({}, environ).ignored_variables)
    attempt(lambda: worker_commands.main(["drain", *arguments]))
    captured = capfd.readouterr()
    assert captured.out + captured.err
    seen += [captured.out, captured.err]
    assert [one for one in seen if SECRET in one] == []


def test_a_client_repeats_no_password_and_no_token() -> None:
    with Client(PASSWORD_URL, token=SECRET, timeout_s=5) as client:
        seen = [repr(client), repr(client._address)]
        with pytest.raises(KvpageError, match=re.escape("127.0.0.1:1")) as refused:
            client.pools()
        seen += [str(refused.value), repr(refused.value.details)]
    for url in (f"user:{SECRET}@h", f"http://user:{SECRET}@", f"http://u:{SECRET}@h:99999", f"http://u:{SECRET}/@h"):
        with pytest.raises(KvpageError) as refused:
            Client(url)
        seen += [str(refused.value), repr(refused.value.details)]
    with pytest.raises(KvpageError) as refused:
        read_token(Path(SECRET))
    assert [one for one in [*seen, str(refused.value)] if SECRET in one] == []


def test_the_look_for_secrets_fires(capfd: Capture) -> None:
    printed(capfd, {"KVPAGE_RUN_DIR": f"/{SECRET}"})
    config_command.main([], {"KVPAGE_RUN_DIR": f"/{SECRET}", "KVPAGE_CONFIG": "/dev/null"})
    assert SECRET in capfd.readouterr().out
