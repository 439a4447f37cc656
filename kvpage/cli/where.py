"""Which service a command talks to: what was typed, else the environment. Needs the standard library only."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvpage.errors import SpecInvalid
from kvpage.token_file import read_token

URL_VARIABLE, TOKEN_FILE_VARIABLE, CA_FILE_VARIABLE = "KVPAGE_URL", "KVPAGE_TOKEN_FILE", "KVPAGE_CA_FILE"
_TEXTS = ("url", "run_dir", "ca_file")


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    url: str | None
    """None for the socket in the run directory."""
    run_dir: str | None
    token_file: Path | None
    ca_file: str | None = None
    """Authorities whose certificate an https server must show; None: those that are commonly known."""

    @classmethod
    def of(cls, typed: Mapping[str, str | Path | None], environ: Mapping[str, str] = os.environ) -> Where:
        """`typed`: `url`, `run_dir`, `token_file` and `ca_file`. A run directory that was typed goes before
        a URL that was not.

        Raises `SpecInvalid` for two places.
        """
        url, run_dir, ca_file = (None if typed.get(name) is None else str(typed[name]) for name in _TEXTS)
        if url is not None and run_dir is not None:
            raise SpecInvalid("--url and --run-dir name two services; give one of the two")
        if url is None and run_dir is None:
            url = environ.get(URL_VARIABLE) or None
        token_file = typed["token_file"] or environ.get(TOKEN_FILE_VARIABLE) or None
        return cls(
            url=url,
            run_dir=run_dir,
            token_file=None if token_file is None else Path(token_file),
            ca_file=ca_file or environ.get(CA_FILE_VARIABLE) or None,
        )

    def token(self) -> str | None:
        """Read now. The socket in the run directory needs none: the kernel says who asks. Raises `SpecInvalid`."""
        return None if self.url is None or self.token_file is None else read_token(self.token_file)
