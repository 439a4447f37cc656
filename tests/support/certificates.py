"""Certificates for TLS on this machine, made by the `openssl` program in a moment."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

SERVER_NAMES = "subjectAltName=IP:127.0.0.1,DNS:localhost"
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="the program openssl is not installed")


@dataclass(frozen=True, slots=True)
class Certificate:
    cert: Path
    key: Path


class Authority:
    """Signs whatever it is asked to."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._own = Certificate(folder / f"{name}.pem", folder / f"{name}.key")
        subject = ["-subj", f"/CN={name}", "-addext", "basicConstraints=critical,CA:TRUE"]
        _openssl("req", "-x509", *_new_key(self._own.key), *subject, "-days", "2", "-out", str(self._own.cert))

    @property
    def ca_file(self) -> Path:
        return self._own.cert

    def sign(self, name: str, extension: str = SERVER_NAMES) -> Certificate:
        """A new certificate and key, in place of those of that name before."""
        made = Certificate(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        signer = ["-CA", str(self._own.cert), "-CAkey", str(self._own.key)]
        subject = ["-subj", f"/CN={name}", "-addext", extension]
        _openssl("req", "-x509", *signer, *_new_key(made.key), *subject, "-days", "2", "-out", str(made.cert))
        return made

    def client_context(self, certificate: Certificate | None = None) -> ssl.SSLContext:
        """Of a client that trusts this authority, and shows the certificate."""
        context = ssl.create_default_context(cafile=self.ca_file)
        if certificate is not None:
            context.load_cert_chain(certificate.cert, certificate.key)
        return context


def _new_key(path: Path) -> list[str]:
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    return ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc", "-keyout", str(path)]


def _openssl(*arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
