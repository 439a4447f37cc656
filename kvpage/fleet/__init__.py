"""Several machines: one plan for the ranks on all of them, reserved everywhere or nowhere (docs/fleet.md).

`kvpage.fleet.attach` is for engines, and needs neither Ray nor the network.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpage.fleet.attach import attach as attach

__all__ = ["attach"]  # provided by __getattr__


def __getattr__(name: str) -> Any:
    if name != "attach":
        raise AttributeError(f"module 'kvpage.fleet' has no attribute {name!r}")
    value = import_module("kvpage.fleet.attach").attach
    globals()[name] = value
    return value
