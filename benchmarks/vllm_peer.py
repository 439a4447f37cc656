"""vLLM's planner and its block pool, without the rest of vLLM: the peers of kvpage's where its files are at hand.

They are where `VLLM_SOURCE` says (a folder with `vllm` in it, as an unpacked wheel has), else where `import vllm` would
find them. Nothing is installed and no engine starts: the modules of `OWN` are vLLM's own text, every other module of
vLLM is a stand-in whose names stand for nothing. What is timed runs in the former only.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

SOURCE_VARIABLE = "VLLM_SOURCE"
OWN = frozenset(
    f"vllm.{name}"
    for name in (
        "utils.math_utils",
        "v1.core.block_pool",
        "v1.core.kv_cache_config_builder",
        "v1.core.kv_cache_planning",  # since 0.33; before, the planner was in kv_cache_utils
        "v1.core.kv_cache_utils",
        "v1.kv_cache_interface",
        "v1.kv_cache_layout",
        "v1.kv_cache_spec_registry",
    )
)
_SIZES = "block_size", "num_kv_heads", "head_size", "head_size_v", "sliding_window"
_BUILDER = "vllm.v1.core.kv_cache_planning.DefaultKVCacheConfigBuilder"


@dataclass(frozen=True, slots=True)
class Vllm:
    """The modules that were loaded, and the version that the files say they are of."""

    version: str
    block_pool: Any
    interface: Any
    planning: Any

    def pool(self, num_blocks: int) -> Any:
        """A `BlockPool` that caches, with one block more than asked for: it keeps one back."""
        return self.block_pool.BlockPool(num_blocks + 1, enable_caching=True, hash_block_size=16)

    def planner(self, wanted: dict[str, Any]) -> Callable[[], Any]:
        """Plans a request of kvpage's for one worker; the specs, which vLLM's models make, are made beforehand."""
        specs = {layer["name"]: self._spec(layer) for layer in wanted["layers"]}
        config = _config(wanted["max_model_len"], self.interface.KVCacheLayout.LBNHC)
        group = getattr(self.planning, "get_global_kv_cache_groups", None)  # since 0.33 the engine's first step of two

        def plan() -> Any:
            groups = () if group is None else (group(config, [specs]),)
            [planned] = self.planning.get_kv_cache_configs(config, [specs], [wanted["memory_bytes"]], *groups)
            return planned

        return plan

    def _spec(self, layer: dict[str, Any]) -> Any:
        sizes = {name: layer[name] for name in _SIZES if name in layer}
        kinds = {"full_attention": self.interface.FullAttentionSpec, "sliding_window": self.interface.SlidingWindowSpec}
        return kinds[layer["kind"]](dtype=getattr(torch, layer["dtype"]), **sizes)


def request_of(hashes: list[bytes]) -> Any:
    """What of a request the pool's `cache_full_blocks` reads: hashes that were made beforehand."""
    return SimpleNamespace(block_hashes=hashes)


@cache
def vllm() -> Vllm | None:
    """vLLM's modules, or None where its files are nowhere. Raises whatever they raise that cannot be loaded."""
    root = _source()
    if root is None:
        return None
    sys.meta_path.insert(0, _Finder(root))
    load = importlib.import_module
    interface = load("vllm.v1.kv_cache_interface")
    has_own_planning = (root / "vllm/v1/core/kv_cache_planning.py").exists()
    planning = load("vllm.v1.core.kv_cache_planning" if has_own_planning else "vllm.v1.core.kv_cache_utils")
    registry = load("vllm.v1.kv_cache_spec_registry").KVCacheSpecRegistry
    for spec in (interface.FullAttentionSpec, interface.SlidingWindowSpec):
        registry.register(spec, manager_class=object)
    return Vllm(_version(root), load("vllm.v1.core.block_pool"), interface, planning)


def _source() -> Path | None:
    named = os.environ.get(SOURCE_VARIABLE)
    if named:
        if not (Path(named) / "vllm").is_dir():
            raise SystemExit(f"{SOURCE_VARIABLE} names {named}, where no folder vllm is; name the folder it lies in")
        return Path(named)
    spec = importlib.util.find_spec("vllm")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent.parent


def _version(root: Path) -> str:
    found = re.search(r"^__version__ = version = '([^']+)'", (root / "vllm/_version.py").read_text(), re.MULTILINE)
    return found[1] if found else "unknown"


class _Finder:
    """Finds every module of vLLM: its own text for those of `OWN`, a stand-in for the others."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name.split(".")[0] != "vllm":
            return None
        if name in OWN:
            place = self._root / f"{name.replace('.', '/')}.py"
            return importlib.util.spec_from_file_location(name, place) if place.exists() else None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(_GIVEN.get(module.__name__, {}))


class _Nothing(type):
    """A class whose every attribute is its name: members of enumerations that nobody compares."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made: Any = _Nothing(name, (), {}) if name[0].isupper() else _does_nothing
        setattr(self, name, made)
        return made


def _does_nothing(*_: object, **__: object) -> None:
    pass


def _logger(_: str) -> SimpleNamespace:
    names = "debug", "info", "warning", "error", "debug_once", "info_once", "warning_once"
    return SimpleNamespace(**dict.fromkeys(names, _does_nothing))


def _resolved(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


_GIVEN: dict[str, dict[str, Any]] = {
    "vllm.logger": {"init_logger": _logger},
    "vllm.platforms": {"current_platform": SimpleNamespace(get_kv_cache_config_builder_cls=lambda _: _BUILDER)},
    "vllm.utils.import_utils": {"resolve_obj_by_qualname": _resolved},
    "vllm.utils.torch_utils": {"get_dtype_size": lambda dtype: torch.tensor([], dtype=dtype).element_size()},
}


def _config(max_model_len: int, layout: object) -> SimpleNamespace:
    """All that the planner reads of an engine's settings, as an engine has it that sets none of them."""
    return SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layout,
            mamba_cache_mode="none",
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
        ),
        max_in_flight_tokens=8192,
        model_config=SimpleNamespace(
            max_model_len=max_model_len, original_max_model_len=max_model_len, supports_kv_cache_grouping=False
        ),
        num_prefill_lookahead_tokens=0,
        parallel_config=SimpleNamespace(tensor_parallel_size=1, decode_context_parallel_size=1),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False, max_num_encoder_input_tokens=0),
        speculative_config=None,
    )
