"""Planning in the library: no server, no torch."""

import json
from pathlib import Path

import kvpage

request = json.loads(Path(__file__).with_name("mimo.json").read_text())
plan = kvpage.plan(request)
for name in ("target.0", "draft.0"):
    layer = plan.layers[name]
    print(f"{name}: {layer.decision}, page of {layer.page_size_bytes} bytes; {layer.reason}")
print(
    f"{plan.num_blocks} blocks; a request of {plan.capacity.max_model_len} tokens: {plan.capacity.request_bytes} bytes"
)

# The same draft on a backend that does not read pages by block stride cannot be unified.
request["layers"][1]["backend"] = "rocm_aiter_unified_attn"
try:
    kvpage.plan(request)
except kvpage.KvpageError as error:
    print(f"{error.code}: {error.details}")
