"""JsonNumbers: keeps numbers of forced JSON in the range of a double, and short enough for JSON parsers.

A JSON schema cannot express this: "number" allows 1e400, which becomes infinity, and a million digits. So while a
number is written, the mask loses the tokens that would make it too large or too long. The mask itself shows whether a
digit belongs to a JSON number: inside a string it also allows letters or a quote, and is left alone. The mask is also
left alone if no other token would remain, because then a schema or a pattern asks for those digits.
"""

import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.grammars.compiler import Words, as_words

MAX_DIGITS = 40  # before the point and after it; 128-bit integers have 39
MAX_EXPONENT = 308  # plus the digits before the point; the largest double is above 1e308
MAX_EXPONENT_DIGITS = 3
MAX_MASKS = 4096
DIGITS = frozenset(b"0123456789")
NUMERIC = re.compile(rb"[0-9.eE+-]*[0-9]")  # the part of a token that can continue a number
TEXTUAL = re.compile(rb'["A-DF-Za-df-z]')  # first characters that cannot follow a digit of a JSON number


@dataclass(frozen=True, slots=True)
class Number:
    """An unfinished number: how many digits it has before the point, after the point and in the exponent.

    `power` is the value of the exponent so far; `part` is the part that its last character belongs to: "int", "frac" or
    "exp".
    """

    part: str = "int"
    num_before: int = 0
    num_after: int = 0
    num_power: int = 0
    power: int = 0
    negative: bool = False  # the exponent has a minus sign

    @property
    def is_sane(self) -> bool:
        if self.num_before > MAX_DIGITS or self.num_after > MAX_DIGITS or self.num_power > MAX_EXPONENT_DIGITS:
            return False
        return self.negative or self.power <= MAX_EXPONENT - self.num_before

    def then(self, byte: int) -> "Number | None":
        """The number with one more byte; None if that byte ends it."""
        if byte in DIGITS:
            if self.part == "int":
                return replace(self, num_before=self.num_before + 1)
            if self.part == "frac":
                return replace(self, num_after=self.num_after + 1)
            return replace(self, num_power=self.num_power + 1, power=self.power * 10 + byte - 48)
        if byte == 46 and self.part == "int":
            return replace(self, part="frac")
        if byte in b"eE" and self.part != "exp":
            return replace(self, part="exp")
        if byte in b"+-" and self.part == "exp" and not self.num_power:
            return replace(self, negative=byte == 45)
        return None


class JsonNumbers:
    """The number limits for one vocabulary; shared by all rows."""

    def __init__(self, texts: Sequence[bytes], num_words: int) -> None:
        """`texts`: the bytes of each token; empty for special tokens."""
        self._texts = texts
        numeric = [(i, match[0]) for i, text in enumerate(texts) if (match := NUMERIC.match(text))]
        self._mixed = [(i, text) for i, text in numeric if not text.isdigit()]
        self._digits: dict[int, list[tuple[int, bytes]]] = {}  # by their number; a GPT-2 vocabulary has 1,700 of them
        for i, text in numeric:
            if text.isdigit():
                self._digits.setdefault(len(text), []).append((i, text))
        self._has_digit = [not DIGITS.isdisjoint(text) for text in texts]
        self._longest = max(self._digits, default=0)
        self._plain = not self._mixed  # no token has ".", "e" and digits
        self._textual = as_words((i for i, text in enumerate(texts) if TEXTUAL.match(text)), num_words)
        self._no_zero = as_words((i for i, text in enumerate(texts) if text.isdigit() and text[-1:] != b"0"), num_words)
        self._masks: OrderedDict[Number, Words | None] = OrderedDict()

    def follow(self, number: Number | None, token_ids: Sequence[int]) -> Number | None:
        """The unfinished number at the end of the text after these tokens; None if there is none."""
        for token_id in token_ids:
            if token_id >= len(self._texts) or (number is None and not self._has_digit[token_id]):
                continue
            for byte in self._texts[token_id]:
                number = None if number is None else number.then(byte)
                if number is None and byte in DIGITS:
                    number = Number(num_before=1)
        return number

    def limit(self, number: Number | None, words: Words) -> None:
        """Remove from a mask the tokens that make the number too large or too long."""
        if number is None:
            return
        if self._plain and number.part == "int" and number.num_before + self._longest <= MAX_DIGITS:
            return
        allowed = self._allowed(number)
        if allowed is None or (words & self._textual).any():
            return
        others = words & allowed
        if number.part == "frac" and not others.any():  # above an exclusiveMinimum, a number may not end in a zero
            others = words & self._no_zero
        if others.any():
            words[:] = others

    def _allowed(self, number: Number) -> Words | None:
        """The mask of the tokens that keep the number sane; None: all do."""
        if number not in self._masks:
            banned = [token_id for token_id, text in self._mixed if not stays_sane(number, text)]
            for length, tokens in self._digits.items():
                if number.part != "exp" or length > MAX_EXPONENT_DIGITS:  # their number decides, not their value
                    banned += [] if stays_sane(number, b"0" * length) else [token_id for token_id, _ in tokens]
                else:
                    banned += [token_id for token_id, text in tokens if not stays_sane(number, text)]
            self._masks[number] = ~as_words(banned, len(self._textual)) if banned else None
            if len(self._masks) > MAX_MASKS:
                self._masks.popitem(last=False)
        return self._masks[number]


def stays_sane(number: Number, text: bytes) -> bool:
    """True if the number is sane after each byte of `text` that continues it."""
    found: Number | None = number
    for byte in text:
        found = None if found is None else found.then(byte)
        if found is None:
            return True
        if not found.is_sane:
            return False
    return True
