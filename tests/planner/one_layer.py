"""What the oracle knows of one layer alone: bytes, blocks, and faults it has whatever its neighbours are."""

from __future__ import annotations

import math
from typing import Any

from planner import layouts

Json = dict[str, Any]

ITEM_SIZE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}


class RefusedError(Exception):
    """The request has no plan; `facts` say why."""

    def __init__(self, **facts: Any) -> None:
        super().__init__(facts)
        self.facts = facts


def expand(request: Json) -> list[Json]:
    """Every layer as a dict of its own with all fields present."""
    layers = []
    for entry in request["layers"]:
        for i in range(entry.get("count", 1)):
            layer = {key: value for key, value in entry.items() if key != "count"}
            if "count" in entry:
                layer["name"] = entry["name"].replace("{i}", str(i))
            layer.setdefault("head_size_v", layer.get("head_size"))
            for key in (
                "page_size_padded",
                "kv_quant",
                "sliding_window",
                "attention_chunk_size",
                "page_alignment_bytes",
            ):
                layer.setdefault(key, None)
            layer.setdefault("num_kv_heads", 1)
            layer.setdefault("num_speculative_blocks", 0)
            layer.setdefault("block_size", None)
            layer["layout"] = layouts.resolve(layer, request.get("kv_cache_layout", "NHD"))
            layers.append(layer)
    return layers


def is_state(layer: Json) -> bool:
    return bool(layer["kind"] == "mamba")


def row_bytes(layer: Json, elements: int) -> int:
    """Bytes one head stores of one token's K or V of `elements` elements, scales included."""
    if layer["kv_quant"] == "nvfp4":
        return elements // 2 + elements // 16
    if layer["kv_quant"] in ("int8_per_token_head", "fp8_per_token_head"):
        return elements + 4
    return elements * ITEM_SIZE_BYTES[layer["dtype"]]


def data_bytes(layer: Json) -> int:
    """Bytes the data of one block needs."""
    if is_state(layer):
        return sum(state_bytes(layer))
    if layer["kind"] == "mla_attention":
        return int(layer["block_size"] * row_bytes(layer, layer["head_size"]))
    width_v = layer["head_size"] if layer["kind"] == "chunked_local_attention" else layer["head_size_v"]
    both = row_bytes(layer, layer["head_size"]) + row_bytes(layer, width_v)
    return int(layer["block_size"] * layer["num_kv_heads"] * both)


def state_bytes(layer: Json) -> list[int]:
    return [
        math.prod(shape) * ITEM_SIZE_BYTES[dtype] for shape, dtype in zip(layer["shapes"], layer["dtypes"], strict=True)
    ]


def unpadded_page(layer: Json) -> int:
    """The data, and what is missing to a multiple that strides of the next block can be whole in."""
    page = data_bytes(layer)
    return page + -page % page_multiple(layer)


def page_bytes(layer: Json) -> int:
    return int(layer["page_size_padded"] or unpadded_page(layer))


def check_alone(layer: Json, aligns: bool) -> None:
    """Faults that a layer has whatever its neighbours are; alignment (`aligns`) finds a block the kernels accept."""
    page = page_bytes(layer)
    if layer["page_size_padded"] is not None and (page < unpadded_page(layer) or page % page_multiple(layer)):
        raise RefusedError(why="spec-invalid", layer=layer["name"])
    if is_state(layer) and any(start % item for start, item in state_starts(layer, 0)):
        raise RefusedError(why="spec-invalid", layer=layer["name"])
    if page > data_bytes(layer) and not aligns:
        check_gap(layer)
    if layouts.kernel_blocks_per_block(layer) == 0 and not aligns:
        raise RefusedError(why="layout-unsupported", layer=layer["name"])


def page_multiple(layer: Json) -> int:
    """What a page must be a multiple of for strides to be whole: the items, and the layer's own alignment."""
    items = [ITEM_SIZE_BYTES[dtype] for dtype in layer.get("dtypes", [layer.get("dtype")])]
    return math.lcm(layer["page_alignment_bytes"] or 1, *items)


def check_gap(layer: Json) -> None:
    """A gap after each page: only where a page is one piece, and the kernels see it as one block."""
    if not layer["layout"]["blocks_outermost"]:
        raise RefusedError(why="layout-unsupported", layer=layer["name"], arguable=layouts.planes(layer) == 1)
    if layouts.kernel_blocks_per_block(layer) > 1:
        raise RefusedError(why="layout-unsupported", layer=layer["name"])


def most_blocks(layer: Json, max_model_len: int, max_batched: int) -> int:
    """Most blocks one request of `max_model_len` tokens holds in this layer at any moment."""
    size, limit = layer["block_size"], max_model_len
    if is_state(layer):
        return int(1 + layer["num_speculative_blocks"])
    if layer["kind"] == "sliding_window":
        return ceil_div(min(layer["sliding_window"] - 1 + max_batched, limit), size) + 1
    if layer["kind"] == "chunked_local_attention":
        return ceil_div(min(layer["attention_chunk_size"] + max_batched, limit), size)
    return ceil_div(limit, size)


def ceil_div(value: int, step: int) -> int:
    whole, rest = divmod(value, step)
    return whole + 1 if rest else whole


def state_starts(layer: Json, offset: int) -> list[tuple[int, int]]:
    """Where each tensor of the layer starts, and its item size."""
    if not is_state(layer):
        return [(offset, ITEM_SIZE_BYTES[layer["dtype"]])]
    starts = []
    for size, dtype in zip(state_bytes(layer), layer["dtypes"], strict=True):
        starts.append((offset, ITEM_SIZE_BYTES[dtype]))
        offset += size
    return starts
