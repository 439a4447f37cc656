"""Whose certificates a client takes for a server's."""

from __future__ import annotations

import ssl

from kvpage.errors import SpecInvalid, shorten


def server_trust(ca_file: str | None) -> ssl.SSLContext | bool:
    """What httpx verifies by: the authorities in a file (PEM), or without one those it comes with.

    Raises `SpecInvalid` naming a file that cannot be used.
    """
    if ca_file is None:
        return True
    return context_of(ca_file)


def context_of(ca_file: str) -> ssl.SSLContext:
    """Raises `SpecInvalid` naming a file that cannot be used."""
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise SpecInvalid(
            f"the CA file {shorten(ca_file)} cannot be used: {shorten(reason)}; it holds certificates as PEM"
        ) from error
