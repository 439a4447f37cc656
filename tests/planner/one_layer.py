"""What the oracle knows of one layer alone: bytes, blocks, and faults it has whatever its neighbours are."""

from __future__ import annotations

import math
from typing import Any

from planner import layouts
from planner.rows import ITEM_SIZE_BYTES, is_latent, row_bytes, stored_rows

Json = dict[str, Any]


class RefusedError(Exception):
    """The request has no plan; `facts` say why."""

    def __init__(self, **facts: Any) -> None:
        super().__init__(facts)
        self.facts = facts


ABSENT = ("page_size_padded", "kv_quant", "sliding_window", "attention_chunk_size", "page_alignment_bytes")


def expand(request: Json) -> list[Json]:
    """Every layer as a dict of its own with all fields present."""
    layers = []
    for entry in request["layers"]:
        for i in range(entry.get("count", 1)):
            layer = {key: value for key, value in entry.items() if key != "count"}
            if "count" in entry:
                layer["name"] = entry["name"].replace("{i}", str(i))
            defaults = {"head_size_v": layer.get("head_size"), "num_kv_heads": 1, "compress_ratio": 1}
            defaults |= {"num_speculative_blocks": 0, "block_size": None, "kv_sharing_target": None}
            layer = defaults | dict.fromkeys(ABSENT) | layer
            data_order = request.get("kv_cache_layout") or ("HND" if layer["kv_quant"] == "nvfp4" else "NHD")
            layer["layout"] = layouts.resolve(layer, data_order)
            layers.append(layer)
    return layers


def is_state(layer: Json) -> bool:
    return bool(layer["kind"] == "mamba")


def data_bytes(layer: Json) -> int:
    """Bytes the data of one block needs."""
    if is_state(layer):
        return sum(state_bytes(layer))
    if is_latent(layer):
        return int(stored_rows(layer) * layer["num_kv_heads"] * row_bytes(layer, layer["head_size"]))
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
    if not is_state(layer) and layer["block_size"] % layer["compress_ratio"]:
        raise RefusedError(why="spec-invalid", layer=layer["name"])
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
    if not layouts.is_whole(layer):
        raise RefusedError(why="layout-unsupported", layer=layer["name"])
    if layouts.kernel_blocks_per_block(layer) > 1:
        raise RefusedError(why="layout-unsupported", layer=layer["name"])
    if layouts.has_broken_rows(layer, page_bytes(layer)):
        raise RefusedError(why="layout-unsupported", layer=layer["name"])


def most_blocks(layer: Json, request: Json) -> int:
    """Most blocks one request of `max_model_len` tokens holds in this layer at any moment."""
    size, limit, batched = layer["block_size"], request["max_model_len"], request["max_num_batched_tokens"]
    if is_state(layer):
        return int(1 + layer["num_speculative_blocks"])
    if layer["kind"] in ("sliding_window", "sliding_window_mla"):
        return ceil_div(min(layer["sliding_window"] - 1 + batched, limit), size) + 1
    if layer["kind"] == "chunked_local_attention":
        return ceil_div(min(layer["attention_chunk_size"] + batched, limit), size)
    if layer["kind"] == "cross_attention":
        return ceil_div(request["max_num_encoder_input_tokens"], size)
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
