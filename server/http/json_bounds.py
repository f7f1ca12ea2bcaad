"""Bounds on JSON, checked before it is parsed: levels, containers, values and names.

A list of two bytes becomes an object of 56 bytes, so the length of a JSON text says little about the memory and time
that parsing takes. Text inside strings does not count: prose and code may hold any number of brackets. A thread that
parses or counts holds the GIL, so the exact count reads slices with array operations that release the GIL. The exact
count runs only if the text, with its strings, has more of these characters than the bounds allow.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

SLICE = 1 << 18  # bytes; counting them takes a fraction of a millisecond
QUOTE, BACKSLASH = b'"'[0], b"\\"[0]
OPENING, CLOSING = b"{"[0], b"}"[0]  # [ and ] differ from them in the bit LOWER only
LOWER = 0x20


class JsonBoundsError(ValueError):
    """The text exceeds a bound. The message names the bound and ends a sentence about the text."""


@dataclass(frozen=True)
class JsonBounds:
    """The largest allowed counts: `levels` of nested lists and objects, `containers` (lists and objects), `commas` (one
    less than the values of a container) and `colons` (one for each name in an object)."""

    levels: int
    containers: int
    commas: int
    colons: int

    def check(self, text: str | bytes | bytearray) -> None:
        """Raises JsonBoundsError if `text` exceeds a bound. The text need not be valid JSON."""
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
        """True if even a count that includes the strings is within the bounds."""
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
    """Yields the bytes in slices, with quotes and the bytes inside strings replaced by 0."""
    inside = escaped = False  # state at the end of the previous slice
    for start in range(0, len(raw), SLICE):
        piece = raw[start : start + SLICE]
        if escaped:
            piece = b" " + piece[1:]
        if BACKSLASH in piece:
            piece = piece.replace(b"\\\\", b"  ")  # pairs first: a remaining backslash escapes the next character
            escaped = piece.endswith(b"\\")
            piece = piece.replace(b'\\"', b"  ")
        else:
            escaped = False
        codes = np.frombuffer(piece, np.uint8)
        quotes = codes == QUOTE
        in_string = np.logical_xor.accumulate(quotes) ^ inside
        inside = bool(in_string[-1])
        yield np.where(in_string | quotes, 0, codes)


# Bounds of JSON inside a string of a body, such as the arguments of a call. A body may have thousands of such strings.
STRING = JsonBounds(levels=128, containers=1 << 14, commas=1 << 17, colons=1 << 16)


def body_bounds(max_model_len: int) -> JsonBounds:
    """The bounds of a request body. No API accepts more values or levels; a prompt of token ids has at most as many.

    At these bounds parsing holds the GIL for some 50 ms at a time.
    """
    return JsonBounds(levels=256, containers=1 << 17, commas=max(1 << 19, max_model_len + 1024), colons=1 << 17)
