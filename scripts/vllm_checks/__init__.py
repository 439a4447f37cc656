"""What `scripts/vllm_check.py` does with a real vLLM: engines on a CPU, stock and on kvpage's memory."""
