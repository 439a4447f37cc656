"""Batches measured before kvpage had a simulation (`[Sim]` in its reference): what the tables compare with.

Mean requests running of short, chat and long: vLLM 0.33.0's own groups, a pool for each kind of layer, nested slabs.
Short and chat in 20 GiB, long in 40 GiB. The sigmas, seeds and lengths of those runs are not known.
"""

from __future__ import annotations

from typing import NamedTuple


class Batches(NamedTuple):
    """Of one model and stream."""

    vllm: int
    pools: int
    nested: int


EXPECTED: dict[str, tuple[Batches, Batches, Batches]] = {
    "gemma-3-27b": (Batches(123, 138, 138), Batches(45, 46, 51), Batches(18, 18, 19)),
    "gemma-4-26b int8": (Batches(570, 622, 621), Batches(213, 233, 241), Batches(120, 128, 131)),
    "gpt-oss-120b nvfp4": (Batches(2338, 2531, 2534), Batches(1114, 1118, 1136), Batches(148, 149, 148)),
    "qwen3-next-80b": (Batches(206, 244, 250), Batches(177, 190, 199), Batches(70, 71, 72)),
    "qwen3.5-35b": (Batches(247, 294, 299), Batches(212, 222, 237), Batches(83, 84, 85)),
    "qwen3.6-35b + draft": (Batches(316, 450, 445), Batches(195, 236, 245), Batches(62, 66, 67)),
    "qwen3.8-27b nvfp4 + draft": (Batches(136, 229, 231), Batches(115, 162, 169), Batches(62, 76, 76)),
    "mimo-v2-flash": (Batches(550, 602, 615), Batches(347, 346, 373), Batches(82, 82, 82)),
    "mimo-v2-flash + draft": (Batches(485, 512, 518), Batches(273, 273, 293), Batches(78, 79, 79)),
    "mimo 3:2": (Batches(776, 872, 872), Batches(221, 234, 236), Batches(30, 30, 30)),
    "jamba-1.5-mini": (Batches(1460, 1544, 1524), Batches(715, 711, 735), Batches(121, 120, 121)),
    "nemotron-h-8b": (Batches(179, 192, 197), Batches(164, 165, 172), Batches(92, 92, 93)),
}
