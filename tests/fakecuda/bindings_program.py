"""Run as a program: what kvpage does with the driver, through cuda-bindings and cuda-core. Prints one JSON object.

An argument is the path of a library to load first, in place of LD_LIBRARY_PATH.
"""

from __future__ import annotations

import ctypes
import json
import sys
import weakref
from typing import Any

if len(sys.argv) > 1:
    ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)

from cuda.bindings import driver
from cuda.core import Buffer, Device

facts: dict[str, Any] = {}


def call(function: str, *arguments: Any) -> Any:
    """What the call gives besides its code, which must be success."""
    code, *values = getattr(driver, function)(*arguments)
    assert code == driver.CUresult.CUDA_SUCCESS, f"{function} answered {code}"
    return values[0] if len(values) == 1 else values


class Owner:
    """Stands for what keeps a mapping alive."""


class DlpackTensor(ctypes.Structure):
    """The beginning of DLPack's DLTensor."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("num_dimensions", ctypes.c_int32),
    ]


def capsule_content(capsule: Any) -> DlpackTensor:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    address = get(capsule, b"dltensor")
    assert address is not None
    return DlpackTensor.from_address(address)


call("cuInit", 0)
facts["name"] = call("cuDeviceGetName", 100, 1).rstrip(b"\0 ").decode()
facts["uuid"] = call(
    "cuDeviceGetUuid_v2" if hasattr(driver, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid", 1
).bytes.hex()

prop = driver.CUmemAllocationProp()
prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
prop.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
prop.location.id = 1
posix_fd = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
prop.requestedHandleTypes = posix_fd
minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
grain = call("cuMemGetAllocationGranularity", prop, minimum)

handle = call("cuMemCreate", 2 * grain, prop, 0)
fd = call("cuMemExportToShareableHandle", handle, posix_fd, 0)
imported = call("cuMemImportFromShareableHandle", fd, posix_fd)
facts["location"] = call("cuMemGetAllocationPropertiesFromHandle", imported).location.id
base = call("cuMemAddressReserve", 4 * grain, 0, 0, 0)
call("cuMemMap", base, 2 * grain, 0, imported, 0)
call("cuMemRelease", imported)
access = driver.CUmemAccessDesc()
access.location = prop.location
access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
call("cuMemSetAccess", base, 2 * grain, [access], 1)
ctypes.memmove(int(base) + grain, b"kvpage", 6)

Device(1).set_current()
owner = Owner()
gone = weakref.ref(owner)
buffer = Buffer.from_handle(int(base), 4 * grain, owner=owner)
facts["dlpack_device"] = buffer.__dlpack_device__()
capsule = buffer.__dlpack__()
content = capsule_content(capsule)
facts["dlpack"] = [content.data == int(base), content.device_type, content.device_id, content.num_dimensions]
versioned = buffer.__dlpack__(max_version=(1, 0))
del owner, buffer, capsule
facts["owner_lives_with_the_capsule"] = gone() is not None
del versioned
facts["owner_goes_with_the_capsule"] = gone() is None
hole = Buffer.from_handle(int(base) + 2 * grain, grain, owner=Owner())
facts["dlpack_device_of_a_hole"] = hole.__dlpack_device__()

read = bytearray(6)
call("cuMemcpyDtoH", read, int(base) + grain, 6)
facts["read"] = read.decode()
legacy = call("cuMemAlloc", grain)
facts["ipc_handle"] = ctypes.string_at(call("cuIpcGetMemHandle", legacy).getPtr(), 8).decode()
facts["refused"] = driver.cuMemUnmap(base, grain)[0].name
call("cuMemFree", legacy)
call("cuCtxSynchronize")
call("cuMemUnmap", base, 2 * grain)
call("cuMemAddressFree", base, 4 * grain)
call("cuMemRelease", handle)
sys.stdout.write(json.dumps(facts))
