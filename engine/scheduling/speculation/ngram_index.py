"""NgramIndex: finds the last earlier occurrence of the newest tokens of a sequence (prompt lookup: Saxena 2023).

A table for each size of n-gram maps the hash of the n-gram to the place of the token that followed it last. A token
costs one entry in each table when it comes, and a lookup costs one read in each: neither depends on the length of the
text. An entry takes some 130 bytes.
"""

SIZES = (6, 3)  # tokens of an n-gram; the longest match is used
MAX_INDEXED = 1024  # tokens at one call: a long prompt delays no step by more than 1 ms


class NgramIndex:
    """The n-grams of `tokens`, a list that may grow at its end."""

    __slots__ = ("_num_indexed", "_places", "tokens")

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self._num_indexed = 0
        self._places: list[tuple[int, dict[int, int]]] = [(size, {}) for size in SIZES]

    def catch_up(self) -> bool:
        """Indexes at most MAX_INDEXED new tokens. Returns True if none is left."""
        tokens, start = self.tokens, self._num_indexed
        self._num_indexed = end = min(len(tokens), start + MAX_INDEXED)
        for size, places in self._places:
            for place in range(max(size, start), end):
                places[hash(tuple(tokens[place - size : place]))] = place
        return end == len(tokens)

    def find(self, last: list[int]) -> tuple[int, int] | None:
        """Returns (index in SIZES, place in `tokens` of the token that followed) of the longest n-gram at the end of
        `last`; None if no n-gram occurs. `last` holds the newest tokens, max(SIZES) of them if there are as many."""
        for level, (size, places) in enumerate(self._places):
            ngram = last[-size:]
            if (place := places.get(hash(tuple(ngram)))) is not None and self.tokens[place - size : place] == ngram:
                return level, place
        return None
