"""Two engines lease blocks of the same pool: what one has computed of a prompt, the other finds."""

import sys

import torch

import kvpage
from kvpage.pages.leased_sequences import leased_sequences

prompt = range(1000, 1100)
try:
    kv = kvpage.attach("mimo")
    first = kvpage.open_lease("mimo", name="engine-1", clear=kv.clear)
    second = kvpage.open_lease("mimo", name="engine-2", clear=kv.clear)  # in a program of its own, usually
except kvpage.KvpageError as error:
    sys.exit(f"{error.code}: {error}")
with kv, first, second:
    with leased_sequences(kv.plan, first).new(prompt) as sequence:
        sequence.advance()  # takes the blocks that each group needs for the prompt
        block = int(sequence.table(0)[0])
        kv.tensor("target.0")[block] = torch.full((), 7, dtype=torch.bfloat16)  # what the model computes
        sequence.commit()
    with leased_sequences(kv.plan, second).new(prompt) as sequence:
        sequence.advance()
        cached = kv.tensor("target.0")[int(sequence.table(0)[0])]
        found = sequence.num_prefix_tokens
        print(f"{found} of {len(prompt)} tokens were cached; their first value is {cached.flatten()[0].item():.0f}")
