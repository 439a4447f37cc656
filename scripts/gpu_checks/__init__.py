"""What `scripts/gpu_check.py` does on a GPU: every check in a process of its own, and the report of what came of it."""
