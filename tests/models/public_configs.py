"""The excerpts of public configs, and sums over layers that do not use the library's formulas."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

from support.checkout import ROOT

Json = dict[str, Any]
CONFIGS: dict[str, Json] = json.loads((ROOT / "tests" / "data" / "models" / "configs.json").read_text())["configs"]
ITEM_BYTES = {"uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "bfloat16": 2, "float16": 2, "float32": 4}
LATENT = ("mla_attention", "sliding_window_mla")


def config(name: str, **changes: Any) -> Json:
    """A copy that a test may change."""
    return copy.deepcopy(CONFIGS[name]) | changes


def kinds(layers: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    return dict(Counter(layer["kind"] for layer in layers))


def token_bytes(layer: Mapping[str, Any]) -> int:
    """Bytes that one token needs in an unquantised attention layer with a cache of its own."""
    if layer["kind"] == "mamba" or "kv_sharing_target" in layer:
        return 0
    values = layer["head_size"]
    if layer["kind"] not in LATENT:
        values += layer.get("head_size_v", layer["head_size"])
    return int(layer.get("num_kv_heads", 1) * values * ITEM_BYTES[layer["dtype"]] // layer.get("compress_ratio", 1))


def state_bytes(layer: Mapping[str, Any]) -> int:
    if layer["kind"] != "mamba":
        return 0
    return sum(prod(shape) * ITEM_BYTES[dtype] for shape, dtype in zip(layer["shapes"], layer["dtypes"], strict=True))
