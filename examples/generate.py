"""A model of transformers with its cache in a pool: the second to see a prompt computes only what is new."""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvpage
from kvpage.integrations.transformers import KvpageCache, plan_request

torch.manual_seed(0)
config = LlamaConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=100)
model = LlamaForCausalLM(config).eval()  # or one that you have loaded
prompt = torch.arange(1, 51)[None]
options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(prompt)}
try:
    with kvpage.Client() as client:
        request = plan_request(model, memory_bytes=1 << 20, max_model_len=1024)
        client.create_pool(request, device="host", name="chat")
    with KvpageCache.open(model, pool="chat") as cache:
        first = model.generate(prompt, cache=cache, **options)
    with KvpageCache.open(model, pool="chat") as cache:  # in a process of its own, usually
        found = cache.take_prefix(prompt)
        second = model.generate(prompt, cache=cache, **options)
except kvpage.KvpageError as error:
    sys.exit(f"{error.code}: {error}")
print(
    f"{found} of {prompt.shape[1]} tokens were cached; the answer is {'the same' if first.equal(second) else 'another'}"
)
