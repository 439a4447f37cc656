"""A process that prefills: for each prompt (a JSON array of token ids, one a line) it computes the first token.

Of each it prints the token, the block table of every layer with attention, a digest of the pages that these blocks have
in the first layer, and the memory that the pool lies in. It keeps what it holds until the next prompt.

    python prefill_program.py MODEL POOL RUN_DIR
"""

from __future__ import annotations

import json
import sys

import torch

from kvpage.integrations.transformers import KvpageCache
from kvpage.integrations.transformers.layers import Attention
from support.shared_pages import memory_of_pools, page_digest
from support.tiny_models import tiny_model


def main() -> None:
    name, pool, run_dir = sys.argv[1:]
    model = tiny_model(name)
    with KvpageCache.open(model, pool, run_dir=run_dir) as cache:
        print(json.dumps(memory_of_pools()), flush=True)
        for line in sys.stdin:
            cache.reset()
            tokens = torch.tensor([json.loads(line)])
            prefix = cache.take_prefix(tokens)
            said = model.generate(tokens, attention_mask=torch.ones_like(tokens), cache=cache, max_new_tokens=1)
            with_attention = [index for index, layer in enumerate(cache.layers) if isinstance(layer, Attention)]
            tables = {index: cache.blocks(index)[0].tolist() for index in with_attention}
            digests = {index: page_digest(cache, index) for index in with_attention}
            answer = {"token": int(said[0, -1]), "prefix": prefix, "tables": tables, "digests": digests}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
