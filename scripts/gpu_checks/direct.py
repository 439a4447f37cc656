"""A kernel that reads pages where they are, through a block table, and does nothing else with them.

Its time is what the stride alone costs an attention kernel: no gathering before it, next to no arithmetic. Importing
this raises ImportError where there is no Triton.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from gpu_checks.layouts import ITEM_BYTES, Layout
from gpu_checks.strides import Read, Scene

triton = import_module("triton")
tl = import_module("triton.language")

_WORD_BYTES = 4
_WORDS = 2048  # read by one program: 8 KiB, a divisor of every page


@triton.jit  # type: ignore[untyped-decorator]
def _combine_pages(words, table, sums, block_stride_words, parts, WORDS: tl.constexpr):  # type: ignore[no-untyped-def,name-defined]  # noqa: N803
    """Program (b, c) combines (by exclusive or) the c-th part of the page that the b-th entry of the table names."""
    block = tl.program_id(0)
    part = tl.program_id(1)
    page = words + tl.load(table + block) * block_stride_words
    found = tl.load(page + part * WORDS + tl.arange(0, WORDS))
    tl.store(sums + block * parts + part, tl.xor_sum(found, axis=0))


def read_in_place(scene: Scene, layout: Layout) -> Read:
    torch = scene.torch
    table = scene.block_table(layout).flatten()
    parts, rest = divmod(layout.page_bytes, _WORDS * _WORD_BYTES)
    if rest:
        raise ValueError(f"a page of {layout.page_bytes} bytes is no multiple of {_WORDS * _WORD_BYTES}")

    def read(view: Any) -> Any:
        sums = torch.empty((layout.num_blocks, parts), dtype=torch.int32, device=view.device)
        words = view.view(torch.int32)  # two elements each
        stride_words = view.stride(0) * ITEM_BYTES // _WORD_BYTES
        _combine_pages[layout.num_blocks, parts](words, table, sums, stride_words, parts, WORDS=_WORDS)
        return sums

    return read
