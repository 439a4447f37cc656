"""Planning 53 and 530 layers beside `json.loads` + `json.dumps` of the same request, and searches beside the rule."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import kvpage
from measure import print_table, take_turns


def request(num_layers: int) -> dict[str, Any]:
    """MiMo-V2-Flash and its draft (9 full, 39 window, 5 draft layers), or ten of them; every layer written out."""
    layers: list[dict[str, Any]] = []
    for index in range(num_layers):
        place = index % 53
        layer = {"name": f"layer.{index}", "block_size": 16, "dtype": "bfloat16"}
        if place < 9:
            layer |= {"kind": "full_attention", "num_kv_heads": 4, "head_size": 192, "head_size_v": 128}
        elif place < 48:
            layer |= {"kind": "sliding_window", "sliding_window": 128, "num_kv_heads": 8}
            layer |= {"head_size": 192, "head_size_v": 128}
        else:
            layer |= {"kind": "sliding_window", "sliding_window": 1024, "num_kv_heads": 8, "head_size": 128}
        layers.append(layer)
    return {"layers": layers, "strategy": "unify", "memory_bytes": 40 << 30, "max_model_len": 16384}


def hybrid(num_layers: int) -> dict[str, Any]:
    """A quarter attention, the others recurrent states, as in Qwen3-Next."""
    attention = {"kind": "full_attention", "num_kv_heads": 2, "head_size": 256, "dtype": "bfloat16"}
    state = {"kind": "mamba", "shapes": [[3, 8192], [32, 128, 128]], "dtypes": ["bfloat16", "float32"]}
    layers = [{"name": f"layer.{index}", **(attention if index % 4 == 3 else state)} for index in range(num_layers)]
    return {"layers": layers, "strategy": "unify", "align_hybrid": True, "memory_bytes": 40 << 30}


def main() -> None:
    measure(53, rounds=60)
    measure(530, rounds=25)
    compare_strategies("80 layers of a hybrid", hybrid(80), rounds=20)
    compare_strategies("53 layers", request(53), rounds=20)
    compare_strategies("1,000 layers", request(1000), rounds=5)


def compare_strategies(what: str, wanted: dict[str, Any], *, rounds: int) -> None:
    """What a search costs more than the rule. `auto` weighs all strategies, for an allocator of either kind."""
    asked = {
        "unify": {},
        "slab": {"strategy": "slab"},
        "nested": {"strategy": "nested"},
        "auto, flat": {"strategy": "auto"},
        "auto, slabs": {"strategy": "auto", "allocator": "slabs"},
    }
    timings = take_turns({name: partial(kvpage.plan, wanted | more) for name, more in asked.items()}, rounds=rounds)
    print_table(f"strategies, {what}", timings, floor="unify")


def measure(num_layers: int, *, rounds: int) -> None:
    wanted = request(num_layers)
    body = json.dumps(wanted)
    timings = take_turns(
        {
            "json.loads + json.dumps": lambda: json.dumps(json.loads(body)),
            "kvpage.plan": lambda: kvpage.plan(wanted),
            "kvpage.plan, loads and to_json": lambda: kvpage.plan(json.loads(body)).to_json(),
        },
        rounds=rounds,
    )
    print_table(f"planning {num_layers} layers", timings, floor="json.loads + json.dumps")


if __name__ == "__main__":
    main()
