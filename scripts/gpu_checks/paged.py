"""Attention kernels that read pages through a block table themselves, where they are installed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from gpu_checks.gpu import Gpu
from gpu_checks.layouts import MIB, NUM_KV_HEADS, NUM_SEQUENCES, Layout
from gpu_checks.strides import NUM_QUERY_HEADS, Read, Reader, Scene, compare, first_line
from gpu_checks.tensors import torch_on
from gpu_checks.trial import Skip, Trial

_WORKSPACE_BYTES = 128 * MIB


def kernels(trial: Trial) -> None:
    readers: dict[str, Reader] = {}
    missing = []
    for name, reader in (("flash_attn", flash_attention), ("flashinfer", flash_infer)):
        try:
            import_module(name)
        except Exception as error:  # noqa: BLE001 - builds for another torch fail in many ways
            missing.append(first_line(error))
        else:
            readers[name] = reader
    if not readers:
        raise Skip("; ".join(missing))
    gpu = Gpu(trial.device_uuid)
    compare(trial, gpu, torch_on(gpu.uuid), readers)


def flash_attention(scene: Scene, layout: Layout) -> Read:
    """FlashAttention 2: `flash_attn_with_kvcache`. It wants pages of a multiple of 256 tokens."""
    if layout.block_size % 256:
        raise ValueError("flash_attn 2 reads pages of a multiple of 256 tokens only")
    module = import_module("flash_attn")
    torch = scene.torch
    table = scene.block_table(layout).to(torch.int32)
    query = scene.query(layout).transpose(1, 2).contiguous()
    lengths = torch.full((NUM_SEQUENCES,), table.shape[1] * layout.block_size, dtype=torch.int32, device=table.device)

    def read(view: Any) -> Any:
        return module.flash_attn_with_kvcache(
            query, view[:, 0], view[:, 1], cache_seqlens=lengths, block_table=table, causal=True
        )

    return read


def flash_infer(scene: Scene, layout: Layout) -> Read:
    """FlashInfer's decode wrapper."""
    module = import_module("flashinfer")
    torch = scene.torch
    table = scene.block_table(layout).to(torch.int32)
    query = scene.query(layout).squeeze(2).contiguous()
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=table.device)
    wrapper = module.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
    ends = torch.arange(NUM_SEQUENCES + 1, dtype=torch.int32, device=table.device) * table.shape[1]
    last_page = torch.full((NUM_SEQUENCES,), layout.block_size, dtype=torch.int32, device=table.device)
    sizes = (NUM_QUERY_HEADS, NUM_KV_HEADS, layout.head_size, layout.block_size)
    wrapper.plan(ends, table.flatten(), last_page, *sizes, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)

    def read(view: Any) -> Any:
        return wrapper.run(query, (view[:, 0], view[:, 1]))

    return read
