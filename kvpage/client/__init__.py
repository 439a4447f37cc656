"""What other processes use: the API over HTTP, and pools attached as tensors."""
