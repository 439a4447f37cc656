"""torch on the device of a check."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gpu_checks.gpu import Gpu
from gpu_checks.trial import DOUBLE, Skip
from kvpage.errors import DeviceUnavailable
from kvpage.memory.base import Mapping
from kvpage.memory.cuda_mapping import CudaMapping

if TYPE_CHECKING:
    import torch


def torch_device(uuid: str) -> torch.device:
    """torch's name of the device. Raises `Skip` when torch cannot use it."""
    try:
        import torch
    except ImportError as error:
        raise Skip(f"torch cannot be imported: {error}") from error
    if torch.version.cuda is None:
        raise Skip(f"torch {torch.__version__} is a build without CUDA")
    if not torch.cuda.is_available():
        raise Skip(f"torch {torch.__version__} for CUDA {torch.version.cuda} sees no device")
    for ordinal in range(torch.cuda.device_count()):
        if same_uuid(str(torch.cuda.get_device_properties(ordinal).uuid), uuid):
            torch.cuda.set_device(ordinal)
            torch.zeros(1, device="cuda")  # its context, before anybody counts memory
            return torch.device("cuda", ordinal)
    raise Skip(f"torch does not see {uuid}")


def torch_on(uuid: str) -> Any:
    """The torch module, with the device as its current one. Raises `Skip` when torch cannot use it.

    Untyped: half of what checks call of it (events, graphs, streams) has no types.
    """
    torch_device(uuid)
    import torch

    return torch


def wrap_for(gpu: Gpu) -> Callable[[Mapping], torch.Tensor]:
    """kvpage's own; of the driver double, whose memory is host memory, one that torch without CUDA can use."""
    if DOUBLE in gpu.device.name:
        return _host_bytes
    torch_device(gpu.uuid)
    from kvpage.client.views import wrap_mapping

    return wrap_mapping


def _host_bytes(mapping: Mapping) -> torch.Tensor:
    import torch

    array = (ctypes.c_ubyte * mapping.size_bytes).from_address(mapping.address)
    array.claim = mapping.claim  # type: ignore[attr-defined] # torch keeps the array, and the array this
    return torch.frombuffer(array, dtype=torch.uint8)


def same_uuid(one: str, other: str) -> bool:
    """torch leaves out `GPU-`."""
    return _bare(one) == _bare(other)


def _bare(uuid: str) -> str:
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")


def bytes_of(mapping: CudaMapping) -> torch.Tensor:
    """uint8, shape (size_bytes,); keeps the memory mapped."""
    try:
        return through_dlpack(mapping)
    except (ImportError, AttributeError, TypeError, DeviceUnavailable):  # no cuda-core, or one of before 1.0
        return through_array_interface(mapping)


def through_dlpack(mapping: CudaMapping) -> torch.Tensor:
    """kvpage's own way."""
    from kvpage.client.views import wrap_mapping

    return wrap_mapping(mapping)


def through_array_interface(mapping: CudaMapping) -> torch.Tensor:
    """For machines without a cuda-core that can do the other."""
    import torch

    return torch.as_tensor(_Interface(mapping), device=torch.device("cuda", mapping.device.ordinal))


class _Interface:
    """CUDA array interface, version 3. torch keeps this object, and it the claim."""

    def __init__(self, mapping: CudaMapping) -> None:
        self._claim = mapping.claim
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (mapping.size_bytes,),
            "typestr": "|u1",
            "data": (mapping.address, False),
            "version": 3,
        }
