"""Run as a program: a process that calls the driver as it is told, one JSON message on the socket it inherits.

Uses ctypes and nothing else, so that what it sees is the binary interface itself.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

POSIX_FD = 1
MESSAGE_BYTES = 65536


class Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class Properties(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class Access(ctypes.Structure):
    _fields_ = [("location", Location), ("flags", ctypes.c_int)]


class IpcHandle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 64)]


def properties(device: int, types: int) -> Properties:
    return Properties(type=1, handle_types=types, location=Location(1, device))


class Program:
    """One method for each command; it answers the driver's result code and a value."""

    def __init__(self) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self.fds_in: list[int] = []
        self.fds_out: list[int] = []

    def call(self, function: str, *arguments: int) -> tuple[int, None]:
        """A function that takes only numbers and addresses."""
        return self._driver[function](*map(ctypes.c_uint64, arguments)), None

    def out(self, function: str, *arguments: int) -> tuple[int, int]:
        """The same for one that writes a number to its first argument."""
        value = ctypes.c_uint64()
        return self._driver[function](ctypes.byref(value), *map(ctypes.c_uint64, arguments)), value.value

    def out2(self, function: str, *arguments: int) -> tuple[int, list[int]]:
        """The same for one that writes to its first two."""
        values = ctypes.c_uint64(), ctypes.c_uint64()
        result = self._driver[function](*map(ctypes.byref, values), *map(ctypes.c_uint64, arguments))
        return result, [value.value for value in values]

    def create(self, size: int, device: int = 0, types: int = POSIX_FD, flags: int = 0) -> tuple[int, int]:
        handle = ctypes.c_uint64()
        made = self._driver.cuMemCreate
        wanted = ctypes.byref(properties(device, types))
        return made(ctypes.byref(handle), ctypes.c_size_t(size), wanted, ctypes.c_uint64(flags)), handle.value

    def granularity(self, device: int = 0) -> tuple[int, int]:
        value = ctypes.c_size_t()
        wanted = ctypes.byref(properties(device, POSIX_FD))
        return self._driver.cuMemGetAllocationGranularity(ctypes.byref(value), wanted, 0), value.value

    def device_of(self, handle: int) -> tuple[int, int]:
        found = Properties()
        answer = self._driver.cuMemGetAllocationPropertiesFromHandle
        return answer(ctypes.byref(found), ctypes.c_uint64(handle)), found.location.id

    def export(self, handle: int, types: int = POSIX_FD) -> tuple[int, bool | None]:
        """The descriptor leaves with the answer; the value says whether children would inherit it."""
        fd = ctypes.c_int(-1)
        answer = self._driver.cuMemExportToShareableHandle
        result = answer(ctypes.byref(fd), ctypes.c_uint64(handle), types, ctypes.c_uint64(0))
        if result != 0:
            return result, None
        self.fds_out.append(fd.value)
        return result, os.get_inheritable(fd.value)

    def import_(self, types: int = POSIX_FD) -> tuple[int, int]:
        """Of the descriptor that came with the command."""
        handle = ctypes.c_uint64()
        fd = ctypes.c_void_p(self.fds_in[0])
        return self._driver.cuMemImportFromShareableHandle(ctypes.byref(handle), fd, types), handle.value

    def access(self, pointer: int, size: int, flags: int = 3, device: int = 0) -> tuple[int, None]:
        wanted = Access(location=Location(1, device), flags=flags)
        given = self._driver.cuMemSetAccess
        return given(ctypes.c_uint64(pointer), ctypes.c_size_t(size), ctypes.byref(wanted), ctypes.c_size_t(1)), None

    def ipc_handle(self, pointer: int) -> tuple[int, str]:
        handle = IpcHandle()
        result = self._driver.cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(pointer))
        return result, bytes(handle).hex()

    def ipc_open(self, handle: str, flags: int = 1) -> tuple[int, int]:
        pointer = ctypes.c_uint64()
        given = IpcHandle.from_buffer_copy(bytes.fromhex(handle))
        return self._driver.cuIpcOpenMemHandle_v2(ctypes.byref(pointer), given, flags), pointer.value

    def to_device(self, pointer: int, data: str) -> tuple[int, None]:
        raw = bytes.fromhex(data)
        return self._driver.cuMemcpyHtoD_v2(ctypes.c_uint64(pointer), raw, ctypes.c_size_t(len(raw))), None

    def to_host(self, pointer: int, size: int) -> tuple[int, str]:
        raw = ctypes.create_string_buffer(size)
        return self._driver.cuMemcpyDtoH_v2(raw, ctypes.c_uint64(pointer), ctypes.c_size_t(size)), raw.raw.hex()

    def peek(self, pointer: int, size: int) -> tuple[int, str]:
        """Past the driver, as a kernel would."""
        return 0, ctypes.string_at(pointer, size).hex()

    def poke(self, pointer: int, data: str) -> tuple[int, None]:
        raw = bytes.fromhex(data)
        ctypes.memmove(pointer, raw, len(raw))
        return 0, None

    def text(self, function: str, device: int) -> tuple[int, str]:
        raw = ctypes.create_string_buffer(128)
        return self._driver[function](raw, 128, device), raw.value.decode()

    def uuid(self, device: int) -> tuple[int, str]:
        raw = (ctypes.c_ubyte * 16)()
        return self._driver.cuDeviceGetUuid_v2(raw, device), bytes(raw).hex()

    def attribute(self, number: int, device: int = 0) -> tuple[int, int]:
        value = ctypes.c_int()
        return self._driver.cuDeviceGetAttribute(ctypes.byref(value), number, device), value.value

    def context_state(self, device: int) -> tuple[int, int]:
        """1 while the device's primary context is active."""
        flags, active = ctypes.c_uint(), ctypes.c_int()
        ask = self._driver.cuDevicePrimaryCtxGetState
        return ask(device, ctypes.byref(flags), ctypes.byref(active)), active.value

    def pointer_attribute(self, number: int, pointer: int) -> tuple[int, int]:
        """By the plural form, which also answers for what is no device memory."""
        value = ctypes.c_int64()
        data = (ctypes.c_void_p * 1)(ctypes.addressof(value))
        answer = self._driver.cuPointerGetAttributes
        result = answer(1, (ctypes.c_int * 1)(number), data, ctypes.c_uint64(pointer))
        return result, ctypes.c_int32(value.value & 0xFFFFFFFF).value

    def error_name(self, code: int) -> tuple[int, str | None]:
        name = ctypes.c_char_p()
        result = self._driver.cuGetErrorName(code, ctypes.byref(name))
        return result, None if name.value is None else name.value.decode()

    def address_of(self, function: str, version: int) -> tuple[int, int | None]:
        code, status = ctypes.c_void_p(), ctypes.c_int(-1)
        find = self._driver.cuGetProcAddress_v2
        result = find(function.encode(), ctypes.byref(code), version, ctypes.c_uint64(0), ctypes.byref(status))
        return result, code.value

    def live(self) -> tuple[int, dict[str, int]]:
        from support.fakecuda import live

        return 0, live()

    def faults(self, schedule: str) -> tuple[int, None]:
        return self._driver.kvpage_fakecuda_set_faults(schedule.encode()), None

    def open_fds(self) -> tuple[int, int]:
        return 0, len(os.listdir("/proc/self/fd"))

    def in_forked_child(self, function: str) -> tuple[int, None]:
        """The result code of `function` in a child that has not started a new program."""
        child = os.fork()
        if child == 0:
            value = ctypes.c_uint64()
            os._exit(self._driver[function](ctypes.byref(value)))
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), None


def main() -> None:
    program = Program()
    threads: dict[str, ThreadPoolExecutor] = {}
    with socket.socket(fileno=int(sys.argv[1])) as sock:
        while True:
            message, program.fds_in, _, _ = socket.recv_fds(sock, MESSAGE_BYTES, 8)
            if not message:
                break
            command: dict[str, Any] = json.loads(message)
            method = getattr(program, command["do"])
            if thread := command["thread"]:
                pool = threads.setdefault(thread, ThreadPoolExecutor(1))
                future = pool.submit(method, *command["arguments"])
                answer = (0, None) if command["background"] else future.result()
            else:
                answer = method(*command["arguments"])
            socket.send_fds(sock, [json.dumps(answer).encode()], program.fds_out)
            for fd in (*program.fds_in, *program.fds_out):
                os.close(fd)
            program.fds_out.clear()


if __name__ == "__main__":
    main()
