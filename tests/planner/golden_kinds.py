"""The recorded figures of vLLM 0.24.0 for latent windows, cross attention and packed blocks, made into plan requests.

Each file of tests/data holds one object per case. `runs` is `[count, layer]`; layer `i` of run `f` is called
`f<f>.<i>`. The layers come run by run, or `dealt`: one of each run in turn. Facts, as vLLM has them: `pages` and
`block_sizes` per run in the finished plan; `groups` `[block_size, page_size_bytes, [[run, start, stop, step], ...]]`;
`result_blocks`; `request_bytes`; `block_stride`, 0 when layers have regions of their own, else the bytes from one
packed block to the next; `offsets` per run as `[first, step, count]`, in the packed block or in all buffers one after
the other; `views` per run as `[shape, strides in bytes]`. `refused` instead of all that: vLLM makes no such plan, or a
wrong one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner import build

DATA = Path(__file__).resolve().parent.parent / "data"
LATENT_SHAPE = ["num_blocks", "block_size", "row_size"]
LIMITS = ("memory_bytes", "num_blocks", "max_model_len", "max_num_batched_tokens", "max_num_encoder_input_tokens")

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """A request and what vLLM made of it."""

    id: str
    request: Json
    facts: Json

    @property
    def is_refused(self) -> bool:
        return "refused" in self.facts

    def groups(self) -> list[Json]:
        return [
            {
                "block_size": block_size,
                "page_size_bytes": page,
                "layers": [f"f{run}.{i}" for run, start, stop, step in slices for i in range(start, stop, step)],
            }
            for block_size, page, slices in self.facts["groups"]
        ]

    def offsets(self) -> dict[str, int]:
        """Where the first page of each layer begins."""
        found: dict[str, int] = {}
        for run, progressions in enumerate(self.facts["offsets"]):
            values = [first + i * step for first, step, count in progressions for i in range(count)]
            found |= {f"f{run}.{i}": value for i, value in enumerate(values)}
        return found

    def of_run(self, what: str, name: str) -> Any:
        """The fact `what` of the run that layer `name` belongs to."""
        return self.facts[what][int(name[1:].split(".")[0])]


def cases(file_name: str) -> list[Case]:
    loaded: list[Json] = json.loads((DATA / file_name).read_text())["cases"]
    return [_case(facts) for facts in loaded]


def _case(facts: Json) -> Case:
    layers = [layer | {"backend": _backend(layer, facts)} for _, layer in facts["runs"]]
    counts = [count for count, _ in facts["runs"]]
    places = [(run, i) for run, count in enumerate(counts) for i in range(count)]
    if facts.get("dealt"):
        places.sort(key=lambda place: (place[1], place[0]))
    request: Json = {"layers": [layers[run] | {"name": f"f{run}.{i}"} for run, i in places], "strategy": "unify"}
    return Case(facts["id"], request | {key: facts[key] for key in LIMITS if key in facts}, facts)


def _backend(layer: Json, facts: Json) -> str | Json:
    if "backend" in facts:
        return str(facts["backend"])
    if layer["kind"].endswith(("mla_attention", "window_mla")):
        return build.pads(LATENT_SHAPE)
    return build.pads(build.ROW_SHAPE) if facts.get("reads_stride") else build.dense(build.ROW_SHAPE)
