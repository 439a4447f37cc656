"""What every kind of memory must do. The test of a kind is a subclass with the fixture `memory`."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Sequence

import pytest
import torch

from kvpage.errors import ProtocolError, SpecInvalid, StaleHandle
from kvpage.memory.base import Chunk, Mapping, MemoryKind
from support.checkout import ROOT

SIZE_BYTES = 3 * 4096 + 100  # no multiple of a page


@pytest.mark.usefixtures("no_leaks")
class MemoryContract:
    """Subclasses provide `memory`."""

    num_cycles = 200
    wrong_sizes: tuple[int, ...] = (SIZE_BYTES - 1, SIZE_BYTES + 1, 1)
    """Sizes that a chunk of `SIZE_BYTES` does not have, as far as this kind can tell."""

    def bytes_of(self, mapping: Mapping) -> torch.Tensor:
        """uint8, shape (size_bytes,); keeps the memory mapped."""
        return torch.frombuffer(mapping.claim, dtype=torch.uint8)

    def test_a_new_chunk_is_zero_and_keeps_what_is_written(self, memory: MemoryKind) -> None:
        with memory.create(SIZE_BYTES) as chunk, chunk.map() as mapping:
            assert mapping.size_bytes == chunk.size_bytes == SIZE_BYTES
            view = self.bytes_of(mapping)
            assert not view.any()
            view[SIZE_BYTES - 1] = 7
            assert view[SIZE_BYTES - 1] == 7

    def test_two_mappings_of_a_chunk_show_the_same_bytes(self, memory: MemoryKind) -> None:
        with memory.create(SIZE_BYTES) as chunk, chunk.map() as one, chunk.map() as other:
            self.bytes_of(one)[5] = 9
            assert self.bytes_of(other)[5] == 9

    def test_an_imported_chunk_is_the_same_memory(self, memory: MemoryKind) -> None:
        with memory.create(SIZE_BYTES) as chunk, imported(memory, chunk) as again:
            with chunk.map() as one, again.map() as other:
                self.bytes_of(other)[100] = 3
                assert self.bytes_of(one)[100] == 3

    def test_exported_descriptors_do_not_outlive_an_exec(self, memory: MemoryKind) -> None:
        with memory.create(SIZE_BYTES) as chunk:
            exported = chunk.export()
            assert not os.get_inheritable(exported)
            assert not os.get_inheritable(chunk.fd)
            os.close(exported)

    def test_memory_outlives_its_chunk_while_it_is_mapped_or_exported(self, memory: MemoryKind) -> None:
        chunk = memory.create(SIZE_BYTES)
        mapping, exported = chunk.map(), chunk.export()
        self.bytes_of(mapping)[1] = 2
        chunk.close()
        assert self.bytes_of(mapping)[1] == 2
        mapping.close()
        with memory.import_chunk(exported, SIZE_BYTES, chunk.handle) as again, again.map() as mapping:
            assert self.bytes_of(mapping)[1] == 2

    def test_progress_grows_to_the_size(self, memory: MemoryKind) -> None:
        told: list[int] = []
        memory.create(SIZE_BYTES, told.append).close()
        assert told == sorted(told)
        assert told[-1] == SIZE_BYTES

    def test_progress_that_raises_abandons_the_creation(self, memory: MemoryKind) -> None:
        class Enough(Exception):
            pass

        def stop(committed_bytes: int) -> None:
            raise Enough

        with pytest.raises(Enough):
            memory.create(SIZE_BYTES, stop)

    @pytest.mark.parametrize("size_bytes", [0, -1, 2**62 + 1])
    def test_sizes_that_make_no_sense_are_refused(self, memory: MemoryKind, size_bytes: int) -> None:
        with pytest.raises(SpecInvalid):
            memory.create(size_bytes)

    def test_closing_twice_is_fine_and_using_after_it_is_a_stale_handle(self, memory: MemoryKind) -> None:
        chunk = memory.create(SIZE_BYTES)
        mapping = chunk.map()
        for _ in range(2):
            mapping.close()
            chunk.close()
        assert chunk.closed
        assert mapping.closed
        for use in (chunk.export, chunk.map, lambda: chunk.fd, lambda: mapping.claim):
            with pytest.raises(StaleHandle):
                use()

    def test_a_size_that_was_announced_wrongly_is_refused(self, memory: MemoryKind) -> None:
        with memory.create(SIZE_BYTES) as chunk:
            for announced in self.wrong_sizes:
                with pytest.raises(ProtocolError):
                    with memory.import_chunk(chunk.export(), announced, chunk.handle) as again:
                        again.map()

    def test_what_is_no_memory_is_refused_and_closed(self, memory: MemoryKind) -> None:
        inside, outside = os.pipe()
        with pytest.raises(ProtocolError):
            memory.import_chunk(inside, SIZE_BYTES)
        with pytest.raises(BrokenPipeError):
            os.write(outside, b"nobody reads")
        os.close(outside)

    def test_memory_is_unmapped_at_close_when_nothing_views_it(self, memory: MemoryKind) -> None:
        told: list[str] = []
        with memory.create(SIZE_BYTES) as chunk:
            mapping = chunk.map()
            mapping.on_unmapped(lambda: told.append("one"))
            mapping.on_unmapped(lambda: told.append("two"))
            assert not mapping.unmapped
            mapping.close()
        assert mapping.unmapped
        assert sorted(told) == ["one", "two"]
        mapping.on_unmapped(lambda: told.append("late"))
        assert told[-1] == "late"

    def test_memory_stays_mapped_until_the_last_tensor_dies(self, memory: MemoryKind) -> None:
        told = threading.Event()
        with memory.create(1 << 16) as chunk:
            mapping = chunk.map()
            mapping.on_unmapped(told.set)
        base = self.bytes_of(mapping)
        view = base.view(torch.bfloat16).as_strided((4, 8), (64, 1), 16)
        mapping.close()
        del base
        gc.collect()
        view[3, 7] = 1.5
        assert view[3, 7] == 1.5
        assert not told.is_set()
        assert not mapping.unmapped
        del view
        gc.collect()
        assert told.wait(60)
        assert mapping.unmapped

    def test_the_last_view_may_die_in_another_thread(self, memory: MemoryKind) -> None:
        told = threading.Event()
        with memory.create(SIZE_BYTES) as chunk:
            mapping = chunk.map()
        views = [self.bytes_of(mapping)]
        mapping.on_unmapped(told.set)
        mapping.close()
        dropping = threading.Thread(target=views.clear)
        dropping.start()
        dropping.join()
        assert told.wait(60)
        assert mapping.unmapped

    def test_many_cycles_leave_nothing_behind(self, memory: MemoryKind) -> None:
        for _ in range(self.num_cycles):
            with memory.create(SIZE_BYTES) as chunk, imported(memory, chunk) as again:
                again.map().close()


def imported(memory: MemoryKind, chunk: Chunk) -> Chunk:
    """`chunk` as another process would get it."""
    return memory.import_chunk(chunk.export(), chunk.size_bytes, chunk.handle)


def run_program(program: str, *arguments: str, pass_fds: Sequence[int] = ()) -> str:
    """What a fresh interpreter prints; a crash of it fails the test. It may import what tests share."""
    command = [sys.executable, "-c", program, *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, pass_fds=tuple(pass_fds)
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()
