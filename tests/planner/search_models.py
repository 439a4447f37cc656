"""Public models as sorts of layers: what a token or a state takes in each, and the waste that another search reached.

Bytes are those of one layer: K and V of a token, or one state.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from planner import build

Json = dict[str, Any]
Percent = tuple[float, float, float]
KERNELS = [{"multiple_of": 16}]


def full(name: str, count: int, token_bytes: int) -> Json:
    return build.full(
        name + ".{i}", count=count, heads=1, size=token_bytes // 2, dtype="int8", kernel_block_sizes=KERNELS
    )


def window(name: str, count: int, token_bytes: int, tokens: int) -> Json:
    return full(name, count, token_bytes) | {"kind": "sliding_window", "sliding_window": tokens}


def chunked(name: str, count: int, token_bytes: int, tokens: int) -> Json:
    return full(name, count, token_bytes) | {"kind": "chunked_local_attention", "attention_chunk_size": tokens}


def states(name: str, count: int, state_bytes: int) -> Json:
    return build.state(name + ".{i}", [[state_bytes]], ["int8"], count=count)


class Row(NamedTuple):
    """Percent held beyond need by requests of 2K, 16K and 128K tokens, in 16 groups at most and in 8."""

    layers: list[Json]
    in_16: Percent
    in_8: Percent


ROWS: dict[str, Row] = {
    "gemma 3": Row([full("f", 10, 8192), window("w", 52, 8192, 1024)], (1.6, 0.6, 0.2), (1.6, 0.6, 0.2)),
    "gemma 4": Row([full("f", 8, 1024), window("w", 40, 4096, 1024)], (1.4, 0.9, 0.2), (1.4, 0.9, 0.2)),
    "gemma 4 int8": Row([full("f", 8, 516), window("w", 40, 2080, 1024)], (1.5, 1.2, 0.9), (1.5, 1.2, 0.9)),
    "llama 4": Row([full("f", 12, 4096), chunked("c", 36, 4096, 8192)], (0.0, 0.1, 0.0), (0.0, 0.1, 0.0)),
    "gpt oss": Row([full("f", 18, 2048), window("w", 18, 2048, 128)], (0.7, 0.1, 0.0), (0.7, 0.1, 0.0)),
    "gpt oss fp8": Row([full("f", 18, 1024), window("w", 18, 2048, 128)], (1.4, 0.2, 0.0), (1.4, 0.2, 0.0)),
    "gpt oss nvfp4": Row([full("f", 18, 576), window("w", 18, 2048, 128)], (2.3, 0.3, 0.0), (4.8, 0.7, 0.1)),
    "qwen3 next": Row([full("f", 12, 2048), states("s", 36, 2_146_304)], (1.7, 0.9, 0.2), (1.7, 2.7, 0.3)),
    "qwen3 next bf16": Row([full("f", 12, 2048), states("s", 36, 1_097_728)], (2.4, 1.7, 0.3), (2.4, 1.7, 0.3)),
    "qwen3.6 and draft": Row(
        [full("f", 10, 2048), states("s", 30, 1_097_728), window("d", 5, 4096, 4096), full("e", 1, 4096)],
        (2.6, 2.1, 0.7),
        (10.5, 10.3, 9.9),
    ),
    "qwen3.8 and draft": Row(
        [full("f", 16, 1152), states("s", 48, 1_634_304), window("d", 5, 4096, 4096)], (3.6, 3.0, 1.4), (7.4, 6.7, 1.0)
    ),
    "mimo flash and draft": Row(
        [full("f", 9, 2560), window("w", 39, 5120, 128), window("d", 5, 4096, 1024)], (4.9, 1.1, 0.1), (9.7, 2.2, 0.3)
    ),
    "mimo 3:2": Row([full("f", 10, 6144), window("d", 5, 4096, 1024)], (1.1, 0.2, 0.0), (1.1, 0.2, 0.0)),
    "jamba": Row([full("f", 4, 4096), states("s", 28, 311_296)], (2.3, 0.3, 0.1), (2.3, 0.3, 0.1)),
    "nemotron h": Row([full("f", 4, 4096), states("s", 24, 4_255_744)], (0.4, 1.1, 1.4), (0.4, 1.1, 1.4)),
}
LATENT = build.mla(
    "mla.{i}", size=656, dtype="uint8", count=61, block_size=64, kernel_block_sizes=[{"multiple_of": 64}]
)
INDEXER = LATENT | {"name": "indexer.{i}", "head_size": 132}
