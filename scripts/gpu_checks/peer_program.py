"""Run as a program: the other process of a check. One JSON command a packet; a descriptor travels beside it."""

from __future__ import annotations

import base64
import json
import os
import socket
import sys
from typing import TYPE_CHECKING, Any

from gpu_checks.gpu import Gpu
from gpu_checks.peer import MESSAGE_BYTES
from kvpage.memory.cuda import CudaChunk, CudaIpcMemory, CudaVmmMemory
from kvpage.memory.cuda_mapping import CudaMapping

if TYPE_CHECKING:
    import torch

KINDS: dict[str, type[CudaVmmMemory | CudaIpcMemory]] = {"cuda_vmm": CudaVmmMemory, "cuda_ipc": CudaIpcMemory}


class Program:
    """One method for each command; what it returns is the answer, `fd` in it is sent as a descriptor."""

    def __init__(self, sock: socket.socket, device_uuid: str) -> None:
        self.socket = sock
        self.device_uuid = device_uuid
        self._gpu: Gpu | None = None
        self.chunk: CudaChunk | None = None
        self._mapping: CudaMapping | None = None
        self._tensor: torch.Tensor | None = None

    @property
    def gpu(self) -> Gpu:
        """Made when it is first needed: a process that only holds memory must not touch the driver."""
        if self._gpu is None:
            self._gpu = Gpu(self.device_uuid)
        return self._gpu

    @property
    def mapping(self) -> CudaMapping:
        assert self._mapping is not None
        return self._mapping

    def create(self, fd: int | None, *, size_bytes: int, kind: str = "cuda_vmm") -> dict[str, Any]:
        """The other end gets a descriptor, and this process keeps one."""
        chunk = self.chunk = KINDS[kind](self.device_uuid).create(size_bytes)
        return {"fd": chunk.fd, "handle": base64.b64encode(chunk.handle).decode()}

    def attach(
        self, fd: int | None, *, size_bytes: int, kind: str = "cuda_vmm", handle: str = "", writable: bool = True
    ) -> dict[str, Any]:
        assert fd is not None
        with KINDS[kind](self.device_uuid).import_chunk(fd, size_bytes, base64.b64decode(handle)) as chunk:
            self._mapping = chunk.map(writable=writable)
        return {}

    def detach(self, fd: int | None) -> dict[str, Any]:
        self._tensor = None
        self.mapping.close()
        return {"unmapped": self.mapping.unmapped}

    def bind(self, fd: int | None) -> dict[str, Any]:
        """Take a context on the device."""
        self.gpu.synchronize()
        return {}

    def fill(self, fd: int | None, *, value: int, size_bytes: int, offset: int = 0) -> dict[str, Any]:
        self.gpu.fill(self.mapping.address + offset, value, size_bytes)
        return {}

    def read(self, fd: int | None, *, size_bytes: int, offset: int = 0) -> dict[str, Any]:
        return {"bytes": self.gpu.read(self.mapping.address + offset, size_bytes).hex()}

    @property
    def tensor(self) -> torch.Tensor:
        from gpu_checks.tensors import bytes_of, torch_device

        if self._tensor is None:
            torch_device(self.device_uuid)
            self._tensor = bytes_of(self.mapping)
        return self._tensor

    def kernel_fill(self, fd: int | None, *, value: int, size_bytes: int, offset: int = 0) -> dict[str, Any]:
        """By a kernel of torch's."""
        import torch

        self.tensor[offset : offset + size_bytes].fill_(value).add_(0)
        torch.cuda.synchronize()
        return {}

    def write_floats(self, fd: int | None, *, value: float, dtype: str) -> dict[str, Any]:
        """All of the memory, as elements of `dtype`."""
        import torch

        typed = self.tensor.view(getattr(torch, dtype))
        typed.copy_(torch.full((), value, device=typed.device).to(typed.dtype).expand_as(typed))
        torch.cuda.synchronize()
        return {}

    def spin(self, fd: int | None) -> dict[str, Any]:
        """Kernels that write to the memory, one after the other, until this process is killed."""
        import torch

        self.tensor.add_(1)
        torch.cuda.synchronize()
        self.socket.send(json.dumps({"spinning": True}).encode())
        while True:
            self.tensor.add_(1)

    def who(self, fd: int | None) -> dict[str, Any]:
        spaces = {kind: os.readlink(f"/proc/thread-self/ns/{kind}") for kind in ("pid", "ipc")}
        return {"number": os.getpid(), **spaces}

    def ordinals(self, fd: int | None) -> dict[str, Any]:
        """By UUID, in the driver's and in torch's order of this process."""
        from gpu_checks.tensors import torch_device

        return {"driver": self.gpu.device.ordinal, "torch": torch_device(self.device_uuid).index}


def main(arguments: list[str]) -> int:
    with socket.socket(fileno=int(arguments[0])) as sock:
        program = Program(sock, arguments[1])
        while True:
            data, fds, _, _ = socket.recv_fds(sock, MESSAGE_BYTES, 1)
            if not data:
                return 0
            command = json.loads(data)
            try:
                answer = getattr(program, command.pop("do"))(fds[0] if fds else None, **command)
            except Exception as error:  # noqa: BLE001 - the check that asked judges it
                answer = {"error": f"{type(error).__name__}: {error}"}
            sent = [answer.pop("fd")] if "fd" in answer else []
            socket.send_fds(sock, [json.dumps(answer).encode()], sent)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
