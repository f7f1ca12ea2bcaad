"""Hashes of the text of a prompt, and a memory of the replicas that were sent them: which replica holds a prefix.

Ray's routers see a request before any tokenizer does, so a prefix is known by its characters: one hash per
CHUNK_CHARACTERS, each over everything before it, as a block's hash is over all tokens before it. The router remembers
the replica to which it sent each hash. Reports of the replicas could say more (evictions), but the list of their blocks
is long, it would have to pass the controller every second, and its hashes are over token ids.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

CHUNK_CHARACTERS = 256
MAX_CHUNKS = 256  # hashes of one prompt
MAX_BODY_BYTES = 1 << 20  # parsing a larger body would keep the event loop busy for milliseconds
MAX_REMEMBERED = 1 << 16  # hashes: 16 M characters of prompts
MAX_IMBALANCE = 16  # requests that the holder of a prefix may have beyond the least loaded replica

# The prompts of all APIs, in the order in which chat templates write them.
ROOT_FIELDS = ("model", "cache_salt")
PROMPT_FIELDS = ("system", "instructions", "tools", "messages", "input", "prompt")


def prefix_hashes(body: bytes, key: str) -> list[int]:
    """The hashes of a request's prefixes, shortest first; empty for a short prompt and for anything unknown.

    `key` tells tenants apart: they share no blocks.
    """
    if len(body) > MAX_BODY_BYTES:
        return []
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return []
    if not isinstance(request, dict):
        return []
    text = "\n".join(_texts(request))
    digest = repr((key, *(request.get(name) for name in ROOT_FIELDS))).encode("utf-8", "surrogatepass")
    hashes = []
    for end in range(CHUNK_CHARACTERS, min(len(text), CHUNK_CHARACTERS * MAX_CHUNKS) + 1, CHUNK_CHARACTERS):
        chunk = text[end - CHUNK_CHARACTERS : end].encode("utf-8", "surrogatepass")
        digest = hashlib.blake2b(digest + chunk, digest_size=8).digest()
        hashes.append(int.from_bytes(digest, "little"))
    return hashes


def _texts(request: Mapping[str, Any]) -> Iterable[str]:
    for name in PROMPT_FIELDS:
        value = request.get(name)
        if isinstance(value, str):
            yield value
        elif isinstance(value, list) and value and isinstance(value[0], int):
            yield ",".join(map(str, value))  # token ids
        elif isinstance(value, list):
            for part in value:  # one by one: a longer conversation begins with the shorter one
                yield part if isinstance(part, str) else json.dumps(part)
        elif value is not None:
            yield json.dumps(value)


class PrefixMemory:
    """The replicas to which each hash was sent; the hashes used least recently are forgotten."""

    def __init__(self, capacity: int = MAX_REMEMBERED) -> None:
        self._capacity = capacity
        self._replicas: OrderedDict[int, set[str]] = OrderedDict()

    def held(self, hashes: Sequence[int], replica: str) -> int:
        """How many of the hashes, from the first on, went to this replica."""
        for count, each in enumerate(hashes):
            if replica not in self._replicas.get(each, ()):
                return count
        return len(hashes)

    def add(self, hashes: Sequence[int], replica: str) -> None:
        """Note that a prompt with these hashes goes to the replica."""
        for each in reversed(hashes):  # the shortest prefix, which most prompts share, is forgotten last
            self._replicas.setdefault(each, set()).add(replica)
            self._replicas.move_to_end(each)
        while len(self._replicas) > self._capacity:
            self._replicas.popitem(last=False)

    def keep_only(self, replicas: Iterable[str]) -> None:
        """Forget replicas that no longer run: their cache is gone."""
        running = set(replicas)
        for each in [each for each, holders in self._replicas.items() if not holders <= running]:
            self._replicas[each] &= running
            if not self._replicas[each]:
                del self._replicas[each]


def ranked(held: Sequence[int], loads: Sequence[float], max_imbalance: float = MAX_IMBALANCE) -> list[int]:
    """The indices of the replicas, best first: the longest prefix, then the smallest load.

    A replica with over `max_imbalance` requests more than the least loaded one comes after all others: computing the
    prefix again is faster than waiting behind them.
    """
    least = min(loads, default=0)
    return sorted(range(len(loads)), key=lambda i: (loads[i] - least > max_imbalance, -held[i], loads[i]))
