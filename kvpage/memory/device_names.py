"""The two names of a GPU or MIG instance: `cuda:N`, as one process numbers it, and its UUID."""

from __future__ import annotations

import re

from kvpage.errors import SpecInvalid, shorten

_NUMBERED = re.compile(r"cuda:([0-9]{1,4})")
_UUID = re.compile(r"(?:GPU-|MIG-)?([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})", re.IGNORECASE)


def is_device_uuid(text: str) -> bool:
    return _UUID.fullmatch(text) is not None


def device_number(text: str) -> int | None:
    """N of `cuda:N`; None for any other name."""
    numbered = _NUMBERED.fullmatch(text)
    return None if numbered is None else int(numbered[1])


def same_device(one: str, other: str) -> bool:
    """Whether two UUIDs name one device, with or without `GPU-` or `MIG-`, in capitals or not."""
    parts = _UUID.fullmatch(one), _UUID.fullmatch(other)
    return parts[0] is not None and parts[1] is not None and parts[0][1].lower() == parts[1][1].lower()


def names_device(text: str, *, uuid: str, number: int | None) -> bool:
    """Whether `text` means the device of this UUID, or of this number where the number was given."""
    return same_device(text, uuid) or (number is not None and device_number(text) == number)


def is_cuda_name(text: str) -> bool:
    return device_number(text) is not None or is_device_uuid(text)


def check_device_name(wanted: str) -> None:
    """Raises `SpecInvalid` for what no device of this kind is called."""
    if not is_cuda_name(wanted):
        raise SpecInvalid(
            f"device {shorten(repr(wanted))} is no name of a device; use host, cuda:<number>, or a GPU or MIG UUID"
        )
