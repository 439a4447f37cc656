"""A vLLM that is not there: the modules that the connector imports, and an engine that does again what a real one did.

The traces in tests/data were recorded by `make test-vllm`: what vLLM planned, what it asked of the connector in which
order, and the tensors that it made. Nothing here computes a layout.
"""

from __future__ import annotations

import copy
import enum
import importlib
import json
import sys
from abc import ABC
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

DATA = Path(__file__).parents[1] / "data"
MODELS = ("llama", "gemma3", "gemma4", "falcon_h1")
CONNECTOR = "kvpage.integrations.vllm.connector"
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"

Fields = dict[str, Any]


def trace_of(model: str) -> Fields:
    """A copy, to be changed at will."""
    trace: Fields = json.loads((DATA / f"vllm_{model}.json").read_text())
    return trace


class Role(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


def _base_classes(trace: Fields) -> tuple[type, type]:
    """With all that vLLM called, as methods that do nothing, and what it leaves to its connectors as abstract."""
    names = {call["call"] for call in trace["calls"]} - {"__init__", "enter", "exit", "torch.zeros"}

    def nothing(_self: Any, *_args: Any, **_more: Any) -> None: ...

    def init(self: Any, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self._vllm_config, self._role, self._kv_cache_config = vllm_config, role, kv_cache_config

    def abstract(*_args: Any, **_more: Any) -> None: ...

    def bind(self: Any, metadata: Any = None) -> None:
        self.bound = metadata

    abstract.__isabstractmethod__ = True  # type: ignore[attr-defined]
    of_all_groups = {"request_finished_all_groups": abstract}
    inherited: Fields = dict.fromkeys(names - of_all_groups.keys(), nothing) | {"__init__": init}
    inherited |= {"bind_connector_metadata": bind, "_get_connector_metadata": lambda self: self.bound}
    inherited |= {name: abstract for name in trace["abstract"] if name not in of_all_groups}
    return type("KVConnectorBase_V1", (ABC,), inherited), type("SupportsHMA", (ABC,), of_all_groups)


@contextmanager
def standing_in(trace: Fields, *, version: str | None = None) -> Iterator[type]:
    """The connector's class, found as vLLM finds it."""
    modules: dict[str, ModuleType] = {}
    steps = BASE.split(".")
    for count in range(1, len(steps) + 1):
        name = ".".join(steps[:count])
        modules[name] = ModuleType(name)
    modules["vllm"].__version__ = version or trace["vllm"]  # type: ignore[attr-defined]
    connector_base, with_groups = _base_classes(trace)
    members = {
        "KVConnectorBase_V1": connector_base,
        "KVConnectorMetadata": type("KVConnectorMetadata", (), {}),
        "KVConnectorRole": Role,
        "SupportsHMA": with_groups,
    }
    vars(modules[BASE]).update(members)
    before = {name: sys.modules.get(name) for name in (*modules, CONNECTOR)}
    sys.modules.pop(CONNECTOR, None)
    sys.modules.update(modules)
    try:
        yield importlib.import_module("kvpage.integrations.vllm").KvpageConnector
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module


def spec_from(noted: Fields) -> Any:
    """An object with the classes, fields, defaults and answers of the spec that was noted."""
    if "kv_cache_specs" in noted:
        held: Fields = {name: spec_from(inner) for name, inner in noted["kv_cache_specs"].items()}
        return type(noted["classes"][0], (), {"kv_cache_specs": held})()
    owner: type = object
    for name in reversed(noted["classes"][1:]):
        owner = type(name, (owner,), {})
    spec = type(noted["classes"][0], (owner,), noted["defaults"] | noted["derived"])()
    vars(spec).update(noted["fields"])
    return spec


def config_from(noted: Fields) -> Any:
    groups = [
        SimpleNamespace(layer_names=group["layer_names"], kv_cache_spec=spec_from(group["kv_cache_spec"]))
        for group in noted["kv_cache_groups"]
    ]
    tensors = [SimpleNamespace(**tensor) for tensor in noted["kv_cache_tensors"]]
    return SimpleNamespace(**noted | {"kv_cache_groups": groups, "kv_cache_tensors": tensors})


def _kernel_blocks(noted: Any) -> Any:
    return SimpleNamespace(base=noted["multiple_of"]) if isinstance(noted, dict) else noted


def _layer_with(noted: Fields) -> Any:
    names = noted["layouts"]
    layouts = None if names is None else [SimpleNamespace(name=name) for name in names]
    members = {
        "supported_kv_cache_layouts": classmethod(lambda _cls: layouts),
        "get_supported_kernel_block_sizes": staticmethod(
            lambda: [_kernel_blocks(size) for size in noted["kernel_block_sizes"]]
        ),
    }
    backend = type(noted["name"], (), members)
    return SimpleNamespace(get_attn_backend=lambda: backend)


def vllm_config(trace: Fields, extra: Mapping[str, Any], **changes: Any) -> Any:
    """`changes`: fields of its `parallel_config`, `model_config` and `device_config`."""
    parallel = {"rank": 0, "world_size": 1, "data_parallel_size": 1, "data_parallel_index": 0}
    model = {"enable_sleep_mode": False, "enable_cumem_allocator": False}
    layers = {name: _layer_with(noted) for name, noted in trace["backends"].items()}
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=dict(extra)),
        parallel_config=SimpleNamespace(**parallel | changes.get("parallel_config", {})),
        model_config=SimpleNamespace(**model | changes.get("model_config", {})),
        device_config=SimpleNamespace(**{"device_type": "cpu"} | changes.get("device_config", {})),
        compilation_config=SimpleNamespace(static_forward_context=layers),
    )


class StandInEngine:
    """Makes the calls of a trace, once each, in their order."""

    def __init__(self, trace: Fields, connector: type, config: Any) -> None:
        self.trace, self.caches = copy.deepcopy(trace), {}  # type: tuple[Fields, dict[str, torch.Tensor]]
        self._connector, self._config = connector, config
        self.by_role: dict[str, Any] = {}
        self._context: Any = None
        self._buffer: torch.Tensor | None = None
        self.answers: Fields = {}

    def run(self, *, until: str | None = None) -> None:
        """All calls, or those before the first of that name."""
        for call in self.trace["calls"]:
            if call["call"] == until:
                return
            self.answers[call["call"]] = self._do(call)

    def run_again(self, name: str) -> None:
        """The call of that name, whatever was called before."""
        [call] = [call for call in self.trace["calls"] if call["call"] == name]
        self.answers[name] = self._do(call)

    def lose_the_buffer(self) -> None:
        """Go on with one from elsewhere."""
        assert self._buffer is not None
        self._buffer = torch.zeros_like(self._buffer)

    def _do(self, call: Fields) -> Any:
        name, role = call["call"], call["role"]
        if name == "__init__":
            self.by_role[role] = self.make(role)
        elif name == "enter":
            self._context = self.answers["get_mem_pool_context"]
            self._context.__enter__()
        elif name.startswith("torch."):
            self._allocate(call)
        elif name == "exit":
            self._context.__exit__(None, None, None)
        elif name == "register_kv_caches":
            self.caches = {layer: self._view(noted) for layer, noted in call["tensors"].items()}
            return self.by_role[role].register_kv_caches(self.caches)
        else:
            return getattr(self.by_role[role], name)(*ARGUMENTS.get(name, ()))
        return None

    def make(self, role: str) -> Any:
        return self._connector(self._config, Role[role.upper()], config_from(self.trace["config"]))

    def _allocate(self, call: Fields) -> None:
        try:
            self._buffer = torch.zeros(call["size"], dtype=torch.int8, device=call["device"])
        except BaseException as error:
            self._context.__exit__(type(error), error, error.__traceback__)
            raise

    def _view(self, noted: Fields) -> torch.Tensor:
        assert self._buffer is not None
        typed = self._buffer.view(getattr(torch, noted["dtype"]))
        return typed.as_strided(noted["shape"], noted["strides_elems"], noted["offset_elems"])

    def close(self) -> None:
        """As at the end of a process."""
        for connector in self.by_role.values():
            connector.shutdown()
        self.caches, self._buffer, self._context = {}, None, None
        self.answers.clear()


_NONE = object()
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "get_num_new_matched_tokens": (_NONE, 0),
    "update_state_after_alloc": (_NONE, _NONE, 0),
    "build_connector_meta": (_NONE,),
    "update_connector_output": (_NONE,),
    "wait_for_layer_load": ("a layer",),
    "save_kv_layer": ("a layer", _NONE, _NONE),
    "start_load_kv": (_NONE,),
    "request_finished_all_groups": (_NONE, ([],)),
}
