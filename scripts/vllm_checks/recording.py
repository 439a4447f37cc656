"""kvpage's connector, with a note of what vLLM asks of it and in which order: the trace of tests/data."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Self

import torch
import vllm
from torch.overrides import TorchFunctionMode
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

from kvpage.integrations.vllm import KvpageConnector
from kvpage.integrations.vllm.engine_plan import specs_of

Fields = dict[str, Any]

CALLS: list[Fields] = []
"""Each call once, where it was first made, with the connector's role."""
TRACE: Fields = {"vllm": vllm.__version__, "calls": CALLS}
CACHES: dict[str, torch.Tensor] = {}
"""What vLLM has registered, by layer."""
DERIVED = ("page_size_bytes", "real_page_size_bytes", "state_content_size_bytes", "has_layer_views")


def note(role: str, call: str, **more: Any) -> None:
    if not any((noted["role"], noted["call"]) == (role, call) for noted in CALLS):
        CALLS.append({"role": role, "call": call, **more})


class RecordingConnector(KvpageConnector):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self.noted_role = role.name.lower()
        note(self.noted_role, "__init__")
        TRACE["config"] = config_of(kv_cache_config)
        layers = vllm_config.compilation_config.static_forward_context
        order = [name for name in layers if name in specs_of(kv_cache_config, ())]
        TRACE["backends"] = {name: backend_of(layers[name].get_attn_backend()) for name in order}
        super().__init__(vllm_config, role, kv_cache_config)

    def get_mem_pool_context(self) -> Any:
        note(self.noted_role, "get_mem_pool_context")
        context = super().get_mem_pool_context()
        return None if context is None else Noted(self.noted_role, context)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        CACHES.update(kv_caches)
        views = {name: view_of(tensor) for name, tensor in kv_caches.items()}
        note(self.noted_role, "register_kv_caches", tensors=views)
        super().register_kv_caches(kv_caches)


def _noted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: RecordingConnector, *args: Any, **kwargs: Any) -> Any:
        note(self.noted_role, name)
        return method(self, *args, **kwargs)

    return call


def _note_the_rest() -> None:
    """All public methods of the two bases, but class methods and what notes itself."""
    for owner in (KVConnectorBase_V1, SupportsHMA):
        for name, found in vars(owner).items():
            is_method = callable(found) and not name.startswith("_")
            if is_method and name not in vars(RecordingConnector):
                setattr(RecordingConnector, name, _noted(name, getattr(KvpageConnector, name)))


_note_the_rest()
TRACE["abstract"] = sorted({*KVConnectorBase_V1.__abstractmethods__, *SupportsHMA.__abstractmethods__})


class Noted(TorchFunctionMode):
    """Notes what is allocated flat and as int8 inside kvpage's context, which it hands on to."""

    def __init__(self, role: str, context: Any) -> None:
        super().__init__()
        self._role, self._context, self._both = role, context, ExitStack()

    def __enter__(self) -> Self:
        note(self._role, "enter")
        self._both.enter_context(self._context)
        super().__enter__()  # type: ignore[no-untyped-call] # last, so that it is asked first
        return self

    def __exit__(self, *reason: Any) -> Any:
        super().__exit__(*reason)  # type: ignore[no-untyped-call]
        note(self._role, "exit")
        return self._both.__exit__(*reason)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if options.get("dtype") is torch.int8:
            size, device = args[0] if args else options["size"], str(options.get("device"))
            note(self._role, f"torch.{func.__name__}", size=size, dtype="int8", device=device)
        return func(*args, **options)


def config_of(config: Any) -> Fields:
    groups = [
        {"layer_names": list(group.layer_names), "kv_cache_spec": spec_of(group.kv_cache_spec)}
        for group in config.kv_cache_groups
    ]
    tensors = [plain(dataclasses.asdict(tensor)) for tensor in config.kv_cache_tensors]
    return {
        "num_blocks": config.num_blocks,
        "kv_cache_layout": config.kv_cache_layout,
        "kv_cache_tensors": tensors,
        "kv_cache_groups": groups,
    }


def spec_of(spec: Any) -> Fields:
    """Class, fields with their defaults, and what a spec works out of them."""
    noted: Fields = {"classes": [owner.__name__ for owner in type(spec).__mro__ if owner is not object]}
    held = getattr(spec, "kv_cache_specs", None)
    if held is not None:
        return noted | {"kv_cache_specs": {name: spec_of(inner) for name, inner in held.items()}}
    noted["fields"] = {field.name: plain(getattr(spec, field.name)) for field in dataclasses.fields(spec)}
    noted["defaults"] = {
        field.name: plain(field.default)
        for field in dataclasses.fields(spec)
        if field.default is not dataclasses.MISSING
    }
    noted["derived"] = {name: plain(getattr(spec, name)) for name in DERIVED if hasattr(spec, name)}
    return noted


def backend_of(backend: Any) -> Fields:
    layouts: Any = getattr(backend, "supported_kv_cache_layouts", tuple)()
    sizes = backend.get_supported_kernel_block_sizes()
    return {
        "name": backend.__name__,
        "layouts": None if layouts is None else [layout.name for layout in layouts],
        "kernel_block_sizes": plain(sizes),
    }


def view_of(tensor: torch.Tensor) -> Fields:
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "strides_elems": list(tensor.stride()),
        "offset_elems": tensor.storage_offset(),
    }


def plain(value: Any) -> Any:
    """As JSON can say it: names of dtypes and of enumerations, `{"multiple_of": n}`."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, torch.dtype):
        return str(value)
    if hasattr(value, "base") and type(value).__name__ == "MultipleOf":
        return {"multiple_of": value.base}
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return [plain(inner) for inner in value]
    return value
