"""vLLM 0.24 to 0.33: what its engine says of a model's caches, as the layers of a plan request (docs/vllm.md)."""

from kvpage.integrations.vllm.importing import layers_from_specs as layers_from_specs
