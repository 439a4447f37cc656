"""What both sides of the store agree on."""

from __future__ import annotations

import os
import secrets

GROUP = 0
"""A store has the blocks of one group."""
MAKING_S = 600.0
"""Committing memory takes a worker about 0.3 s for each GiB."""
PATIENCE_S = 5.0
"""For the worker of the store; after that the engine goes on without it for a while."""
PAUSE_S = 10.0
"""How long it is left alone then: each question could take `PATIENCE_S`."""


def lease_name(role: str) -> str:
    return f"vllm-{role}-{os.getpid()}-{secrets.token_hex(4)}"
