"""Bounds on JSON, checked before it is parsed: levels, containers, values and names.

A list of two bytes becomes an object of 56, so the length of a text says little about the memory and the time that it
takes. Text inside strings does not count, so that prose and code pass however many brackets they hold. A thread that
parses or counts holds the GIL, so the exact count goes by slices, in array operations that release it. It is made only
of texts that have more of these characters, strings included, than the bounds allow.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

SLICE = 1 << 18  # bytes; a fraction of a millisecond
QUOTE, BACKSLASH = b'"'[0], b"\\"[0]
OPENING, CLOSING = b"{"[0], b"}"[0]  # and, but for the bit 0x20, the square ones
LOWER = 0x20


class JsonBoundsError(ValueError):
    """The text is over a bound. The message names the bound and ends a sentence about the text."""


@dataclass(frozen=True)
class JsonBounds:
    """`levels` of lists and objects within each other, `containers` of both kinds, `commas` (one less than values) and
    `colons` (one for each name in an object)."""

    levels: int
    containers: int
    commas: int
    colons: int

    def check(self, text: str | bytes | bytearray) -> None:
        """Raises JsonBoundsError where there is more in `text`, which need not be JSON at all."""
        if self._surely_within(text):
            return
        raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        deepest = containers = commas = colons = depth = 0
        for outside in _outside_strings(raw):
            folded = outside | LOWER
            steps = (folded == OPENING).astype(np.int8) - (folded == CLOSING)
            levels = depth + np.cumsum(steps, dtype=np.int32)
            deepest, depth = max(deepest, int(levels.max(initial=0))), int(levels[-1])
            containers += int(np.count_nonzero(steps > 0))
            commas += int(np.count_nonzero(outside == b","[0]))
            colons += int(np.count_nonzero(outside == b":"[0]))
            self._refuse(deepest, containers, commas, colons)

    def _surely_within(self, text: str | bytes | bytearray) -> bool:
        """By a count that takes the strings in."""
        openings = _count(text, "[") + _count(text, "{")
        return openings <= self.levels and _count(text, ",") <= self.commas and _count(text, ":") <= self.colons

    def _refuse(self, levels: int, containers: int, commas: int, colons: int) -> None:
        if levels > self.levels:
            raise JsonBoundsError(f"it is nested too deeply, over {self.levels} levels")
        if containers > self.containers:
            raise JsonBoundsError(f"it holds more than {self.containers} lists and objects: too many values")
        if commas > self.commas:
            raise JsonBoundsError(f"it holds more than {self.commas} commas: too many values")
        if colons > self.colons:
            raise JsonBoundsError(f"it holds more than {self.colons} colons: too many names")


def _count(text: str | bytes | bytearray, character: str) -> int:
    places = range(0, len(text), SLICE)
    if isinstance(text, str):
        return sum(text.count(character, start, start + SLICE) for start in places)
    return sum(text.count(character.encode(), start, start + SLICE) for start in places)


def _outside_strings(raw: bytes | bytearray) -> Iterator[npt.NDArray[np.uint8]]:
    """The bytes in slices, with those inside of strings, and the quotes, as 0."""
    inside = escaped = False  # where the slice before ended
    for start in range(0, len(raw), SLICE):
        piece = raw[start : start + SLICE]
        if escaped:
            piece = b" " + piece[1:]
        if BACKSLASH in piece:
            piece = piece.replace(b"\\\\", b"  ")  # pairs first, from the left: what is left escapes what follows it
            escaped = piece.endswith(b"\\")
            piece = piece.replace(b'\\"', b"  ")
        else:
            escaped = False
        codes = np.frombuffer(piece, np.uint8)
        quotes = codes == QUOTE
        within = np.logical_xor.accumulate(quotes) ^ inside
        inside = bool(within[-1])
        yield np.where(within | quotes, 0, codes)


# JSON within a string of a body, such as the arguments of a call. There may be thousands of them.
STRING = JsonBounds(levels=128, containers=1 << 14, commas=1 << 17, colons=1 << 16)


def body_bounds(max_model_len: int) -> JsonBounds:
    """The bounds of a request body: no API takes more values or levels, nor has a prompt of token ids more.

    At these bounds parsing holds the GIL for some 50 ms at a time.
    """
    return JsonBounds(levels=256, containers=1 << 17, commas=max(1 << 19, max_model_len + 1024), colons=1 << 17)
