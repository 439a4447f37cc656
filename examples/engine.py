"""An engine worker: attach the pool, write K and V of one token through a block table."""

import sys

import torch

import kvpage

try:
    attachment = kvpage.attach("mimo")
except kvpage.KvpageError as error:
    sys.exit(f"{error.code}: {error}")
with attachment as kv:
    block_size = kv.plan.layers["draft.0"].block_size
    block_table = [7, 3, 11]  # block ids, from whoever allocates them
    token = 20
    block, slot = block_table[token // block_size], token % block_size
    for layer in ("draft.0", "draft.1"):
        cache = kv.tensor(layer)  # (num_blocks, 2, block_size, num_kv_heads, head_size), pages padded
        cache[block, 0, slot] = torch.ones(8, 128, dtype=torch.bfloat16)
        cache[block, 1, slot] = torch.full((8, 128), 2, dtype=torch.bfloat16)
    print(f"token {token} is in block {block}; block stride {cache.stride(0) * cache.element_size()} bytes")
