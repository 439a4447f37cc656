"""The pool that one rank of a vLLM engine keeps its cache in, and the moment in which vLLM takes it for its own."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode

from kvpage.client.attachment import Attachment
from kvpage.client.connection import attach
from kvpage.client.http import Client
from kvpage.client.leasing import open_lease
from kvpage.errors import Conflict, LayoutUnsupported, NotSupported, OutOfBlocks, SpecInvalid, StaleHandle, shorten
from kvpage.integrations.vllm.engine_checks import Registered, check_registered
from kvpage.integrations.vllm.engine_plan import EnginePlan
from kvpage.integrations.vllm.store_choice import STORE_KEYS
from kvpage.plans import Plan

_KEYS = ("pool", "run_dir", "device")  # and those of the store
_MAKING_S = 600.0
"""Committing memory takes a worker about 0.3 s for each GiB."""
_PATIENCE_S = 10.0
"""An engine that was killed gives its blocks back when the worker has noticed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolChoice:
    """Where the cache of a rank goes."""

    name: str
    device: str
    run_dir: str | None

    @classmethod
    def of(cls, vllm_config: Any) -> Self:
        """From `kv_connector_extra_config`. Raises `SpecInvalid` for what is not one of its keys or no text."""
        extra: Mapping[str, Any] = vllm_config.kv_transfer_config.kv_connector_extra_config
        for key, value in extra.items():
            if key in STORE_KEYS:
                continue
            if key not in _KEYS:
                taken = ", ".join((*_KEYS, *STORE_KEYS))
                raise SpecInvalid(f"kv_connector_extra_config has {shorten(key)!r}; kvpage takes {taken}")
            if not isinstance(value, str) or not value:
                raise SpecInvalid(f"kv_connector_extra_config: {key} is a text, not {shorten(repr(value))}")
        parallel = vllm_config.parallel_config
        name = extra.get("pool", "vllm")
        if parallel.data_parallel_size > 1:
            name += f"-dp{parallel.data_parallel_index}"
        if parallel.world_size > 1:
            name += f"-rank{parallel.rank}"
        device = extra.get("device") or _default_device(str(vllm_config.device_config.device_type))
        return cls(name=name, device=device.replace("{rank}", str(parallel.rank)), run_dir=extra.get("run_dir"))


def _default_device(device_type: str) -> str:
    if device_type != "cpu":
        raise SpecInvalid(
            f'the engine runs on {device_type}: name the device of the pool in kv_connector_extra_config, as "cuda:0", '
            f'or "cuda:{{rank}}" for several ranks'
        )
    return "host"


class EnginePool:
    """Attached, leased whole, and all zeros; `close` gives it back, and keeps the memory for the next engine."""

    def __init__(self, plan: Plan, attachment: Attachment, owned: ExitStack) -> None:
        self.plan, self.name = plan, attachment.name
        self._memory: torch.Tensor | None = attachment.buffer.view(torch.int8)
        self._owned = owned
        self._allocation: Allocation | None = None

    @classmethod
    def open(cls, planned: EnginePlan, choice: PoolChoice) -> Self:
        """The pool of that name, made if there is none. Raises as `Client.create_pool`, `attach` and `open_lease`, and
        `Conflict` where another engine has it."""
        plan, device, run_dir = planned.plan, choice.device, choice.run_dir
        with Client(run_dir=run_dir) as client:
            client.create_pool(planned.request, name=choice.name, device=device, plan_id=plan.plan_id, wait_s=_MAKING_S)
        with ExitStack() as owned:
            attachment = owned.enter_context(attach(choice.name, plan_id=plan.plan_id, device=device, run_dir=run_dir))
            lease_name = f"vllm-{os.getpid()}-{secrets.token_hex(4)}"
            lease = open_lease(choice.name, name=lease_name, clear=_cleared_below, device=device, run_dir=run_dir)
            owned.enter_context(lease)
            try:
                lease.allocate(0, plan.num_blocks - 1, wait_s=_PATIENCE_S)
            except OutOfBlocks as error:
                raise Conflict(
                    f"pool {choice.name!r} is in use by others, and an engine needs it whole: {error.message}; "
                    f'give this engine a pool of its own by "pool" in kv_connector_extra_config'
                ) from error
            attachment.buffer.zero_()  # what an engine before has left is no number to this one's attention
            pool = cls(plan, attachment, owned)
            pool._owned = owned.pop_all()
        return pool

    @property
    def memory(self) -> torch.Tensor:
        """The whole pool, int8. Raises `StaleHandle` once closed."""
        if self._memory is None:
            raise StaleHandle(f"pool {self.name!r} was given back; start another engine")
        return self._memory

    def allocation(self) -> Allocation:
        """A context in which vLLM allocates its cache. Raises `Conflict` when asked for twice."""
        if self._allocation is not None:
            raise Conflict(f"vLLM asks a second time for the memory of pool {self.name!r}, which has one cache only")
        self._allocation = Allocation(self.name, self.memory)
        return self._allocation

    def check_registered(self, tensors: Mapping[str, Any]) -> None:
        """Raises `Conflict` where the cache is not in the pool, `LayoutUnsupported` where it lies there otherwise."""
        if self._allocation is None or self._allocation.hits != 1:
            raise Conflict(
                f"vLLM has a cache that was not allocated in pool {self.name!r}: another connector or allocator gave "
                f"the memory, and only one may"
            )
        check_registered(self.plan, {name: self._registered(name, tensor) for name, tensor in tensors.items()})

    def _registered(self, layer: str, tensor: Any) -> Registered:
        if not isinstance(tensor, torch.Tensor):
            raise LayoutUnsupported(f"layer {shorten(layer)!r} was registered as {type(tensor).__name__}, not a tensor")
        if tensor.untyped_storage().data_ptr() != self.memory.untyped_storage().data_ptr():
            raise Conflict(
                f"the cache of layer {shorten(layer)!r} does not lie in pool {self.name!r}: another connector or "
                f"allocator gave the memory, and only one may"
            )
        item = tensor.dtype.itemsize
        return Registered(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            strides_bytes=tuple(stride * item for stride in tensor.stride()),
            offset_bytes=tensor.data_ptr() - self.memory.data_ptr(),
        )

    def close(self) -> None:
        """May be called twice. vLLM's tensors stay valid while they live."""
        self._memory = None
        self._owned.close()


def _cleared_below(_group: int, _ids: object) -> None:
    """Which blocks must be cleared makes no difference where all are."""


class Allocation(TorchFunctionMode):
    """Inside it, the one `torch.zeros` of int8 that is as large as the pool answers with the pool's memory.

    Everything else goes its way. Left without an error, it raises `Conflict` unless there was exactly one.
    """

    def __init__(self, pool: str, memory: torch.Tensor) -> None:
        super().__init__()
        self._pool, self._memory = pool, memory
        self.hits = 0
        self._others: list[int] = []
        """Sizes of what was allocated in the same way, and was not the pool's."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        size_bytes = _int8_zeros(func, args, options)
        if size_bytes is None:
            return func(*args, **options)
        if size_bytes != self._memory.numel():
            self._others.append(size_bytes)
            return func(*args, **options)
        self.hits += 1
        if self.hits > 1:
            raise Conflict(f"vLLM allocates {size_bytes} bytes twice, and pool {self._pool!r} has them once")
        asked = torch.device(options.get("device") or "cpu")
        if asked.type != self._memory.device.type:
            raise NotSupported(f"vLLM allocates on {asked}, pool {self._pool!r} is on {self._memory.device}")
        return self._memory

    def __exit__(self, kind: Any, *rest: Any) -> None:
        super().__exit__(kind, *rest)  # type: ignore[no-untyped-call]
        if kind is None and self.hits != 1:
            seen = f"it allocated {' and '.join(map(str, self._others))}" if self._others else "it allocated none"
            raise Conflict(
                f"vLLM did not take the {self._memory.numel()} bytes of pool {self._pool!r}: {seen}; its cache would "
                f"lie elsewhere"
            )


def _int8_zeros(func: Callable[..., Any], args: tuple[Any, ...], options: Mapping[str, Any]) -> int | None:
    """Bytes of a flat `torch.zeros(…, dtype=torch.int8)`; None for any other call."""
    if func is not torch.zeros or options.get("dtype") is not torch.int8:
        return None
    size = args[0] if args else options.get("size")
    if isinstance(size, tuple | list) and len(size) == 1:
        size = size[0]
    return size if isinstance(size, int) and len(args) <= 1 else None
