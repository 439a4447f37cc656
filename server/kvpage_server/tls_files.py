"""The certificate that is shown over TLS, and whose certificates clients must show; replaced while the server runs."""

from __future__ import annotations

import logging
import os
import ssl
from dataclasses import dataclass
from pathlib import Path

from kvpage.errors import SpecInvalid, shorten
from kvpage_server.watched_file import FileState, read_private, read_public

MAX_FILE_BYTES = 1 << 20
logger = logging.getLogger("kvpage.api")


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    cert: Path
    key: Path
    client_ca: Path | None
    """Whose certificates clients must show; None: none need to."""

    def states(self) -> list[FileState]:
        return [FileState.of(path) for path in (self.cert, self.key, self.client_ca) if path is not None]

    def context(self) -> ssl.SSLContext:
        """TLS 1.2 or newer. Raises `SpecInvalid` naming the file that cannot be used."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        self._check_files()
        try:
            context.load_cert_chain(self.cert, self.key, password="")  # never ask a terminal for one
        except (OSError, ValueError) as error:
            raise _unusable(f"the certificate {_named(self.cert)} with the key {_named(self.key)}", error) from error
        if self.client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            try:
                context.load_verify_locations(self.client_ca)
            except (OSError, ValueError) as error:
                raise _unusable(f"the client CA {_named(self.client_ca)}", error) from error
        return context

    def _check_files(self) -> None:
        """OpenSSL opens them by name, and would wait for whoever writes to a pipe, or read without an end."""
        read_private(self.key, "the private key", MAX_FILE_BYTES)
        read_public(self.cert, "the certificate", MAX_FILE_BYTES)
        if self.client_ca is not None:
            read_public(self.client_ca, "the client CA", MAX_FILE_BYTES)


class TlsContext:
    """The one there is now: changed files count for the next connection. Faulty ones change nothing but the log."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._states = files.states()
        self._context = files.context()

    def current(self) -> ssl.SSLContext:
        states = self._files.states()
        if states != self._states:
            self._states = states
            try:
                self._context = self._files.context()
            except SpecInvalid as error:
                logger.error("the certificate before stays in use: %s", error)
            else:
                logger.info("read the certificate %s again", self._files.cert)
        return self._context


def _unusable(what: str, error: Exception) -> SpecInvalid:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    if "PEM lib" in reason:  # all that OpenSSL says of a file of another kind
        reason = "what is expected as PEM is not there"
    return SpecInvalid(f"{what} cannot be used: {shorten(reason)}; certificates and keys are read as PEM")


def _named(path: Path) -> str:
    return shorten(os.fspath(path))
