"""The recorded figures of vLLM 0.24.0 in tests/data, made into plan requests and the facts their plans must show.

`golden_unify.json`: one object per case. `runs` is `[count, layer]`, a layer being the list of its fields in the order
of `ATTENTION_FIELDS` or `STATE_FIELDS`; layer `i` of run `f` is called `f<f>.<i>`. `pages`: page bytes per run before
unification. `unify`: `[block_size, page_size_bytes, page_size_padded]` per run after it, or `unify_error` names the
layer that can be neither scaled nor padded (vLLM was asked to unify every case, also those whose plan does without).
`plan`: `groups` `[block_size, page_size_bytes, [[run, start, stop, step], ...]]`, `buffers` as `[count, size_bytes]`;
buffer `i` is shared by the `i`-th layer of every group.

`golden_views.json`: one list per case, columns `VIEW_FIELDS`; strides and offset in elements of `dtype`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parent.parent / "data"

ATTENTION_FIELDS = ("kind", "block_size", "num_kv_heads", "head_size", "head_size_v", "dtype", "reads_stride", "window")
STATE_FIELDS = ("kind", "block_size", "shapes", "dtypes", "page_size_padded")
VIEW_FIELDS = (
    *(
        "id",
        "backend",
        "kv_cache_layout",
        "num_blocks",
        "block_size",
        "num_kv_heads",
        "head_size",
        "head_size_v",
        "dtype",
    ),
    *("kv_quant", "page_size_padded", "page_size_bytes", "shape", "stride_order", "strides", "block1_offset"),
)

ATTENTION_SHAPE = ["num_blocks", "block_size", "num_kv_heads", "head_size + head_size_v"]
MLA_SHAPE = ["num_blocks", "block_size", "head_size"]
MLA_BACKENDS = ("triton_mla", "rocm_aiter_mla")

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PlanCase:
    """A request and what vLLM made of it."""

    id: str
    request: Json
    runs: list[tuple[str, ...]]
    """The names of the layers of each run, in order."""
    facts: Json


@dataclass(frozen=True, slots=True)
class ViewCase:
    """A request of one layer and the view it must get; `strides` of the facts says `padding_unsupported` if none."""

    id: str
    request: Json
    facts: Json


def backend(shape: list[str], reads_stride: bool) -> Json:
    """A written-out backend with blocks outermost; with both stride orders it indexes KV by the block's stride."""
    axes = list(range(len(shape)))
    if not reads_stride:
        return {"shape": shape}
    return {"shape": shape, "stride_order": axes, "layered_stride_order": [1, 0, *(axis + 1 for axis in axes[1:])]}


def plan_cases() -> list[PlanCase]:
    return [_plan_case(case) for case in _load("golden_unify.json")]


def view_cases() -> list[ViewCase]:
    return [_view_case(dict(zip(VIEW_FIELDS, case, strict=False))) for case in _load("golden_views.json")]


def _load(file_name: str) -> list[Any]:
    cases: list[Any] = json.loads((DATA / file_name).read_text())["cases"]
    return cases


def _plan_case(case: Json) -> PlanCase:
    layers: list[Json] = []
    runs: list[tuple[str, ...]] = []
    for number, (count, fields) in enumerate(case["runs"]):
        names = tuple(f"f{number}.{i}" for i in range(count))
        runs.append(names)
        layers += [{"name": name, **_layer(fields)} for name in names]
    request = {"layers": layers, "strategy": "unify"}
    request |= {key: case[key] for key in ("memory_bytes", "max_model_len", "max_num_batched_tokens")}
    facts: Json = {key: case[key] for key in ("pages", "unify", "unify_error", "plan_error") if key in case}
    if "plan" in case:
        facts["plan"] = _expand_plan(case["plan"], runs)
    return PlanCase(case["id"], request, runs, facts)


def _layer(fields: list[Any]) -> Json:
    """A layer of a request, without its name, from the list in the data."""
    if fields[0] == "mamba":
        layer = dict(zip(STATE_FIELDS, fields, strict=True))
        return {key: value for key, value in layer.items() if value is not None}
    layer = dict(zip(ATTENTION_FIELDS, fields, strict=True))
    window, is_mla = layer.pop("window"), layer["kind"] == "mla_attention"
    layer["backend"] = backend(MLA_SHAPE if is_mla else ATTENTION_SHAPE, layer.pop("reads_stride"))
    if layer["kind"] == "sliding_window":
        layer["sliding_window"] = window
    if layer["kind"] == "chunked_local_attention":
        layer["attention_chunk_size"] = window
    if is_mla:
        del layer["num_kv_heads"], layer["head_size_v"]
    return layer


def _expand_plan(plan: Json, runs: list[tuple[str, ...]]) -> Json:
    groups = [
        {
            "block_size": block_size,
            "page_size_bytes": page,
            "layers": [name for run, start, stop, step in slices for name in runs[run][start:stop:step]],
        }
        for block_size, page, slices in plan["groups"]
    ]
    sizes = [size for count, size in plan["buffers"] for _ in range(count)]
    buffers = [
        {"size_bytes": size, "layers": [g["layers"][i] for g in groups if i < len(g["layers"])]}
        for i, size in enumerate(sizes)
    ]
    return plan | {"groups": groups, "buffers": buffers}


def _view_case(facts: Json) -> ViewCase:
    is_mla = facts["backend"] in MLA_BACKENDS
    keys = ["block_size", "head_size", "dtype", "kv_quant", "page_size_padded", "backend"]
    keys += [] if is_mla else ["num_kv_heads", "head_size_v"]
    layer = {"name": "layer", "kind": "mla_attention" if is_mla else "full_attention"}
    layer |= {key: facts[key] for key in keys if facts[key] is not None}
    request = {
        "layers": [layer],
        "kv_cache_layout": facts["kv_cache_layout"],
        "strategy": "unify",
        "num_blocks": facts["num_blocks"],
        "max_model_len": facts["block_size"],
        "max_num_batched_tokens": facts["block_size"],
    }
    return ViewCase(facts["id"], request, facts)
