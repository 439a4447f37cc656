"""The driver functions that device memory is made of, one checked method each. Everything is in bytes and addresses.

Loaded lazily: importing this module needs neither a driver nor the bindings. Whatever the driver refuses is raised as
the `KvpageError` that `cuda_errors` chooses.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from kvpage.errors import NotSupported, how_to_install
from kvpage.memory.cuda_errors import driver_error

IPC_HANDLE_BYTES = 64


@cache
def _bindings() -> Any:
    """`cuda.bindings.driver`, initialised. Raises `NotSupported` saying which of the three things is missing."""
    try:
        ctypes.CDLL("libcuda.so.1")  # first, as it is what a machine without a GPU lacks, whatever else is installed
    except OSError as error:
        raise NotSupported(
            "the NVIDIA driver library libcuda.so.1 was not found: install the driver, or start the container with the"
            " device"
        ) from error
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise NotSupported(f"CUDA memory needs the package cuda-bindings: {how_to_install('cuda')}") from error
    try:
        result = driver.cuInit(0)[0]
    except RuntimeError as error:  # the bindings have their own error for a library that they cannot load
        raise NotSupported(f"cuda-bindings cannot use the NVIDIA driver library: {error}") from error
    if result != 0:
        raise _error(driver, "cuInit", result, {})
    return driver


def _error(driver: Any, operation: str, result: Any, facts: dict[str, Any]) -> Exception:
    known, name = driver.cuGetErrorName(result)
    return driver_error(operation, int(result), name.decode() if known == 0 and name else "an unknown code", facts)


class CudaDriver:
    """`facts` of a call (sizes, the device's UUID) go into its error."""

    def __init__(self) -> None:
        """Raises `NotSupported` when the bindings, the driver library or every device is missing."""
        self._driver = _bindings()

    def _call(self, operation: str, *arguments: Any, **facts: Any) -> Any:
        result, *values = getattr(self._driver, operation)(*arguments)
        if result != 0:
            raise _error(self._driver, operation, result, facts)
        return values[0] if len(values) == 1 else values

    # --- devices -----------------------------------------------------------------------------------------------------

    def version(self) -> int:
        """1000 times the major plus 10 times the minor number of the CUDA version that the driver supports."""
        return int(self._call("cuDriverGetVersion"))

    def count(self) -> int:
        return int(self._call("cuDeviceGetCount"))

    def uuid_bytes(self, ordinal: int) -> bytes:
        """16 bytes; of the instance where the device is a MIG instance."""
        # Bindings 12 have the older function, which does not know MIG, under the plain name.
        name = "cuDeviceGetUuid_v2" if hasattr(self._driver, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
        return bytes(self._call(name, ordinal, ordinal=ordinal).bytes)

    def name(self, ordinal: int) -> str:
        raw: bytes = self._call("cuDeviceGetName", 256, ordinal, ordinal=ordinal)
        return raw.split(b"\0", 1)[0].decode("utf-8", "replace")

    def total_bytes(self, ordinal: int) -> int:
        return int(self._call("cuDeviceTotalMem", ordinal, ordinal=ordinal))

    def shares_vmm(self, ordinal: int) -> bool:
        """Whether the driver claims that memory of the device can be mapped by descriptor. A claim is no proof."""
        attribute = self._driver.CUdevice_attribute
        return all(
            self._call("cuDeviceGetAttribute", wanted, ordinal, ordinal=ordinal)
            for wanted in (
                attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
                attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
            )
        )

    # --- contexts ----------------------------------------------------------------------------------------------------

    def retain_context(self, ordinal: int, uuid: str) -> Any:
        """The device's primary context, which torch uses too."""
        return self._call("cuDevicePrimaryCtxRetain", ordinal, device_uuid=uuid)

    def current_context(self) -> Any:
        """Of this thread; one that is 0 as a number where there is none."""
        return self._call("cuCtxGetCurrent")

    def set_context(self, context: Any) -> None:
        """In place of the one that is current in this thread; nothing else of its stack changes."""
        self._call("cuCtxSetCurrent", context)

    def synchronize(self) -> None:
        """Wait for all work of the current context. Raises what that work has failed with."""
        self._call("cuCtxSynchronize")

    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes of the current context's device."""
        free, total = self._call("cuMemGetInfo")
        return int(free), int(total)

    # --- memory by descriptor ----------------------------------------------------------------------------------------

    def _properties(self, ordinal: int) -> Any:
        driver = self._driver
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = ordinal
        properties.requestedHandleTypes = self._fd_type  # cannot be asked for later
        return properties

    @property
    def _fd_type(self) -> Any:
        return self._driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def granularity_bytes(self, ordinal: int) -> int:
        """Sizes of chunks are multiples of this."""
        minimum = self._driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self._call("cuMemGetAllocationGranularity", self._properties(ordinal), minimum, ordinal=ordinal))

    def create(self, ordinal: int, size_bytes: int, uuid: str) -> int:
        """Handle of new memory, to be released."""
        properties = self._properties(ordinal)
        return int(self._call("cuMemCreate", size_bytes, properties, 0, size_bytes=size_bytes, device_uuid=uuid))

    def export_fd(self, handle: int, uuid: str) -> int:
        """A new descriptor of the memory, which keeps it alive. The driver does not set close-on-exec."""
        return int(self._call("cuMemExportToShareableHandle", handle, self._fd_type, 0, device_uuid=uuid))

    def import_fd(self, fd: int, size_bytes: int, uuid: str) -> int:
        """Handle of the memory that `fd` names, to be released; `fd` stays the caller's."""
        facts = {"size_bytes": size_bytes, "device_uuid": uuid}
        return int(self._call("cuMemImportFromShareableHandle", fd, self._fd_type, **facts))

    def location(self, handle: int) -> int:
        """Ordinal of the device on which the memory lies."""
        return int(self._call("cuMemGetAllocationPropertiesFromHandle", handle).location.id)

    def release(self, handle: int) -> None:
        self._call("cuMemRelease", handle)

    def reserve(self, size_bytes: int, uuid: str) -> int:
        """Address of a range in which nothing is mapped yet."""
        return int(self._call("cuMemAddressReserve", size_bytes, 0, 0, 0, size_bytes=size_bytes, device_uuid=uuid))

    def free_range(self, address: int, size_bytes: int) -> None:
        """Exactly what was reserved."""
        self._call("cuMemAddressFree", address, size_bytes, size_bytes=size_bytes)

    def map(self, address: int, size_bytes: int, handle: int, uuid: str) -> None:
        """Nobody may access it yet. The mapping keeps the memory; the handle may be released."""
        self._call("cuMemMap", address, size_bytes, 0, handle, 0, size_bytes=size_bytes, device_uuid=uuid)

    def allow_access(self, address: int, size_bytes: int, ordinal: int, uuid: str, *, writable: bool) -> None:
        flags = self._driver.CUmemAccess_flags
        access = self._driver.CUmemAccessDesc()
        access.location.type = self._driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = ordinal
        read, both = flags.CU_MEM_ACCESS_FLAGS_PROT_READ, flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        access.flags = both if writable else read
        self._call("cuMemSetAccess", address, size_bytes, [access], 1, size_bytes=size_bytes, device_uuid=uuid)

    def unmap(self, address: int, size_bytes: int) -> None:
        """Exactly one earlier `map`. Does not wait for work that still uses it."""
        self._call("cuMemUnmap", address, size_bytes, size_bytes=size_bytes)

    # --- memory by 64-byte handle ------------------------------------------------------------------------------------

    def allocate(self, size_bytes: int, uuid: str) -> int:
        """Address of new memory in the current context."""
        return int(self._call("cuMemAlloc", size_bytes, size_bytes=size_bytes, device_uuid=uuid))

    def free(self, address: int) -> None:
        self._call("cuMemFree", address)

    def ipc_handle(self, address: int, uuid: str) -> bytes:
        """64 bytes that name the allocation at `address` to other processes of this machine."""
        handle = self._call("cuIpcGetMemHandle", address, device_uuid=uuid)
        return ctypes.string_at(handle.getPtr(), IPC_HANDLE_BYTES)  # field names differ between bindings, this does not

    def open_ipc(self, handle: bytes, size_bytes: int, uuid: str) -> int:
        """Address of the allocation that `handle` names, in the current context; the same for every open of it."""
        if len(handle) != IPC_HANDLE_BYTES:
            raise ValueError(f"an IPC handle of {len(handle)} bytes; it has {IPC_HANDLE_BYTES}")
        name = self._driver.CUipcMemHandle()
        ctypes.memmove(name.getPtr(), handle, IPC_HANDLE_BYTES)
        lazily = self._driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        facts = {"size_bytes": size_bytes, "device_uuid": uuid}
        return int(self._call("cuIpcOpenMemHandle", name, int(lazily), **facts))

    def allocation_bytes(self, address: int) -> int:
        """Size of the whole allocation that begins at `address`."""
        _, size_bytes = self._call("cuMemGetAddressRange", address)
        return int(size_bytes)

    def close_ipc(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", address)

    # --- bytes -------------------------------------------------------------------------------------------------------

    def fill(self, address: int, value: int, size_bytes: int) -> None:
        """Set every byte to `value`. Needs a current context."""
        self._call("cuMemsetD8", address, value, size_bytes, size_bytes=size_bytes)

    def read(self, address: int, size_bytes: int) -> bytes:
        """A copy. Needs a current context."""
        copy = (ctypes.c_char * size_bytes)()
        self._call("cuMemcpyDtoH", ctypes.addressof(copy), address, size_bytes, size_bytes=size_bytes)
        return copy.raw

    def write(self, address: int, data: bytes) -> None:
        """Needs a current context."""
        self._call("cuMemcpyHtoD", address, data, len(data), size_bytes=len(data))
