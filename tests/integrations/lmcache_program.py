"""Shows tensors of kvpage's plans to the LMCache in the folder given, and prints what it makes of them, as JSON.

Its own detection runs, with its native module, and what it recovers its transfer in torch has to move. Packages above
it whose import needs engines and GPU libraries are empty stand-ins, as are two leaves where they are not installed: a
cache class, and the class of shapes of a device back end, which is that of the native module.

    python tests/integrations/lmcache_program.py FOLDER > tests/data/readers/lmcache.json
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import math
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from integrations.reader_cases import CASES, Case, attention, plan_of, shown
from kvpage.client.views import BufferViews, ElementView, PlannedViews
from kvpage.plans import Plan

Json = dict[str, Any]
EMPTY = (
    "lmcache.v1.gpu_connector",
    "lmcache.v1.distributed",
    "lmcache.v1.multiprocess",
    "lmcache.v1.platform.torch_ops",
)
OUT_OF, INTO = (1, 2), (5, 3)
"""Entries of the block axis that are moved, and where to."""


class LMCache:
    """The parts of it that are asked."""

    def __init__(self, source: Path) -> None:
        sys.path.insert(0, str(source))
        if importlib.util.find_spec("cachetools") is None:
            sys.modules["cachetools"] = _module("cachetools", TTLCache=dict)
        root: Any = importlib.import_module("lmcache")
        native: Any = importlib.import_module("lmcache.lmcache_native")
        if not hasattr(root, "device_ops"):
            root.device_ops = types.SimpleNamespace(PageBufferShapeDesc=native.PageBufferShapeDesc)
        for name in EMPTY:
            sys.modules[name] = _module(name, __path__=[str(source.joinpath(*name.split(".")))])
        self.version: str = root.__version__
        self.engine: Any = importlib.import_module("lmcache.utils").EngineType.VLLM
        self.detection: Any = importlib.import_module("lmcache.v1.gpu_connector.utils")
        self.groups: Any = importlib.import_module("lmcache.v1.kv_layer_groups")
        self.kernels: Any = importlib.import_module("lmcache.v1.platform.torch_ops.mp_mem_kernels")
        self.directions: Any = native.TransferDirection
        self.group_view: Any = importlib.import_module("lmcache.v1.multiprocess.group_view")


def _module(name: str, **contents: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(contents)
    return module


def answer(lmcache: LMCache, case: Case) -> Json:
    plan = plan_of(case)
    try:
        found: Json = {"layers": asked(lmcache, plan, case)}
    except ValueError as error:
        found = {"refused": str(error).partition(". ")[0].partition(" shape=")[0]}
    return {"shown": shown(plan)} | found


def asked(lmcache: LMCache, plan: Plan, case: Case) -> Json:
    names = attention(plan)
    buffer = BufferViews(torch.zeros(plan.buffer_size_bytes, dtype=torch.uint8))
    views = PlannedViews(plan).by_layer
    tensors = [buffer.tensor(views[name][0]) for name in names]
    of_group = [[names.index(name) for name in group.layers if name in names] for group in plan.groups]
    filled = [indices for indices in of_group if indices]  # a group of states is not shown
    normal, formats = lmcache.detection.normalize_and_discover_per_layer_formats(
        tensors, filled, lmcache.engine, {"kv_layout": case.says}
    )
    numbers = [next(group for group, indices in enumerate(filled) if i in indices) for i in range(len(names))]
    infos = [
        lmcache.group_view.EngineGroupInfo(
            engine_group_id=identity.engine_group_idx,
            layer_indices=tuple(indices),
            tokens_per_block=_entry_tokens(plan, names[indices[0]]),
        )
        for identity, indices in lmcache.groups.group_layers_by_identity(normal, formats, numbers)
    ]
    chunk = math.lcm(*(info.tokens_per_block for info in infos))
    manager = lmcache.groups.KVLayerGroupsManager(normal, formats, infos, chunk)
    if case.outcome == "recovered":
        for one in manager.kernel_groups:
            check_moved(lmcache, buffer, [views[names[index]][0] for index in one.layer_indices], normal, one)
    return {
        names[index]: described(lmcache, normal, one, index) | {"group": of_group.index(filled[one.engine_group_idx])}
        for one in manager.kernel_groups
        for index in one.layer_indices
    }


def _entry_tokens(plan: Plan, name: str) -> int:
    layer = plan.layers[name]
    return layer.block_size // layer.tensors[0].kernel_blocks_per_block


def described(lmcache: LMCache, normal: Any, one: Any, index: int) -> Json:
    """What it found out about layer `index`, one of the kernel group `one`."""
    shape, whole = one.shape_desc, normal[index].untyped_storage()
    (address,) = lmcache.detection.get_group_data_ptrs(normal, one.engine_kv_format, [index])
    return {
        "format": one.engine_kv_format.name,
        "num_blocks": shape.nb,
        "block_size": shape.bs,
        "num_kv_heads": shape.nh,
        "head_size": shape.hs,
        "kv_size": shape.kv_size,
        "item_size_bytes": shape.element_size,
        "block_stride": shape.block_stride_elems or None,
        "offset_bytes": address - whole.data_ptr(),
    }


def check_moved(
    lmcache: LMCache, buffer: BufferViews, views: list[ElementView], normal: list[torch.Tensor], one: Any
) -> None:
    """Its transfer moves blocks of the layers out of the pages and into others, and changes nothing else."""
    buffer.base.random_(generator=torch.Generator().manual_seed(0))
    expected = BufferViews(buffer.base.clone())
    for view in views:
        blocks = expected.tensor(replace(view, dtype=torch.int16))
        moved = blocks.index_select(view.block_axis, torch.tensor(OUT_OF))
        blocks.index_copy_(view.block_axis, torch.tensor(INTO), moved)
    layers = [normal[index] for index in one.layer_indices]
    shape, tokens = one.shape_desc, len(OUT_OF) * one.shape_desc.bs
    width = shape.nh * shape.hs
    planes = (2,) if shape.kv_size == 2 else ()
    kept = torch.empty((*planes, len(layers), tokens, width), dtype=layers[0].dtype)
    for direction, ids in ((lmcache.directions.D2H, OUT_OF), (lmcache.directions.H2D, INTO)):
        lmcache.kernels.multi_layer_block_kv_transfer(
            layers, [kept], torch.tensor(ids), "cpu", direction, shape, tokens, one.engine_kv_format, 0
        )
    if not torch.equal(buffer.base, expected.base):
        raise RuntimeError(f"blocks of {one} were not moved as they lie")


def main() -> None:
    with contextlib.redirect_stdout(sys.stderr):  # its log
        lmcache = LMCache(Path(sys.argv[1]))
        cases = {name: answer(lmcache, case) for name, case in CASES.items()}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(found)}" for name, found in cases.items())
    sys.stdout.write(f'{{"lmcache": "{lmcache.version}", "cases": {{\n{lines}\n}}}}\n')


if __name__ == "__main__":
    main()
