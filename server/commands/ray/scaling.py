"""The number of replicas that the waiting tokens call for."""

import math
from collections.abc import Iterable

FULL = 0.8  # share of the KV blocks beyond which a replica is full: a fewer would preempt


def replicas_for(queued_tokens: Iterable[float], kv_usage: Iterable[float], queued_tokens_per_replica: int) -> int:
    """The replicas that are needed: one per `queued_tokens_per_replica` prompt tokens that wait, and enough for the
    KV blocks that are in use. The values are those of each replica; `kv_usage` is a share from 0 to 1."""
    for_queue = math.ceil(sum(queued_tokens) / queued_tokens_per_replica)
    for_blocks = math.ceil(sum(kv_usage) / FULL)
    return max(for_queue, for_blocks)
