"""A model's config, read field by field: what is missing, of a wrong type or absurd is refused with its JSON pointer.

A field that is left out takes the default of the family's published config class, and only that; each default taken
is noted, so that nothing is assumed in silence. `null` is not the same as left out: it says "none".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self, TypeVar

from kvpage.errors import FieldError, SpecInvalid, shorten
from kvpage.strict_json import pointer

T = TypeVar("T")

MAX_SIZE = 1 << 18  # heads, widths, kernel lengths: the widest public model has a hidden size of 18,432
MAX_TOKENS = 1 << 40  # windows and context lengths
MAX_MODEL_LAYERS = 512  # the deepest public model has 162; a layer may keep several caches
MAX_MTP_LAYERS = 16  # lists with one entry for each layer may go on for layers that predict further tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One object of a config."""

    values: Mapping[str, object]
    at: str
    """JSON pointer of this object in what the caller sent."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    defaults_of: str = ""
    """The config class, and its release, that the defaults are from."""
    notes: dict[str, None] = field(default_factory=dict)
    """Sentences about what was assumed, in order; shared by all parts of one config."""
    places: Mapping[str, str] = field(default_factory=dict)
    """JSON pointers, below this object, of fields that do not lie in it itself."""

    def with_defaults(self, defaults: Mapping[str, object], defaults_of: str) -> Self:
        return replace(self, defaults=defaults, defaults_of=defaults_of)

    def note(self, sentence: str) -> None:
        self.notes[sentence] = None

    def with_own(self, own: Config) -> Self:
        """With the fields of `own`, a part of this object, in the place of its own."""
        step = own.at.removeprefix(self.at)
        places = {name: step + pointer(name) for name in own.values}
        return replace(self, values={**self.values, **own.values}, places=places)

    def where(self, name: str) -> str:
        """The JSON pointer of field `name`."""
        return self.at + self.places.get(name, pointer(name))

    def fault(self, name: str, detail: str) -> SpecInvalid:
        """The error to raise for field `name`; with an empty name, for this object."""
        where = self.where(name) if name else self.at
        return SpecInvalid(f"{where or 'the config'}: {detail}", errors=[FieldError(where, detail)])

    def has(self, name: str) -> bool:
        """True when the field is there and not null; a default does not count."""
        return self.values.get(name) is not None

    def find(self, name: str) -> object:
        """The field as it stands, else its default, else None."""
        if name in self.values or self.defaults.get(name) is None:
            return self.values.get(name)
        self.note(f"{self.at}/{name} is left out: {self.defaults[name]!r}, the default of {self.defaults_of}")
        return self.defaults[name]

    def size(self, name: str, *, limit: int = MAX_SIZE) -> int:
        """A whole number from 1 to `limit`."""
        value = self.optional_size(name, limit=limit)
        if value is None:
            raise self.missing(name)
        return value

    def optional_size(self, name: str, *, limit: int = MAX_SIZE, least: int = 1) -> int | None:
        """The same, or None where the field is null, or left out and without a default."""
        value = self.find(name)
        return None if value is None else self.checked_size(name, value, limit=limit, least=least)

    def checked_size(self, name: str, value: object, *, limit: int = MAX_SIZE, least: int = 1) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fault(name, f"this must be a whole number, not {shown(value)}")
        if not least <= value <= limit:
            raise self.fault(name, f"this must be {least} to {limit}, not {shown(value)}")
        return value

    def flag(self, name: str) -> bool:
        """True or false; null and left out without a default are false."""
        value = self.find(name)
        if value is not None and not isinstance(value, bool):
            raise self.fault(name, f"this must be true or false, not {shown(value)}")
        return bool(value)

    def text(self, name: str) -> str | None:
        value = self.find(name)
        if value is not None and not isinstance(value, str):
            raise self.fault(name, f"this must be a string, not {shown(value)}")
        return value

    def child(self, name: str) -> Config | None:
        """The object in field `name`, without defaults; None where it is null or left out."""
        value = self.values.get(name)
        return None if value is None else self.as_child(pointer(name), value)

    def required_child(self, name: str) -> Config:
        found = self.child(name)
        if found is None:
            raise self.missing(name)
        return found

    def as_child(self, step: str, value: object) -> Config:
        """`value`, found `step` (a JSON pointer) below this object, as an object."""
        inner = Config(values={}, at=self.at + step, notes=self.notes)
        if not isinstance(value, Mapping):
            raise inner.fault("", f"this must be an object, not {shown(value)}")
        return replace(inner, values=value)

    def items(self, name: str, length: int | None = None, *, extra: int = 0) -> Sequence[object] | None:
        """An array, of `length` to `length + extra` entries where that is given; None where it is null or left out."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple):
            raise self.fault(name, f"this must be an array, not {shown(value)}")
        if length is not None and not length <= len(value) <= length + extra:
            wanted = f"{length}" + (f" to {length + extra}" if extra else "")
            raise self.fault(name, f"this has {len(value)} entries; {wanted} are needed, one for each layer")
        return value

    def choices(self, name: str, known: Mapping[str, T], length: int, *, extra: int = 0) -> tuple[T, ...] | None:
        """An array of `length` strings, each translated by `known`; what is beyond `length` is left out."""
        items = self.items(name, length, extra=extra)
        if items is None:
            return None
        return tuple(self._chosen(name, index, item, known) for index, item in enumerate(items[:length]))

    def _chosen(self, name: str, index: int, item: object, known: Mapping[str, T]) -> T:
        if not isinstance(item, str) or item not in known:
            raise self.fault_at(name, index, f"this must be one of {', '.join(known)}, not {shown(item)}")
        return known[item]

    def fault_at(self, name: str, index: int, detail: str) -> SpecInvalid:
        """The error to raise for one entry of an array."""
        where = self.at + pointer(name, index)
        return SpecInvalid(f"{where}: {detail}", errors=[FieldError(where, detail)])

    def missing(self, name: str) -> SpecInvalid:
        published = f"{self.defaults_of} has no default for it" if self.defaults_of else "it has no default"
        return self.fault(name, f"this field is required; {published}")


def shown(value: object) -> str:
    """`value` in an error: short, in words of JSON, numbers of many digits by their length."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list | tuple):
        return "an array"
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    return shorten(repr(value))
