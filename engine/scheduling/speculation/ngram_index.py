"""NgramIndex: finds an earlier occurrence of the newest tokens of a sequence (prompt lookup: Saxena 2023).

A table maps the hash of each n-gram to the place of the token that followed it last. A token costs one entry when it
comes, and a lookup costs one read: neither depends on the length of the text. An entry takes some 130 bytes.

A match that goes on is kept: the lines of a text may begin alike, and an answer that repeats them with some changes, as
an edit of code does, is rarely where an n-gram occurred last.
"""

SIZE = 3  # tokens of an n-gram
LONG = 6  # tokens of a long match, whose next token is likelier to be the same
MAX_INDEXED = 1024  # tokens at one call: a long prompt delays no step by more than 1 ms


class NgramIndex:
    """The n-grams of `tokens`, a list that may grow at its end."""

    __slots__ = ("_num_indexed", "_places", "_shift", "tokens")

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self._num_indexed = 0
        self._places: dict[int, int] = {}
        self._shift = 0  # from the length of the text to the place of the last match

    def catch_up(self) -> bool:
        """Indexes at most MAX_INDEXED new tokens. Returns True if none is left."""
        tokens, places, start = self.tokens, self._places, self._num_indexed
        self._num_indexed = end = min(len(tokens), start + MAX_INDEXED)
        for place in range(max(SIZE, start), end):
            places[hash(tuple(tokens[place - SIZE : place]))] = place
        return end == len(tokens)

    def find(self, last: list[int], length: int) -> tuple[bool, int] | None:
        """Returns (whether the match is long, place in `tokens` of the token that followed); None if the n-gram at the
        end of `last` does not occur. `last` holds the newest tokens of a text of `length` tokens, LONG of them if there
        are as many. The start of a text matches the start of `tokens`, however short it is."""
        ngram = last[-SIZE:]
        place = length + self._shift
        if not self._is_before(place, ngram):
            found = self._places.get(hash(tuple(ngram)))
            if found is None or not self._is_before(found, ngram):
                return None
            place = found
            self._shift = place - length
        return self._is_before(place, last), place

    def _is_before(self, place: int, ngram: list[int]) -> bool:
        """True if the tokens before `place` are `ngram`, and a token follows them."""
        return len(ngram) <= place < len(self.tokens) and self.tokens[place - len(ngram) : place] == ngram
