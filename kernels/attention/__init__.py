"""Attention over a paged KV cache: decode and prefill, their tiles and the AttentionPlan."""
