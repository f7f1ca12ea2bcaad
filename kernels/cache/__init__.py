"""Writes to the KV cache: plain, quantised, rotated, copied."""
