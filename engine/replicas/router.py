"""PrefixRouter: which replica computes a request, by the longest shared prefix and by the work that waits.

The cost of a replica is the number of tokens that a request waits for there: prompt tokens that wait, a few tokens for
each live request, and the part of its own prompt that the replica does not hold. The cheapest replica gets the request.
So a long shared prefix outweighs a longer queue up to the time that it saves, and a prefix that all prompts share
spreads over all replicas once the first of them is busy. SGLang's router (Zheng et al. 2024) weighs prefixes and load
likewise, by two thresholds.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence

CHUNK_TOKENS = 64  # prefixes are known in multiples of so many tokens
MAX_CHUNKS = 2048  # only the first 131,072 tokens of a prompt count
LIVE_COST = 16  # tokens: a live request slows the others by about so many prompt tokens over its life. Not measured yet


def prefix_keys(token_ids: Sequence[int], salt: Hashable) -> list[int]:
    """A hash of each prefix of a multiple of CHUNK_TOKENS tokens, shortest first. Prompts with another `salt` share
    nothing. A wrong match costs time only, so the hashes need not resist attacks."""
    keys, key = [], hash(salt)
    for end in range(CHUNK_TOKENS, min(len(token_ids), CHUNK_TOKENS * MAX_CHUNKS) + 1, CHUNK_TOKENS):
        key = hash((key, *token_ids[end - CHUNK_TOKENS : end]))
        keys.append(key)
    return keys


class PrefixRouter:
    """Remembers the prefixes that each replica was sent last: as many tokens as its KV cache has room for."""

    def __init__(self, num_replicas: int) -> None:
        self._sent: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_replicas)]

    def order(self, keys: Sequence[int], num_tokens: int, waiting: Sequence[tuple[int, float]]) -> list[int]:
        """The replicas among `waiting`, (number of the replica, tokens of work there), the best first. keys: see
        prefix_keys; num_tokens: length of the prompt."""
        costs = {replica: work + num_tokens - self._num_held(replica, keys) for replica, work in waiting}
        return sorted(costs, key=lambda replica: (costs[replica], len(self._sent[replica]), replica))

    def sent(self, replica: int, keys: Sequence[int], room: int) -> None:
        """The replica was sent a prompt; `room` is the size of its KV cache in tokens."""
        sent = self._sent[replica]
        for key in keys:
            sent[key] = None
            sent.move_to_end(key)
        while len(sent) > max(room // CHUNK_TOKENS, 1):
            sent.popitem(last=False)

    def forget(self, replica: int) -> None:
        """The replica has lost its KV cache."""
        self._sent[replica].clear()

    def _num_held(self, replica: int, keys: Sequence[int]) -> int:
        sent = self._sent[replica]
        num_chunks = next((i for i, key in enumerate(keys) if key not in sent), len(keys))
        return num_chunks * CHUNK_TOKENS
