"""Corrects schemas that llguidance accepts but does not enforce as they are written, and finds integers that it rounds.

- Integers become doubles: `const: 9007199254740993` makes the text 9007199254740992. Below -2^63 the process dies.
"""

import json
import re
from typing import Any

from engine.grammars.schema_parts import parts_of

MAY_NEED_CORRECTION = re.compile(r'[0-9]{16}')
UPPER, LOWER = ("exclusiveMaximum", "maximum"), ("exclusiveMinimum", "minimum")
EXACT = ("const", "enum", *UPPER, *LOWER)  # keywords whose integers are enforced exactly or refused
TOO_LARGE = "a number of this size cannot be enforced"


def corrected(text: str) -> str:
    """The schema `text` (JSON) as llguidance has to read it. ValueError if a number in it would be rounded."""
    if not MAY_NEED_CORRECTION.search(text):
        return text
    for _, part in parts_of(json.loads(text)):
        if any(holds_rounded_integer(part[key]) for key in EXACT if key in part):
            raise ValueError(TOO_LARGE)
    return text


def holds_rounded_integer(value: Any) -> bool:
    """True if a value, or one inside of it, is an integer that no double holds, or beyond 63 bits."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, list | dict):
            left.extend(one.values() if isinstance(one, dict) else one)
        elif type(one) is int and (abs(one) >= 1 << 63 or int(float(one)) != one):
            return True
    return False
