"""Planning 53 and 530 layers beside `json.loads` + `json.dumps` of the same request."""

from __future__ import annotations

import json
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


def main() -> None:
    measure(53, rounds=60)
    measure(530, rounds=25)


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
