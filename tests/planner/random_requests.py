"""Random plan requests, wider than the recorded ones.

Every kind, registered and written-out backends, padding by the user, row alignment, quantised rows, states that divide
the largest page, windows on full layers, hybrid alignment, interleaved layers. Everything is drawn from the
`random.Random` passed in, so a seed names a request (and hypothesis can shrink one).
"""

from __future__ import annotations

import random
from typing import Any

from planner.one_layer import data_bytes, expand
from planner.rows import ITEM_SIZE_BYTES

Json = dict[str, Any]

FLOATS = ("bfloat16", "float16", "float32", "float8_e4m3fn")
KINDS = (
    *(("full_attention",) * 4),
    *(("sliding_window",) * 3),
    *(("mla_attention",) * 2),
    *(("mamba",) * 3),
    *("chunked_local_attention", "encoder_only_attention"),
)
SAME_WIDTH_BACKENDS = (
    "flash_attn",
    "triton_attn",
    "flex_attention",
    "flashinfer",
    "rocm_attn",
    "rocm_aiter_unified_attn",
)
TWO_WIDTH_BACKENDS = ("flash_attn_diffkv", "triton_attn_diffkv", "cpu_attn")
MLA_BACKENDS = ("triton_mla", "rocm_aiter_mla", "flashmla", "flashinfer_mla", "cutlass_mla", "flash_attn_mla")


def random_request(rng: random.Random) -> Json:
    align = rng.random() < 0.15
    families = [random_layer(rng, f"f{number}", align) for number in range(rng.choice((1, 2, 2, 3, 3, 4, 5)))]
    if align:
        for family in families:
            family["block_size"] = families[0]["block_size"]
    request: Json = {
        "layers": entries(rng, families),
        "strategy": "unify",
        "kv_cache_layout": rng.choice(("NHD", "HND")),
        "max_model_len": rng.choice((1, 100, 2048, 16384, 131072, 1_000_003)),
        "max_num_batched_tokens": rng.choice((1, 64, 2048, 8192, 100_000)),
    }
    if any(family.get("kv_quant") == "nvfp4" for family in families):
        request["kv_cache_layout"] = "HND"  # the only layout in which data and scales of nvfp4 stay apart
    if align or rng.random() < 0.1:
        request["align_hybrid"] = align
    request["memory_bytes"] = rng.choice((1 << 26, 1 << 30, 10**9 + 7, 40 << 30))
    return request


def entries(rng: random.Random, families: list[Json]) -> list[Json]:
    """Some families as one entry with a count; the others layer by layer, now and then interleaved."""
    queues: list[list[Json]] = []
    for family in families:
        count = rng.choice((1, 1, 2, 3, 4, 5, 6, 10))
        if count > 1 and rng.random() < 0.5:
            queues.append([family | {"name": family["name"] + ".{i}", "count": count}])
        else:
            queues.append([family | {"name": f"{family['name']}.{i}"} for i in range(count)])
    if rng.random() < 0.6:
        return [layer for queue in queues for layer in queue]
    mixed = []
    while any(queues):
        queue = rng.choice([queue for queue in queues if queue])
        mixed.append(queue.pop(0))
    return mixed


def random_layer(rng: random.Random, name: str, align: bool) -> Json:
    kind = rng.choice(KINDS)
    layer: Json = {"name": name, "kind": kind, "block_size": rng.choice((16, 16, 16, 32, 32, 64, 128))}
    if kind == "encoder_only_attention":
        return layer | {"num_kv_heads": 8, "head_size": 64, "dtype": "bfloat16"}
    make = {"mamba": random_state, "mla_attention": random_mla}.get(kind, random_attention)
    layer |= make(rng, kind)
    if not align and rng.random() < 0.12:
        layer["page_size_padded"] = random_padding(rng, layer)
    if rng.random() < 0.1 and kind != "mamba":
        layer["draft"] = True
    return layer


def random_state(rng: random.Random, kind: str) -> Json:
    if rng.random() < 0.4:  # a power of two: often a divisor of the largest page
        shapes = [[1 << rng.randint(3, 8), 1 << rng.randint(3, 8)] for _ in range(rng.randint(1, 3))]
    else:
        shapes = [
            [3, rng.choice((512, 2048, 8192))],
            [rng.choice((16, 32)), rng.choice((64, 128)), rng.choice((64, 128))],
        ]
    dtypes = [rng.choice(("bfloat16", "float32", "float16")) for _ in shapes]
    layer: Json = {"shapes": shapes, "dtypes": dtypes}
    if rng.random() < 0.3:
        layer["num_speculative_blocks"] = rng.randint(0, 4)
    return layer


def random_mla(rng: random.Random, kind: str) -> Json:
    head_size = rng.choice((576, 512, 320, 132, 656))
    layer: Json = {"head_size": head_size, "dtype": "uint8" if head_size in (132, 656) else rng.choice(FLOATS)}
    layer["backend"] = rng.choice(MLA_BACKENDS) if rng.random() < 0.4 else written_mla(rng)
    if rng.random() < 0.25:
        layer["page_alignment_bytes"] = rng.choice((576, 1024, 2048, 4096, 73_728))
    return layer


def random_attention(rng: random.Random, kind: str) -> Json:
    layer: Json = {
        "num_kv_heads": rng.choice((1, 2, 4, 5, 8, 16)),
        "head_size": rng.choice((64, 80, 96, 128, 192, 256)),
    }
    layer["dtype"] = rng.choice(FLOATS)
    if rng.random() < 0.15:
        quantise(rng, layer)
    else:
        if kind != "chunked_local_attention" and rng.random() < 0.3:
            layer["head_size_v"] = rng.choice((64, 128, 192))
        layer["backend"] = attention_backend(rng, layer)
    if kind == "sliding_window" or (kind == "full_attention" and rng.random() < 0.1):
        layer["sliding_window"] = rng.choice((1, 128, 512, 1000, 4096))
    elif kind == "chunked_local_attention" or (kind == "full_attention" and rng.random() < 0.1):
        layer["attention_chunk_size"] = rng.choice((1024, 8192))
    return layer


def quantise(rng: random.Random, layer: Json) -> None:
    quant, dtype, backend = rng.choice(
        (
            ("int8_per_token_head", "int8", "triton_attn"),
            ("fp8_per_token_head", "float8_e4m3fn", "triton_attn"),
            ("nvfp4", "uint8", "flashinfer"),
        )
    )
    layer |= {"kv_quant": quant, "dtype": dtype, "backend": backend}


def attention_backend(rng: random.Random, layer: Json) -> str | Json:
    same_width = layer.get("head_size_v", layer["head_size"]) == layer["head_size"]
    if rng.random() < 0.4:
        return rng.choice(SAME_WIDTH_BACKENDS if same_width else TWO_WIDTH_BACKENDS)
    shape: list[str | int] = ["num_blocks", "block_size", "num_kv_heads", "head_size + head_size_v"]
    if same_width and rng.random() < 0.5:
        shape = ["num_blocks", 2, "block_size", "num_kv_heads", "head_size"]
    if rng.random() < 0.25:
        return {"shape": shape}
    inner = list(range(1, len(shape)))
    rng.shuffle(inner)
    return with_orders(rng, shape, [0, *inner])


def written_mla(rng: random.Random) -> Json:
    shape: list[str | int] = ["num_blocks", "block_size", "head_size"]
    return {"shape": shape} if rng.random() < 0.4 else with_orders(rng, shape, [0, 1, 2])


def with_orders(rng: random.Random, shape: list[str | int], order: list[int]) -> Json:
    """Both stride orders; the layers axis is outermost (padding refused) or anywhere further in (padding fine)."""
    layered = [axis + 1 for axis in order]
    layered.insert(0 if rng.random() < 0.2 else rng.randint(1, len(layered)), 0)
    return {"shape": shape, "stride_order": order, "layered_stride_order": layered}


def random_padding(rng: random.Random, layer: Json) -> int:
    """Mostly a legal padded page; now and then one byte short or not a multiple of the item size."""
    if layer.get("page_alignment_bytes"):
        del layer["page_alignment_bytes"]
    (expanded,) = expand({"layers": [layer]})
    page = data_bytes(expanded)
    item = max(ITEM_SIZE_BYTES[dtype] for dtype in layer.get("dtypes", [layer.get("dtype", "float32")]))
    choice = rng.random()
    if choice < 0.1:
        return page - 1
    if choice < 0.2:
        return page + rng.randint(1, 3)
    return int(page + item * rng.choice((0, 1, 16, 512, page // item, 3 * page // item)))


# --- small enough to list every byte --------------------------------------------------------------


def small_request(rng: random.Random) -> Json:
    """A plan of a few kilobytes, with blocks anywhere in memory."""
    layers = [small_layer(rng, f"f{number}") for number in range(rng.randint(1, 4))]
    request = {"layers": layers, "strategy": "unify", "kv_cache_layout": "NHD"}
    return request | {"num_blocks": rng.randint(8, 12), "max_model_len": 4, "max_num_batched_tokens": 4}


def small_layer(rng: random.Random, name: str) -> Json:
    layer: Json = {"name": name + ".{i}", "count": rng.randint(1, 3), "block_size": rng.choice((4, 4, 8, 12))}
    if rng.random() < 0.3:
        shapes = [[rng.randint(1, 4) for _ in range(rng.randint(1, 3))] for _ in range(rng.randint(1, 3))]
        dtypes = [rng.choice(("int8", "bfloat16", "float32")) for _ in shapes]
        return layer | {"kind": "mamba", "shapes": shapes, "dtypes": dtypes}
    layer |= rng.choice(({"kind": "full_attention"}, {"kind": "sliding_window", "sliding_window": 4}))
    layer |= {"num_kv_heads": rng.randint(1, 3), "head_size": rng.choice((1, 2, 3, 4))}
    layer["dtype"] = rng.choice(("int8", "bfloat16", "float32"))
    if rng.random() < 0.3:
        layer["head_size_v"] = rng.randint(1, 4)
        shape: list[str | int] = ["num_blocks", "block_size", "num_kv_heads", "head_size + head_size_v"]
    else:
        shape = ["num_blocks", "block_size", "num_kv_heads", "head_size"]
        shape.insert(rng.randint(0, 1), 2)
    order = list(range(len(shape)))
    if rng.random() < 0.3:
        rng.shuffle(order)
    if rng.random() < 0.3:  # blocks outermost in memory, wherever they stand in the shape
        order.sort(key=lambda axis: shape[axis] != "num_blocks")
    layer["backend"] = with_orders(rng, shape, order)
    if rng.random() < 0.4:
        layer["kernel_block_sizes"] = rng.choice(([4], [2, 4], [{"multiple_of": 4}], [4, 8]))
    if rng.random() < 0.2:
        layer["page_size_padded"] = random_padding(rng, {key: value for key, value in layer.items() if key != "count"})
    return layer
