"""Decides which sequence holds which KV block: block tables, prefix cache, free list, host tier."""
