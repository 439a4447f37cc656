"""Attention layouts as plain dicts, for the oracles: from tests/data/backends.json or written out in a request."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from planner.rows import ITEM_SIZE_BYTES, is_latent, row_bytes, stored_rows

Json = dict[str, Any]

DATA = Path(__file__).resolve().parent.parent / "data"
BACKENDS: Json = json.loads((DATA / "backends.json").read_text())["backends"]
STATE_LAYOUT: Json = {
    "shape": ["num_blocks"],
    "order": [0],
    "layered": None,
    "named": None,
    "reads_stride": False,
    "kernel_block_sizes": [],
}
NAMED = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


def resolve(layer: Json, kv_cache_layout: str) -> Json:
    """`shape` (symbols), `order` (logical axis at each physical position) and what follows from them."""
    if "backend" not in layer:
        return STATE_LAYOUT
    backend = layer["backend"]
    named = backend if backend in NAMED else None
    if named:
        backend = written_out(named, layer)
    elif isinstance(backend, str):
        backend = {key: pick(value, kv_cache_layout) for key, value in BACKENDS[backend].items()}
        special = {"nvfp4": "shape_nvfp4", "fp8_ds_mla": "shape_fp8_ds_mla", None: "shape"}
        backend["shape_fp8_ds_mla"] = [*backend["shape"][:-1], "row_size"]
        backend["shape"] = backend[special.get(layer.get("kv_quant"), "shape_int8_per_token_head")]
    shape, order, layered = backend["shape"], backend.get("stride_order"), backend.get("layered_stride_order")
    return {
        "shape": shape,
        "order": order or list(range(len(shape))),
        "layered": layered,
        "named": named,
        "reads_stride": bool(order and layered and len(layered) == len(order) + 1 and layered[0] != 0),
        "kernel_block_sizes": layer.get("kernel_block_sizes") or backend.get("kernel_block_sizes") or [],
    }


def written_out(name: str, layer: Json) -> Json:
    """A named layout: letters for layers, blocks, heads, tokens and content, outermost first."""
    content = "row_size" if is_latent(layer) else "row_size + row_size_v"
    return {
        "shape": ["num_blocks", "num_kv_heads", "block_size", content],
        "stride_order": ["BHNC".index(letter) for letter in name if letter != "L"],
        "layered_stride_order": ["LBHNC".index(letter) for letter in name],
    }


def sharing_of_blocks(layer: Json) -> str:
    """How the layout wants layers to share memory: by regions, packed in each block, or interleaved in it."""
    name = layer["layout"]["named"] or "L"
    return "regions" if name[0] == "L" else "packed" if name[1] == "L" else "interleaved"


def pick(value: Any, kv_cache_layout: str) -> Any:
    return value[kv_cache_layout] if isinstance(value, dict) and "NHD" in value else value


def kernel_blocks_per_block(layer: Json) -> int:
    """1 when the kernels accept the block size, else how many of the largest listed size that divides it; 0 if none."""
    sizes = layer["layout"]["kernel_block_sizes"]
    listed = [size for size in sizes if isinstance(size, int)]
    multiples = [size["multiple_of"] for size in sizes if isinstance(size, dict)]
    tokens = stored_rows(layer)
    if not sizes or tokens in listed or any(tokens % multiple == 0 for multiple in multiples):
        return 1
    fitting = [size for size in listed if tokens % size == 0]
    return int(tokens // max(fitting)) if fitting else 0


def kernel_view_of(layer: Json) -> Json:
    """The layer as its kernels see it: their own block size."""
    return layer | {"block_size": stored_rows(layer) // kernel_blocks_per_block(layer)}


def extents(layer: Json, num_blocks: int) -> list[int]:
    """The logical shape in numbers; `layer` is an expanded layer with its final block size."""
    return [extent(symbol, layer, num_blocks) for symbol in layer["layout"]["shape"]]


def extent(symbol: str | int, layer: Json, num_blocks: int) -> int:
    if isinstance(symbol, int):
        return symbol
    size, size_v = layer["head_size"], layer.get("head_size_v") or layer["head_size"]
    row, row_v = (row_bytes(layer, width) // ITEM_SIZE_BYTES[layer["dtype"]] for width in (size, size_v))
    table = {
        "num_blocks": num_blocks,
        "block_size": layer["block_size"],
        "num_kv_heads": layer["num_kv_heads"],
        "head_size": size,
        "head_size + head_size_v": size + size_v,
        "head_size + 4": size + 4,
        "head_size/2 + head_size/16": size // 2 + size // 16,
        "row_size": row,
        "row_size + row_size_v": row + row_v,
    }
    return int(table[symbol])


def concrete(layer: Json) -> Any:
    """Everything that fixes where a block's bytes lie."""
    if layer["kind"] == "mamba":
        return "pages"
    return (extents(kernel_view_of(layer), 0), layer["layout"]["order"], layer["dtype"], layer["page_size_padded"])


def planes(layer: Json) -> int:
    """How many pieces of equal size a block lies in: the extents of the axes outside the block axis in memory."""
    if layer["kind"] == "mamba":
        return 1
    symbols, sizes = layer["layout"]["shape"], extents(layer | {"block_size": stored_rows(layer)}, 1)
    order = layer["layout"]["order"]
    at = order.index(symbols.index("num_blocks"))
    return math.prod(sizes[axis] for axis in order[:at])


def is_whole(layer: Json) -> bool:
    """A block is one piece of memory."""
    return planes(layer) == 1


def reads_pages_of(layer: Json, page: int) -> bool:
    """The kernels read pages that step by `page` bytes although their data is less."""
    if layer["kind"] == "mamba" or not is_whole(layer) or kernel_blocks_per_block(layer) != 1:
        return False
    if layer["layout"]["named"]:
        return not has_broken_rows(layer, page)
    return bool(layer["layout"]["reads_stride"])


def has_broken_rows(layer: Json, stride: int) -> bool:
    """Blocks of latent rows in a named layout, which kernels find by row number, but no whole number of rows apart."""
    if not (layer["layout"]["named"] and is_latent(layer)):
        return False
    return stride % row_bytes(layer, layer["head_size"]) != 0
