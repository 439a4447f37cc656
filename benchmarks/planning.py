"""Planning beside `json.loads` + `json.dumps` of the request and beside vLLM's planner; searches beside the rule."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import kvpage
from measure import Effort, Row, Runs, beside, take_turns
from report import VLLM_PLANNER, Pair, Subject, main_of
from vllm_peer import vllm

JSON = "`json.loads` + `json.dumps` of the request"
RULE = "the rule (`unify`)"
SIZES = {53: 40, 530: 15}
"""Layers → rounds."""
SEARCHES: dict[str, dict[str, str]] = {
    "slab": {"strategy": "slab"},
    "nested": {"strategy": "nested"},
    "auto": {"strategy": "auto"},
    "auto, an allocator with slabs": {"strategy": "auto", "allocator": "slabs"},
}
SEARCH_ROUNDS = 5
ABOUT = """
`benchmarks/planning.py`. A request becomes a plan: validated, grouped, placed, and proven sound. The layers are those
of MiMo-V2-Flash and its draft, or ten of them.

- JSON: the request is read and written, and nothing else. It is the least that an answer over HTTP costs.
- vLLM's planner (`get_kv_cache_configs`, and since 0.33 `get_global_kv_cache_groups` before it): from specs that are
  made beforehand to groups and tensors, for one worker. Its plan must have as many blocks and groups as ours, or the
  benchmark fails. It reads no request, and an engine calls it once.
- Searches weigh layouts that the rule does not know: the ratio says what the choice of a strategy costs.
"""


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


def measure(effort: Effort) -> list[Row]:
    rows = [row for num_layers, rounds in SIZES.items() for row in _of_size(num_layers, effort.rounds(rounds))]
    for what, wanted in (("53 layers", request(53)), ("80 layers of a hybrid", hybrid(80))):
        asked: dict[str, dict[str, str]] = {RULE: {}} | {_search(name, what): more for name, more in SEARCHES.items()}
        sides = {name: partial(kvpage.plan, wanted | more) for name, more in asked.items()}
        rows += beside(RULE, take_turns(sides, rounds=effort.rounds(SEARCH_ROUNDS), warm_up=1))
    return rows


def _of_size(num_layers: int, rounds: int) -> list[Row]:
    wanted = request(num_layers)
    body = json.dumps(wanted)
    ours, whole = _plan(num_layers), _from_json(num_layers)
    sides: dict[str, Callable[[], object]] = {
        JSON: lambda: json.dumps(json.loads(body)),
        ours: lambda: kvpage.plan(wanted),
        whole: lambda: kvpage.plan(json.loads(body)).to_json(),
    }
    modules = vllm()
    if modules is not None:
        sides[VLLM_PLANNER] = modules.planner(wanted)
        theirs, plan = modules.planner(wanted)(), kvpage.plan(wanted)
        assert (theirs.num_blocks, len(theirs.kv_cache_groups)) == (plan.num_blocks, len(plan.groups))
    timed = take_turns(sides, rounds=rounds)
    return beside(JSON, timed, [ours, whole]) + _beside_vllm(timed, ours)


def _beside_vllm(timed: dict[str, Runs], ours: str) -> list[Row]:
    return beside(VLLM_PLANNER, timed, [ours]) if VLLM_PLANNER in timed else []


def _plan(num_layers: int) -> str:
    return f"plan of {num_layers} layers"


def _from_json(num_layers: int) -> str:
    return f"plan of {num_layers} layers, from JSON to JSON"


def _search(strategy: str, what: str) -> str:
    return f"{strategy}: {what}"


def _pairs() -> tuple[Pair, ...]:
    sizes = [
        pair
        for num_layers in SIZES
        for pair in (
            (_plan(num_layers), JSON),
            (_from_json(num_layers), JSON),
            (_plan(num_layers), VLLM_PLANNER),
        )
    ]
    models = ("53 layers", "80 layers of a hybrid")
    return (*sizes, *((_search(name, what), RULE) for what in models for name in SEARCHES))


SUBJECT = Subject(title="Planning", about=ABOUT, pairs=_pairs(), measure=measure, in_short=((_plan(53), VLLM_PLANNER),))

if __name__ == "__main__":
    main_of(SUBJECT)
