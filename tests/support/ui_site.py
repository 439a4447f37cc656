"""A service whose web page is under test."""

from __future__ import annotations

from dataclasses import dataclass

from support.api_service import ApiService

TOKEN = "a-token-that-may-only-read"


@dataclass(frozen=True, slots=True)
class Site:
    service: ApiService
    run_dir: str

    @property
    def origin(self) -> str:
        return self.service.url.rstrip("/")
