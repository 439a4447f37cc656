"""vLLM 0.24 to 0.33: what its engine says of a model's caches, as the layers of a plan request; and, for 0.31
and 0.32, a connector by which the engine keeps its cache in a pool (docs/vllm.md)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvpage.integrations.vllm.importing import layers_from_specs as layers_from_specs

if TYPE_CHECKING:
    from kvpage.integrations.vllm.connector import KvpageConnector as KvpageConnector


def __getattr__(name: str) -> Any:
    """vLLM asks for its connector by name; nobody else loads vLLM and torch."""
    if name != "KvpageConnector":
        raise AttributeError(f"module 'kvpage.integrations.vllm' has no attribute {name!r}")
    return import_module("kvpage.integrations.vllm.connector").KvpageConnector
