"""Where settings come from, strongest first: flags, `KVPAGE_*` variables, a TOML file, defaults."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import TypeAdapter, ValidationError
from pydantic_settings import EnvSettingsSource, InitSettingsSource

from kvpage.errors import SpecInvalid, nearest, shorten
from kvpage_server.ordinary_file import open_ordinary
from kvpage_server.setting_fields import ENV_PREFIX, Fields, WrongPart, flag_of, setting_of, variable_of
from kvpage_server.shown_settings import has_password, may_be_secret, shown

SYSTEM_FILE = Path("/etc/kvpage/kvpage.toml")
CONFIG_VARIABLE = "KVPAGE_CONFIG"
MAX_FILE_BYTES, MAX_LINE_CHARS = 64 << 10, 4096
"""A key of many dots takes the parser as many steps squared: so lines have a limit too."""
OTHER_VARIABLES = frozenset({"config", "url", "worker_of_server"})
"""Variables of kvpage that are no settings of a server: without their prefix, in lower case."""

SourceName = Literal["flag", "variable", "file", "default"]
_MISSPELT = 0.75
_OF_A_SERVICE = re.compile(r"(^|_)(service_(host|port(_\w+)?)|port_\d+_(tcp|udp|sctp)(_(addr|port|proto))?)$")
_KUBERNETES = re.compile(r"(tcp|udp|sctp)://\S+:\d+")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from."""

    source: SourceName
    place: str = ""
    """The flag, the variable, or `path:line`."""

    def __str__(self) -> str:
        return self.place or self.source


DEFAULT = Origin("default")


@dataclass(frozen=True, slots=True)
class Resolved:
    """Values that hold, and where each came from."""

    fields: Fields
    origins: Mapping[str, Origin]
    file: Path | None
    """The file that was read."""
    ignored_variables: tuple[str, ...]
    """`KVPAGE_*` variables that are no setting and look like none."""

    def with_device(self, device: str) -> Resolved:
        """The same with `device` where none is named."""
        if self.fields.device is not None:
            return self
        return replace(self, fields=self.fields.model_copy(update={"device": device}))


class _Environment(EnvSettingsSource):
    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        super().__init__(Fields)

    def _load_env_vars(self) -> Mapping[str, str | None]:
        """Only names in capitals, as the system spells them; an empty variable is one that is not set."""
        return {name.lower(): value for name, value in self._environ.items() if _is_ours(name) and value}


def resolve(flags: Mapping[str, Any], environ: Mapping[str, str], *, system_file: Path = SYSTEM_FILE) -> Resolved:
    """Raises `SpecInvalid`, which names every fault with its source. `flags`: those given, `config` among them."""
    flags = dict(flags)
    file = _file_of(flags.pop("config", None), environ, system_file)
    from_file, text = ({}, "") if file is None else _read(file)
    ignored = _check_variables(environ)
    layers = (
        ("flag", InitSettingsSource(Fields, flags)()),
        ("variable", _Environment(environ)()),
        ("file", InitSettingsSource(Fields, from_file)()),
    )
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    for source, layer in layers:
        for name, value in layer.items():
            if name not in values:
                values[name] = value
                origins[name] = Origin(source, _place(source, name, file, text))  # type: ignore[arg-type]
    return Resolved(_validated(values, origins), origins, file, ignored)


def _validated(values: Mapping[str, Any], origins: Mapping[str, Origin]) -> Fields:
    try:
        fields = Fields(**values)
    except ValidationError as error:
        parts = _wrong_parts(error)
        raise _refusal([_fault(name, values[name], origins[name], part) for name, part in parts.items()]) from None
    secrets = [name for name, value in values.items() if may_be_secret(name, value) or has_password(value)]
    if secrets:
        raise _refusal([_fault(name, values[name], origins[name]) for name in secrets])
    return fields


def _wrong_parts(error: ValidationError) -> dict[str, str]:
    """By setting: what of its value is wrong; nothing where that is all of it."""
    parts: dict[str, str] = {}
    for fault in error.errors(include_url=False):
        cause = fault.get("ctx", {}).get("error")
        parts.setdefault(str((*fault["loc"], "")[0]), f": {cause}" if isinstance(cause, WrongPart) else "")
    return parts


def _fault(name: str, value: object, origin: Origin, part: str = "") -> str:
    where = f"{name} in {origin.place}" if origin.source == "file" else origin.place
    hint = ""
    if isinstance(value, str) and _KUBERNETES.fullmatch(value):
        hint = " (Kubernetes sets this variable for a Service of that name: say enableServiceLinks: false in the pod)"
    return f"{where} is {shown(name, value)}{part}; it takes {setting_of(name).takes}{hint}"


def _refusal(faults: list[str]) -> SpecInvalid:
    return SpecInvalid("\n".join(faults))


def _file_of(flag: str | None, environ: Mapping[str, str], system_file: Path) -> Path | None:
    chosen = flag or environ.get(CONFIG_VARIABLE)
    if chosen:
        return Path(chosen)
    return system_file if _exists(system_file) else None


def _exists(path: Path) -> bool:
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True  # reading it says what is wrong
    return True


def _read(path: Path) -> tuple[dict[str, Any], str]:
    """The checked values of the file, and its text."""
    try:
        with open_ordinary(path) as file:
            content = file.read(MAX_FILE_BYTES + 1)
        text = content.decode("utf-8-sig")  # with the mark that editors of Windows begin files with
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise SpecInvalid(
            f"the settings file {shorten(str(path))} cannot be read: {reason}; name another with --config or"
            f" {CONFIG_VARIABLE}, or /dev/null for none"
        ) from None
    if len(content) > MAX_FILE_BYTES:
        raise SpecInvalid(f"the settings file {shorten(str(path))} is longer than {MAX_FILE_BYTES} bytes")
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > MAX_LINE_CHARS:
            raise SpecInvalid(
                f"{shorten(str(path))}:{number} has {len(line)} characters; a line may have {MAX_LINE_CHARS}, so begin"
                " a new one between the elements of a list"
            )
    values, faults = _parsed(path, text)
    if faults:
        raise _refusal(faults)
    return values, text


def _parsed(path: Path, text: str) -> tuple[dict[str, Any], list[str]]:
    """The values, and what is wrong with them."""
    try:
        values = tomllib.loads(text)
        return values, [fault for name, value in values.items() if (fault := _file_fault(name, value, path, text))]
    except tomllib.TOMLDecodeError as error:
        raise SpecInvalid(f"the settings file {shorten(str(path))} is not TOML: {shorten(str(error))}") from None
    except (ValueError, RecursionError):  # Python writes and reads no integers of over 4300 digits
        raise SpecInvalid(
            f"the settings file {shorten(str(path))} has a number with too many digits, or values too deep within"
            " others, to be read; no setting takes such"
        ) from None


def _file_fault(name: str, value: object, path: Path, text: str) -> str | None:
    """What is wrong with an entry of the file, whose types are strict: "8080" is no number."""
    place = _place("file", name, path, text)
    if name not in Fields.model_fields:
        table = "; the file has no tables, all settings stand at its top" if isinstance(value, dict) else ""
        return f"{shorten(name)} in {place} is no setting{nearest(name, Fields.model_fields)}{table}"
    field = Fields.model_fields[name]
    kind: Any = Annotated[(field.annotation, *field.metadata)]
    try:
        TypeAdapter(kind).validate_json(json.dumps(value, default=str), strict=True)
    except ValidationError as error:
        return _fault(name, value, Origin("file", place), next(iter(_wrong_parts(error).values())))
    return None


def _place(source: str, name: str, file: Path | None, text: str) -> str:
    if source == "flag":
        return flag_of(name)
    if source == "variable":
        return variable_of(name)
    return f"{shorten(str(file))}:{_line_of(name, text)}"


def _line_of(name: str, text: str) -> int:
    """Where `name` is set; 1 when it cannot be seen at once."""
    found = re.search(rf"^[ \t\[]*[\"']?{re.escape(name)}[\"']?[ \t]*[=.\]]", text, re.MULTILINE)
    return 1 if found is None else text.count("\n", 0, found.start()) + 1


def _is_ours(name: str) -> bool:
    return name.startswith(ENV_PREFIX) and name.isupper()


def _check_variables(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Names of `KVPAGE_*` variables that mean nothing to a server. Raises `SpecInvalid` for what looks misspelt."""
    from difflib import get_close_matches

    ignored, faults = [], []
    known = [*Fields.model_fields, *OTHER_VARIABLES]
    for variable in sorted(filter(_is_ours, environ)):
        name = variable.removeprefix(ENV_PREFIX).lower()
        if name in known:
            continue
        begun = [
            other
            for other in known
            if len(name) > 3 and (other.startswith(name.removesuffix("s")) or name.startswith(other + "_"))
        ]
        meant = begun or get_close_matches(name, known, n=1, cutoff=_MISSPELT)
        if meant and not _is_of_kubernetes(name, environ[variable]):
            faults.append(
                f"{shorten(variable)} is no setting; did you mean {variable_of(meant[0])}? If it is somebody else's,"
                " unset it for kvpage"
            )
        ignored.append(variable)
    if faults:
        raise _refusal(faults)
    return tuple(ignored)


def _is_of_kubernetes(name: str, value: str) -> bool:
    """Whether Kubernetes makes such a variable for a Service called kvpage, or kvpage-something."""
    return bool(_KUBERNETES.fullmatch(value) or _OF_A_SERVICE.search(name))
