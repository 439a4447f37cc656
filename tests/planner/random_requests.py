"""Random plan requests, wider than the recorded ones.

Every kind and layout, padding by the user, row alignment, quantised and compressed rows, states that divide the largest
page, windows on full layers, hybrid alignment, shared caches, layers in any order. Everything is drawn from the
`random.Random` passed in, so a seed names a request (and hypothesis can shrink one).
"""

from __future__ import annotations

import random
from typing import Any

from planner.build import pads
from planner.random_layers import (
    name_layouts,
    random_latent_rows,
    random_latent_window,
    random_layer,
    random_padding,
    with_orders,
)
from planner.rows import is_latent

Json = dict[str, Any]


def random_request(rng: random.Random) -> Json:
    align = rng.random() < 0.15
    families = random_families(rng, align)
    request: Json = {
        "layers": entries(rng, families),
        "strategy": "unify",
        "kv_cache_layout": rng.choice(("NHD", "HND")),
        "max_model_len": rng.choice((1, 100, 2048, 16384, 131072, 1_000_003)),
        "max_num_batched_tokens": rng.choice((1, 64, 2048, 8192, 100_000)),
        "max_num_encoder_input_tokens": rng.choice((1, 1500, 30_000)),
    }
    if any(family.get("kv_quant") == "nvfp4" for family in families):
        request["kv_cache_layout"] = "HND"  # the only layout in which data and scales of nvfp4 stay apart
    if align or rng.random() < 0.1:
        request["align_hybrid"] = align
    if not align and rng.random() < (0.5 if len(families) == 1 else 0.02):
        request["layered"] = True
    if rng.random() < 0.15:
        request["layers"] += sharers(rng, request["layers"])
    request["memory_bytes"] = rng.choice((1 << 26, 1 << 30, 10**9 + 7, 40 << 30))
    return request


def random_families(rng: random.Random, align: bool) -> list[Json]:
    """The sorts of layers of a request."""
    if align or rng.random() < 0.75:
        families = [random_layer(rng, f"f{number}", align) for number in range(rng.choice((1, 1, 2, 2, 3, 4, 5)))]
    else:
        tokens = rng.choice((64, 128, 256))
        families = [random_latent_rows(rng, f"f{number}", tokens) for number in range(rng.choice((1, 1, 2, 3)))]
        families += [random_latent_window(rng, f"w{number}") for number in range(rng.choice((0, 1, 1, 2)))]
        if rng.random() < 0.7:  # all by block stride, so packed
            families = [family | {"backend": pads(["num_blocks", "block_size", "row_size"])} for family in families]
        if rng.random() < 0.1:
            families.append(random_layer(rng, "other", align))
        for family in families if rng.random() < 0.5 else ():
            if is_latent(family):
                family["page_alignment_bytes"] = 576
    if align:
        for family in families:
            family["block_size"] = families[0]["block_size"]
    elif rng.random() < 0.3:
        name_layouts(rng, families)
    return families


def sharers(rng: random.Random, layers: list[Json]) -> list[Json]:
    """Layers that read the cache of others; now and then one that differs from its target."""
    found = []
    for number in range(rng.randint(1, 3)):
        owner = rng.choice(layers)
        name = owner["name"].replace("{i}", "0")
        copy = {key: value for key, value in owner.items() if key != "count"}
        found.append(copy | {"name": f"share{number}", "kv_sharing_target": name})
        if rng.random() < 0.05 and "head_size" in copy:
            found[-1]["head_size"] = copy["head_size"] * 2
    return found


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


# --- small enough to list every byte --------------------------------------------------------------


def small_request(rng: random.Random) -> Json:
    """A plan of a few kilobytes, with blocks anywhere in memory."""
    layers = [small_layer(rng, f"f{number}") for number in range(rng.choice((1, 1, 2, 3, 4)))]
    if rng.random() < 0.25:
        layers = [small_latent(rng, f"m{number}", "mla_attention") for number in range(rng.randint(1, 2))]
        layers += [small_latent(rng, f"w{number}", "sliding_window_mla") for number in range(rng.randint(0, 2))]
    request: Json = {"layers": layers, "strategy": "unify", "kv_cache_layout": "NHD"}
    if rng.random() < 0.3:
        name_layouts(rng, layers)
    if rng.random() < (0.4 if len(layers) == 1 else 0.02):
        request["layered"] = True
    if rng.random() < 0.15:
        request["layers"] = layers + sharers(rng, layers)
    request["max_num_encoder_input_tokens"] = 4
    return request | {"num_blocks": rng.randint(8, 12), "max_model_len": 4, "max_num_batched_tokens": 4}


def small_layer(rng: random.Random, name: str) -> Json:
    layer: Json = {"name": name + ".{i}", "count": rng.randint(1, 3), "block_size": rng.choice((4, 4, 8, 12))}
    if rng.random() < 0.3:
        shapes = [[rng.randint(1, 4) for _ in range(rng.randint(1, 3))] for _ in range(rng.randint(1, 3))]
        dtypes = [rng.choice(("int8", "bfloat16", "float32")) for _ in shapes]
        return layer | {"kind": "mamba", "shapes": shapes, "dtypes": dtypes}
    kinds: tuple[Json, ...] = ({"kind": "full_attention"}, {"kind": "sliding_window", "sliding_window": 4})
    layer |= rng.choice((*kinds, {"kind": "cross_attention"}))
    layer |= {"num_kv_heads": rng.randint(1, 3), "head_size": rng.choice((1, 2, 3, 4))}
    layer["dtype"] = rng.choice(("int8", "bfloat16", "float32"))
    layer["backend"] = small_backend(rng, layer)
    if rng.random() < 0.4:
        layer["kernel_block_sizes"] = rng.choice(([4], [2, 4], [{"multiple_of": 4}], [4, 8]))
    if rng.random() < 0.2:
        layer["page_size_padded"] = random_padding(rng, {key: value for key, value in layer.items() if key != "count"})
    return layer


def small_backend(rng: random.Random, layer: Json) -> Json:
    """A written-out layout for K and V; it may join them, or store rows with scales."""
    shape: list[str | int] = ["num_blocks", "block_size", "num_kv_heads", "head_size"]
    choice = rng.random()
    if choice < 0.2:
        layer |= {"dtype": "int8", "head_size": 2 * layer["head_size"]}
        layer["kv_quant"] = rng.choice(("int4", "int8_per_token_head"))
        shape[-1] = "row_size + row_size_v"
    elif choice < 0.4 and layer["kind"] != "cross_attention":
        layer["head_size_v"] = rng.randint(1, 4)
        shape[-1] = "head_size + head_size_v"
    else:
        shape.insert(rng.randint(0, 1), 2)
    order = list(range(len(shape)))
    if rng.random() < 0.3:
        rng.shuffle(order)
    if rng.random() < 0.3:  # blocks outermost in memory, wherever they stand in the shape
        order.sort(key=lambda axis: shape[axis] != "num_blocks")
    return with_orders(rng, shape, order)


def small_latent(rng: random.Random, name: str, kind: str) -> Json:
    layer: Json = {"name": name + ".{i}", "count": rng.randint(1, 4), "kind": kind, "head_size": rng.randint(1, 4)}
    layer |= {"block_size": 8, "dtype": rng.choice(("int8", "bfloat16"))}
    if kind == "sliding_window_mla":
        layer |= {
            "sliding_window": rng.choice((2, 4)),
            "block_size": rng.choice((2, 4)),
            "count": rng.choice((1, 3, 3)),
        }
    else:
        layer["compress_ratio"] = rng.choice((1, 1, 2, 4))
    if rng.random() < 0.2:
        layer["page_alignment_bytes"] = rng.choice((4, 6, 32))
    order = [0, 1, 2] if rng.random() < 0.8 else [1, 0, 2]
    return layer | {"backend": with_orders(rng, ["num_blocks", "block_size", "row_size"], order)}
