"""Whose certificates a client takes for a server's."""

from __future__ import annotations

import ssl

from kvpage.errors import SpecInvalid, shorten

TLS_HINT = "; if it serves TLS, its address begins with https://"
"""For who speaks in the clear to what ends the connection: TLS says nothing to it."""


def not_secured(place: str, reason: object) -> str:
    """What to do when the two sides did not agree on who the server is."""
    return (
        f"the connection to {place} was not secured: {shorten(str(reason))}; name who signed the server's certificate"
        " with --ca-file (ca_file= in Python) or KVPAGE_CA_FILE, and call the server as the certificate does"
    )


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
