"""Random requests for the searches: models of a few layers to try every layout of, and wider ones with a workload.

Everything is drawn from the `random.Random` passed in, so a seed names a request (and hypothesis can shrink one).
"""

from __future__ import annotations

import random
from typing import Any

from planner import build
from planner.random_requests import random_request, small_request

Json = dict[str, Any]

KERNELS: tuple[list[Any], ...] = (
    [{"multiple_of": 16}],
    [{"multiple_of": 16}],
    [{"multiple_of": 32}],
    [{"multiple_of": 16, "max": 48}],
    [16, 32],
    [16, 32, 64],
)
FEW_LAYERS_SLAB_BYTES = 8192  # more than any slab that pays in these models


def few_layers(rng: random.Random) -> Json:
    """Two or three sorts of up to four tiny layers each, and tight bounds, for a search to be compared with trying all
    layouts."""
    counts = rng.choice(((3, 4), (1, 4), (2, 3), (4, 2), (1, 2, 2), (2, 1, 2)))
    layers = [tiny_layer(rng, f"f{number}", count) for number, count in enumerate(counts)]
    request = build.request(*layers, strategy="slab", num_blocks=1000, max_model_len=1)
    least = rng.randint(1, 30)
    workload = [
        {"tokens": rng.choice((1, 17, 40, 100, 333)), "weight": rng.choice((1.0, 2.5))},
        {"min_tokens": least, "max_tokens": least + rng.randint(0, 130), "weight": 1.0},
    ]
    request["workload"] = workload[rng.choice((0, 0, 1)) :]
    request["max_groups"] = rng.choice((2, 3, 4, 6, 8, 12))
    request["max_block_size"] = rng.choice((32, 48, 64))
    request["max_block_lcm"] = rng.choice((32, 48, 64, 96, 1024, 1024))
    if rng.random() < 0.3:
        request["max_block_stride_bytes"] = rng.choice((512, 1024, 2048))
    return request


def tiny_layer(rng: random.Random, name: str, count: int) -> Json:
    kind = rng.random()
    if kind < 0.25:
        shapes, dtypes = [[rng.choice((100, 128, 300, 500))]], [rng.choice(("int8", "bfloat16", "float32"))]
        extra = {"num_speculative_blocks": rng.choice((0, 0, 1))}
        return build.state(name + ".{i}", shapes, dtypes, count=count, **extra)
    more: Json = {"count": count, "kernel_block_sizes": rng.choice(KERNELS)}
    if kind >= 0.85:
        if rng.random() < 0.5:
            more["page_alignment_bytes"] = rng.choice((96, 160))
        layer = build.mla(name + ".{i}", size=rng.choice((3, 5, 9)), dtype="int8", **more)
    else:
        more |= {"heads": 1, "size": rng.choice((1, 2, 3, 4, 5)), "dtype": rng.choice(("int8", "bfloat16"))}
        window = rng.choice((7, 16, 30, 64))
        make = build.full if kind < 0.5 else build.sliding
        layer = make(name + ".{i}", **more) | ({"sliding_window": window} if kind >= 0.5 else {})
    if rng.random() < 0.08:
        layer["backend"] = build.dense(layer["backend"]["shape"])
    return layer


def any_layers(rng: random.Random) -> Json:
    """Real sizes, every kind, layout and row format, with a workload."""
    request = without_padding(random_request(rng), rng)
    request["workload"] = random_workload(rng)
    request["allocator"] = "slabs"
    request["max_groups"] = rng.choice((8, 16, 40))
    if rng.random() < 0.5:
        del request["memory_bytes"]
        request |= {"num_blocks": 100_000, "max_model_len": 1}
    if rng.random() < 0.2:
        for layer in request["layers"]:
            if layer["kind"] not in ("mamba", "encoder_only_attention"):
                layer["index_bits"] = 32
    return request


def random_workload(rng: random.Random) -> list[Json]:
    parts: list[Json] = []
    for _ in range(rng.choice((1, 2, 3))):
        weight = rng.choice((1.0, 0.5, 3.0))
        if rng.random() < 0.5:
            parts.append({"tokens": rng.choice((1, 100, 2048, 16_384, 131_072, 1_000_000)), "weight": weight})
        else:
            least = rng.choice((1, 100, 2000))
            parts.append({"min_tokens": least, "max_tokens": least + rng.choice((0, 1, 300, 2000)), "weight": weight})
    return parts


def few_bytes(rng: random.Random) -> Json:
    """A few slabs of a few kilobytes."""
    request = without_padding(small_request(rng), rng)
    del request["max_model_len"]
    request["strategy"] = rng.choice(("slab", "nested", "auto"))
    request["allocator"] = "flat" if request["strategy"] == "slab" else "slabs"
    request["num_blocks"] = rng.choice((3, 4, 6))
    request["max_block_size"] = rng.choice((16, 24, 32, 64))
    request["workload"] = [{"tokens": rng.choice((1, 7, 30, 100)), "weight": 1.0}]
    return request


def without_padding(request: Json, rng: random.Random) -> Json:
    """Searches place pages themselves: mostly none is asked for."""
    request.pop("layered", None)
    if rng.random() < 0.8:
        for layer in request["layers"]:
            layer.pop("page_size_padded", None)
    return request
