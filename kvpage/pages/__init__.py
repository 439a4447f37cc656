"""Blocks of a pool: which are used, which keep content, which are free. Ids only, no bytes."""
