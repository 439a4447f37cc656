"""One vLLM engine in a process of its own: generates, says what, and waits to be told to end.

    python engine.py MODEL_FOLDER '{"kv_transfer_config": …}' [--only-start]

It prints a line of JSON with the tokens and a digest of each registered cache, and one with the trace at the end.
Digests and trace are there when the engine computes in this process, with the recording connector.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from typing import Any

PROMPTS = [[token % 96 + 1 for token in range(first, first + length)] for first, length in ((1, 40), (7, 90), (30, 5))]
NEW_TOKENS = 40


def main(folder: str, options: dict[str, Any], *, generates: bool) -> None:
    from vllm import LLM

    engine: Any = LLM(
        folder,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        kv_cache_memory_bytes=1 << 22,
        max_num_seqs=4,
        block_size=32,
        **options,
    )
    said: dict[str, Any] = {"tokens": generated(engine) if generates else []}
    recording = sys.modules.get("vllm_checks.recording")
    if recording is not None and recording.CACHES:
        said["digests"] = {name: digest(tensor) for name, tensor in recording.CACHES.items()}
    print("SAID", json.dumps(said), flush=True)
    sys.stdin.readline()
    engine.llm_engine.engine_core.shutdown()
    if recording is not None:
        print("SAID", json.dumps(recording.TRACE), flush=True)
    os._exit(0)  # what else the engine would do at its end says nothing here


def generated(engine: Any) -> list[list[int]]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, detokenize=False, ignore_eos=True)
    done = engine.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], sampling, use_tqdm=False)
    return [list(request.outputs[0].token_ids) for request in done]


def digest(tensor: Any) -> str:
    """Of the bytes, in logical order."""
    import torch

    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), generates=sys.argv[3:] != ["--only-start"])
