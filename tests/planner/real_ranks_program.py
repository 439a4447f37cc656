"""What the real vLLM 0.24 in the folder given makes of models in pipeline stages; prints its answers as JSON.

Of vLLM only the interface module and `kv_cache_utils` are loaded; what they import for other purposes is stood in for.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from integrations.real_vllm_program import load
from integrations.spec_of import spec_of

Json = dict[str, Any]


BASES = {  # what 0.24's managers of blocks register: spec, and the spec whose like may share its group
    "FullAttentionSpec": "FullAttentionSpec",
    "MLAAttentionSpec": "FullAttentionSpec",
    "SlidingWindowSpec": "SlidingWindowSpec",
    "SlidingWindowMLASpec": "SlidingWindowMLASpec",
    "ChunkedLocalAttentionSpec": "ChunkedLocalAttentionSpec",
    "MambaSpec": "MambaSpec",
}


class Silent:
    def __getattr__(self, _name: str) -> Any:
        return lambda *_args, **_more: None


def load_rule(source: Path) -> tuple[Any, Any]:
    """The interface module, and the one with `get_kv_cache_configs`."""
    load(source)  # for the stand-ins; then again with vLLM's own registry of specs
    for name in ("vllm.v1.kv_cache_spec_registry", "vllm.v1.kv_cache_interface"):
        del sys.modules[name]
    core = types.ModuleType("vllm.v1.core")
    core.__path__ = [str(source / "vllm" / "v1" / "core")]
    sys.modules["vllm.v1.core"] = core
    leaves: dict[str, Json] = {
        "vllm.envs": {},
        "vllm.config": {"VllmConfig": object},
        "vllm.logger": {"init_logger": lambda _name: Silent()},
        "vllm.utils.hashing": {"sha256_cbor": None, "xxhash_cbor": None},
        "vllm.utils.math_utils": {"cdiv": lambda a, b: -(-a // b), "round_up": lambda a, b: -(-a // b) * b},
        "vllm.utils.mem_utils": {"format_gib": lambda size: f"{size / 2**30:.2f}"},
        "vllm.v1.request": {"Request": object},
        "vllm.v1.utils": {"tensor_data": None},
    }
    for name, contents in leaves.items():
        module = types.ModuleType(name)
        vars(module).update(contents)
        sys.modules[name] = module
        parent, _, leaf = name.rpartition(".")
        setattr(sys.modules[parent], leaf, module)
    interface = importlib.import_module("vllm.v1.kv_cache_interface")
    registry = importlib.import_module("vllm.v1.kv_cache_spec_registry").KVCacheSpecRegistry
    for kind, base in BASES.items():
        registry.register(getattr(interface, kind), object, getattr(interface, base))
    return interface, importlib.import_module("vllm.v1.core.kv_cache_utils")


def config_of(case: Json) -> Any:
    return SimpleNamespace(
        cache_config=SimpleNamespace(num_gpu_blocks_override=None, mamba_cache_mode="none"),
        model_config=SimpleNamespace(max_model_len=case["max_model_len"], original_max_model_len=case["max_model_len"]),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=8192, max_num_encoder_input_tokens=0, disable_hybrid_kv_cache_manager=False
        ),
        kv_transfer_config=None,
        speculative_config=None,
    )


def read_by_block_stride(spec: Any) -> Any:
    """As the default backends say of their layers."""
    if not hasattr(spec, "indexes_kv_by_block_stride"):
        return spec
    return dataclasses.replace(spec, indexes_kv_by_block_stride=True)


def answer(case: Json, interface: Any, rule: Any) -> Json:
    stages = [
        {
            layer["name"]: read_by_block_stride(spec_of(layer, interface, lambda name: getattr(torch, name)))
            for layer in stage
        }
        for stage in case["stages"]
    ]
    try:
        found = rule.get_kv_cache_configs(config_of(case), stages, case["memories"])
    except (AssertionError, ValueError, NotImplementedError) as error:
        return {"refused": repr(error)}
    return {
        "groups": [[group.layer_names for group in one.kv_cache_groups] for one in found],
        "num_blocks": [one.num_blocks for one in found],
        "bytes": [sum(tensor.size for tensor in one.kv_cache_tensors) for one in found],
        "block_sizes": [[group.kv_cache_spec.block_size for group in one.kv_cache_groups] for one in found],
        "concurrency": [
            rule.get_max_concurrency_for_kv_cache_config(config_of(case), one)
            if any(group.layer_names for group in one.kv_cache_groups) else math.nan
            for one in found
        ],
    }  # fmt: skip


def main() -> None:
    interface, rule = load_rule(Path(sys.argv[1]))
    cases = json.load(sys.stdin)
    sys.stdout.write(json.dumps([answer(case, interface, rule) for case in cases]))


if __name__ == "__main__":
    main()
