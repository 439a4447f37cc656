"""Every setting of `kvpage serve` and `kvpage worker`: its type, default, flag and meaning, once for all sources."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from kvpage.errors import shorten
from kvpage.memory.device_names import is_cuda_name
from kvpage_server.settings import (
    DEFAULT_ADOPT_WITHIN_S,
    DEFAULT_HOST,
    DEFAULT_RATE_LIMIT_PER_S,
    LogFormat,
    LogLevel,
)
from kvpage_server.worker_budget import parse_memory

Program = Literal["serve", "worker"]
ENV_PREFIX = "KVPAGE_"


@dataclass(frozen=True, slots=True)
class Setting:
    """What a setting has beside its type: how it is typed, and who takes it."""

    takes: str
    """What a value can be, in words; ends the sentence "it takes …"."""
    metavar: str = ""
    flag: str = ""
    """Without it the flag is the name with dashes."""
    programs: tuple[Program, ...] = ("serve",)
    may_hold_a_token: bool = False
    """Whether people put a secret here by mistake; then a value that names no file is not repeated."""


def _split(value: object) -> object:
    """A variable has all devices in one text, and TOML has a list, which for strict types is no tuple."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(","))
    return tuple(value) if isinstance(value, list) else value


def _plain_number(value: object) -> object:
    """Of the texts that pydantic takes for numbers, those that a file could have as numbers, such as no `1_000`."""
    if isinstance(value, str) and not _NUMBER.fullmatch(value):
        raise ValueError("it is no number")
    return value


def _as_text(value: object) -> object:
    """TOML has numbers for what the command line has as text: `memory = 0.5`, `group = 1000`."""
    return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


class WrongPart(ValueError):
    """Says what of a value is wrong, where that is not all of it."""


def _checked_memory(text: str) -> str:
    parse_memory(text)
    return text


def _checked_device(name: str) -> str:
    _checked_devices((name,))
    return name


def _checked_devices(names: tuple[str, ...]) -> tuple[str, ...]:
    faults = [f"{shorten(repr(name))} is none" for name in names if name != "host" and not is_cuda_name(name)]
    faults += [f"{shorten(repr(name))} is named twice" for name in dict.fromkeys(names) if names.count(name) > 1]
    if faults or not names:
        raise WrongPart(", ".join(faults) or "none is named")
    return names


_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?")
BOTH: tuple[Program, ...] = ("serve", "worker")
Devices = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split), AfterValidator(_checked_devices)]
Device = Annotated[str, AfterValidator(_checked_device)]
Memory = Annotated[str, BeforeValidator(_as_text), AfterValidator(_checked_memory)]
Group = Annotated[str, BeforeValidator(_as_text)]
SIZE = "bytes such as 8GiB, or a share of what is available such as 0.5"
FILE = "the path of a file"
YES_OR_NO = "true or false"


class Fields(BaseSettings):
    """All settings. Constructing it validates and reads no source: `setting_sources` does, to know which gave what."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True, hide_input_in_errors=True)

    run_dir: Annotated[Path | None, Setting("the path of a folder", "DIR", programs=BOTH)] = Field(
        default=None,
        description="Folder of sockets and logs; without it the first that can be used, see docs/operations.md.",
    )
    devices: Annotated[Devices, Setting("host, cuda:N or a GPU UUID, each once", "NAME", "--device")] = Field(
        default=("host",), description="Devices to serve. The flag is repeated; the variable separates them by commas."
    )
    device: Annotated[Device | None, Setting("host, cuda:N, or a GPU or MIG UUID", "NAME", "--device", ("worker",))] = (
        Field(default=None, description="The one device of `kvpage worker`, which must have it from somewhere.")
    )
    memory: Annotated[Memory | None, Setting(SIZE, "BYTES|SHARE", programs=BOTH)] = Field(
        default=None, description="Budget of each worker; without it half of what is available, or what it had before."
    )
    group: Annotated[Group | None, Setting("a Unix group by name or number", "GROUP", programs=BOTH)] = Field(
        default=None, description="Unix group whose members may connect to the sockets."
    )
    external_workers: Annotated[bool, Setting(YES_OR_NO)] = Field(
        default=False, description="Something else starts and ends the workers (an init system)."
    )
    leave_workers: Annotated[bool, Setting(YES_OR_NO)] = Field(
        default=False, description="Workers go on when the server ends."
    )
    adopt_within_s: Annotated[
        float,
        BeforeValidator(_plain_number),
        Setting("seconds from 0 to 3600", "SECONDS", "--adopt-within", programs=BOTH),
    ] = Field(
        default=DEFAULT_ADOPT_WITHIN_S,
        ge=0,
        le=3600,
        description="How long clients wait for the pools of a worker that died to be handed over.",
    )
    host: Annotated[str, Setting("an address or name of this machine", "ADDRESS")] = Field(
        default=DEFAULT_HOST, pattern=r"^[^\s/@]+$", description="TCP address to listen on."
    )
    port: Annotated[
        int | None, BeforeValidator(_plain_number), Setting("a number from 0 to 65535, 0 for any free port", "PORT")
    ] = Field(default=None, ge=0, le=65535, description="TCP port; without it only the Unix socket is served.")
    token_file: Annotated[Path | None, Setting(FILE, "FILE", may_hold_a_token=True)] = Field(
        default=None, description="File with the bearer tokens that are taken over TCP."
    )
    tls_cert_file: Annotated[Path | None, Setting(FILE, "FILE", may_hold_a_token=True)] = Field(
        default=None, description="Certificate chain (PEM) to serve TLS with."
    )
    tls_key_file: Annotated[Path | None, Setting(FILE, "FILE", may_hold_a_token=True)] = Field(
        default=None, description="Private key (PEM) of the certificate."
    )
    tls_client_ca_file: Annotated[Path | None, Setting(FILE, "FILE", may_hold_a_token=True)] = Field(
        default=None, description="Certificates (PEM) by which clients must prove who they are."
    )
    insecure: Annotated[bool, Setting(YES_OR_NO)] = Field(
        default=False, description="Serve an address that other machines reach without TLS."
    )
    fleet: Annotated[str | None, Setting("auto, or host:port of a Ray cluster", "ADDRESS")] = Field(
        default=None, min_length=1, description="Ray cluster whose fleet this server is the head of (docs/fleet.md)."
    )
    audit_log: Annotated[Path | None, Setting(FILE, "FILE")] = Field(
        default=None, description="File to which every change, with who made it, is appended."
    )
    rate_limit_per_s: Annotated[
        float, BeforeValidator(_plain_number), Setting("a number from 0.001 to 1000000", "NUMBER", "--rate-limit")
    ] = Field(
        default=DEFAULT_RATE_LIMIT_PER_S,
        ge=0.001,
        le=1_000_000,
        description="Requests a second that change something, with each token over TCP.",
    )
    log_format: Annotated[LogFormat, Setting("auto, json or text", "FORMAT")] = Field(
        default="auto", description="Lines of the log; auto is text on a terminal, else JSON."
    )
    log_level: Annotated[LogLevel, Setting("debug, info, warning or error", "LEVEL")] = Field(
        default="info", description="Least important lines that are logged; debug has one for each request."
    )

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)


def setting_of(name: str) -> Setting:
    return next(part for part in Fields.model_fields[name].metadata if isinstance(part, Setting))


def flag_of(name: str) -> str:
    return setting_of(name).flag or "--" + name.replace("_", "-")


def variable_of(name: str) -> str:
    return ENV_PREFIX + name.upper()


def is_switch(name: str) -> bool:
    return Fields.model_fields[name].annotation is bool


def fields_of(program: Program) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in Fields.model_fields.items():
        if program in setting_of(name).programs:
            yield name, field
