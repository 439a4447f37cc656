"""What runs in the allocator's process on a node. It needs no Ray itself: Ray calls it."""

from __future__ import annotations

from kvpage.fleet.allocator import Allocator
from kvpage.fleet.record_store import RecordFiles
from kvpage.fleet.records import ServiceOptions
from kvpage.fleet.service import LocalService, Supervision
from kvpage.run_directory import RunDirectory


class NodeActor:
    """Made anew by Ray whenever its process ends; finds the service, its pools and the records as they are."""

    def __init__(self, node: str, devices: tuple[str, ...], memory: str | None, run_dir: str | None, is_external: bool):
        options = ServiceOptions(devices=devices, memory=memory, run_dir=run_dir, is_external=is_external)
        runs = RunDirectory.default(run_dir)
        if not is_external:
            runs.create()
        service = LocalService(runs, options)
        self._allocator = Allocator(node, service, RecordFiles(runs, node), options, str(runs.path))
        self._supervision = None if is_external else Supervision(service)

    def handle(self, data: bytes) -> bytes:
        """The answer to a message (`kvpage.fleet.messages`)."""
        return self._allocator.handle(data)

    def end(self, data: bytes) -> bytes:
        """The same, for good: nobody starts the service again."""
        if self._supervision is not None:
            self._supervision.close()
            self._supervision = None
        return self._allocator.handle(data)
