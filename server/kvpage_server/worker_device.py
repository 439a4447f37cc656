"""What kinds of memory a worker's device has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvpage.errors import NotSupported, ProtocolError, SpecInvalid, shorten
from kvpage.memory.base import MemoryKind
from kvpage.memory.host import HostMemory
from kvpage.wire.messages import ChunkInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """The kinds that work here, the one used unless a pool asks for another, and what is known of the device."""

    kinds: Mapping[str, MemoryKind]
    default_kind: str
    free: Callable[[], tuple[int, float]]
    """Bytes that are free on the device, and how many seconds ago that was seen."""
    available_bytes: Callable[[], int]
    """The most that could be committed now, as far as that can be told at once."""
    uuid: str = ""
    """Of a GPU or MIG instance; empty for the host."""
    number: int | None = None
    """N of `cuda:N` as this process numbers the device; None for the host."""
    name: str = ""
    unsupported: Mapping[str, str] = field(default_factory=dict)
    """Kinds that were tried and failed, and why."""

    reap: Callable[[], None] = lambda: None
    """Takes leave of processes that made or held memory and have ended. Never blocks."""

    @classmethod
    def of(cls, memory: MemoryKind) -> DeviceMemory:
        """A device with one kind, which says at any time what is available."""
        return cls(
            kinds={memory.handle_kind: memory},
            default_kind=memory.handle_kind,
            free=lambda: (memory.available_bytes(), 0.0),
            available_bytes=memory.available_bytes,
        )

    def kind(self, wanted: str) -> MemoryKind:
        """The kind called `wanted`, or the default for "". Raises `NotSupported`, `SpecInvalid`."""
        name = wanted or self.default_kind
        if name in self.kinds:
            return self.kinds[name]
        if name in self.unsupported:
            others = " or ".join(self.kinds)
            advice = f"ask for handle kind {others}" if others else "use --device host"
            raise NotSupported(
                f"memory of kind {name} does not work on {self.name} ({self.uuid}): {self.unsupported[name]}; {advice}",
                details={"handle_kind": name, "supported": list(self.kinds)},
            )
        raise SpecInvalid(
            f"handle kind {shorten(repr(wanted))} does not exist on this device; it has {', '.join(self.kinds)}",
            details={"supported": list(self.kinds)},
        )

    def chunk(self, wanted_kind: str, size_bytes: int) -> ChunkInfo:
        """How a chunk that is to be made is described."""
        return ChunkInfo(kind=self.kind(wanted_kind).handle_kind, size_bytes=size_bytes, device_uuid=self.uuid)

    def taken_bytes(self, chunk: ChunkInfo) -> int:
        """What `chunk`, of a kind that this device has, takes of it: whole units."""
        return self.kinds[chunk.kind].taken_bytes(chunk.size_bytes)

    def imported_kind(self, info: ChunkInfo) -> MemoryKind:
        """The kind of a chunk that comes from another process. Raises `ProtocolError`."""
        if info.device_uuid != self.uuid:
            raise ProtocolError(
                f"a chunk on device {shorten(info.device_uuid) or 'host'}; this worker serves {self.uuid or 'host'}"
            )
        if info.kind not in self.kinds:
            raise ProtocolError(f"a chunk of kind {shorten(info.kind)}; this worker has {', '.join(self.kinds)}")
        if self.uuid and self.taken_bytes(info) > self.available_bytes():
            raise ProtocolError(f"a chunk of {info.size_bytes} bytes on a device of {self.available_bytes()} bytes")
        return self.kinds[info.kind]


def host_memory() -> DeviceMemory:
    return DeviceMemory.of(HostMemory())


def cuda_memory(device: str) -> DeviceMemory:
    """Of `cuda:N` or a GPU or MIG UUID, found out by doing it once. Takes as long as a process that uses the driver.

    Raises `NotSupported` when there is no driver or the device can share no memory, `NotFound` when there is no such
    device.
    """
    # Here, so that a worker of host memory loads nothing of it.
    from kvpage.memory.cuda import CudaIpcMemory, CudaVmmMemory, FreeBytes, probe
    from kvpage.memory.cuda_maker import reap_holders

    facts = probe(device)
    free = FreeBytes(facts.free_bytes)
    kinds: list[MemoryKind] = [
        CudaVmmMemory(facts.uuid, facts.granularity_bytes, free),
        CudaIpcMemory(facts.uuid, free),
    ]
    if len(facts.unsupported) == len(kinds):
        reasons = "; ".join(f"{kind}: {reason}" for kind, reason in facts.unsupported.items())
        raise NotSupported(f"memory of {facts.uuid} ({facts.name}) cannot be shared: {reasons}; use --device host")
    return DeviceMemory(
        kinds={kind.handle_kind: kind for kind in kinds if kind.handle_kind not in facts.unsupported},
        default_kind=CudaVmmMemory.handle_kind,
        free=lambda: (free.bytes, free.age_s),
        # What is free now is found by the process that makes a pool: asking takes a context on the device.
        available_bytes=lambda: facts.total_bytes,
        uuid=facts.uuid,
        number=facts.number,
        name=facts.name,
        unsupported=facts.unsupported,
        reap=reap_holders,
    )
