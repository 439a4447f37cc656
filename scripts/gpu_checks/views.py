"""Strided tensors over shared memory, in kernels and in captured graphs."""

from __future__ import annotations

import math
from typing import Any

from gpu_checks.gpu import MIB, Gpu
from gpu_checks.peer import Peer
from gpu_checks.tensors import bytes_of, through_dlpack, torch_on
from gpu_checks.trial import Trial, expect
from kvpage.memory.cuda import CudaVmmMemory

SIZE_BYTES = 64 * MIB
DTYPES = ("bfloat16", "float8_e4m3fn")
_SHAPE = (64, 2, 16, 8, 128)  # blocks, K and V, tokens, heads, elements of a head
_PAGE_ELEMS = math.prod(_SHAPE[1:])
_PADDED_ELEMS = _PAGE_ELEMS * 3 // 2


def by_dlpack(trial: Trial) -> None:
    """`from_dlpack`, then `as_strided`: a kernel's values lie where the strides say, and nowhere else."""
    gpu = Gpu(trial.device_uuid)
    torch = torch_on(gpu.uuid)
    with CudaVmmMemory(gpu.uuid).create(SIZE_BYTES) as chunk, chunk.map() as mapping:
        base = through_dlpack(mapping)
        expect(base.data_ptr() == mapping.address, "the tensor does not begin where the memory does")
        for name in DTYPES:
            base.zero_()
            _write_padded(torch, base, getattr(torch, name))
            trial.saw(f"{name}: written by a kernel through padded pages, the padding untouched")
        del base
    expect(mapping.unmapped, "the memory is still mapped though its tensors are gone")


def _write_padded(torch: Any, base: Any, dtype: Any) -> None:
    view = padded_view(base, dtype)
    values = torch.randn(_SHAPE, device=base.device).to(dtype)
    view.copy_(values)
    doubled = (view.to(torch.float32) * 2).to(dtype)
    page_bytes, padded_bytes = _PAGE_ELEMS * dtype.itemsize, _PADDED_ELEMS * dtype.itemsize
    there = base[: _SHAPE[0] * padded_bytes].cpu().view(_SHAPE[0], padded_bytes)
    written, padding = there.split([page_bytes, padded_bytes - page_bytes], dim=1)
    expect(torch.equal(written.flatten(), values.cpu().view(torch.uint8).flatten()), "the values lie elsewhere")
    expect(not padding.any(), "a kernel wrote into the padding")
    again = (values.to(torch.float32) * 2).to(dtype)
    expect(torch.equal(doubled.view(torch.uint8), again.view(torch.uint8)), "a kernel read other values")


def padded_view(base: Any, dtype: Any) -> Any:
    """A tensor of `_SHAPE` whose pages are padded 3:2."""
    strides = [_PADDED_ELEMS, *(math.prod(_SHAPE[axis + 1 :]) for axis in range(1, len(_SHAPE)))]
    return base.view(dtype).as_strided(_SHAPE, strides, 0)


def in_a_graph(trial: Trial) -> None:
    """A graph captured over strided tensors reads, at each replay, what another process has written since."""
    gpu = Gpu(trial.device_uuid)
    torch = torch_on(gpu.uuid)
    with CudaVmmMemory(gpu.uuid).create(SIZE_BYTES) as chunk, Peer(gpu.uuid) as peer, chunk.map() as mapping:
        peer.do("attach", fd=chunk.fd, size_bytes=SIZE_BYTES)
        base = bytes_of(mapping)
        for name in DTYPES:
            dtype = getattr(torch, name)
            view = padded_view(base, dtype)
            graph, result = captured(torch, lambda view=view: view.to(torch.float32) * 2)
            for value in (1.0, 3.5, -2.0):
                peer.do("write_floats", value=value, dtype=name)
                graph.replay()
                torch.cuda.synchronize()
                expect(bool((result == 2 * value).all()), f"{name}: a replay did not see what was written before it")
            trial.saw(f"{name}: three replays, each after another process's write")
            del graph, result, view
        del base


def captured(torch: Any, work: Any) -> tuple[Any, Any]:
    """A graph of `work`, and what it returns: the same memory at every replay."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what is set up at a first call must not be captured
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()
    return graph, result


def closed_during_capture(trial: Trial) -> None:
    """Closing another mapping while a graph is captured spoils neither: kvpage's own thread waits for the device."""
    gpu = Gpu(trial.device_uuid)
    torch = torch_on(gpu.uuid)
    with CudaVmmMemory(gpu.uuid).create(SIZE_BYTES) as chunk, chunk.map() as mapping:
        view = bytes_of(mapping).view(torch.bfloat16)
        view.fill_(1.5)
        captured(torch, lambda: view * 2)  # what is set up at a first call
        other = chunk.map()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = view * 2
            other.close()
            result = result + 1
        expect(other.unmapped, "the mapping closed during the capture stays mapped until the process ends")
        graph.replay()
        torch.cuda.synchronize()
        expect(bool((result == 4.0).all()), "the captured graph computes something else")


def alive_at_exit(trial: Trial) -> None:
    """A process may end while tensors over shared memory live: its exit status is part of this check."""
    gpu = Gpu(trial.device_uuid)
    torch_on(gpu.uuid)
    with CudaVmmMemory(gpu.uuid).create(SIZE_BYTES) as chunk:
        mapping = chunk.map()
    _KEPT.append(bytes_of(mapping))
    mapping.close()
    _KEPT[0].fill_(1)
    trial.saw("the interpreter ended with a tensor alive and a kernel queued")


_KEPT: list[Any] = []
