"""What shows that two processes look at the same pages: where the memory is, and what is in it."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import torch

from kvpage.integrations.transformers import KvpageCache
from kvpage.integrations.transformers.layers import Attention


def memory_of_pools() -> list[str]:
    """Device and inode of every memfd that this process has mapped: the same two in another process are the same
    memory."""
    found = re.findall(r"^\S+ \S+ \S+ (\S+ \d+)\s+/memfd:", Path("/proc/self/maps").read_text(), re.MULTILINE)
    return sorted(set(found))


def page_digest(cache: KvpageCache, layer: int, num_blocks: int | None = None) -> str:
    """Of all bytes that the first blocks of the first row have in a layer with attention."""
    kept = cache.layers[layer]
    assert isinstance(kept, Attention)
    blocks = [block for block in cache.blocks(layer)[0, :num_blocks].tolist() if block]
    pages = cache.tensors[kept.name][0][blocks].contiguous()
    return hashlib.sha256(pages.view(torch.uint8).numpy().tobytes()).hexdigest()
