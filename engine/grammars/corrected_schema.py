"""Corrects schemas that llguidance accepts but does not enforce as they are written, and finds integers that it rounds.

- A number above an integer and below the next one (`exclusiveMinimum: 0, maximum: 0.5`) may be that integer itself,
  and so may a number below one (`exclusiveMaximum: 0, minimum: -0.5`).
- `prefixItems` has no effect beside `additionalItems`, which only older drafts know.
- Integers become doubles: `const: 9007199254740993` makes the text 9007199254740992. Below -2^63 the process dies.
"""

import json
import math
import re
from collections.abc import Iterator
from typing import Any

from engine.grammars.schema_parts import parts_of

MAY_NEED_CORRECTION = re.compile(r'"additionalItems"|"exclusiveM|[0-9]{16}')
UPPER, LOWER = ("exclusiveMaximum", "maximum"), ("exclusiveMinimum", "minimum")
EXACT = ("const", "enum", *UPPER, *LOWER)  # keywords whose integers are enforced exactly or refused
# Stands for the number next to 0. It has as many digits as forced JSON may have after the point.
NEXT_TO_ZERO = 1e-40
TOO_LARGE = "a number of this size cannot be enforced"


def corrected(text: str) -> str:
    """The schema `text` (JSON) as llguidance has to read it. ValueError if a number in it would be rounded."""
    if not MAY_NEED_CORRECTION.search(text):
        return text
    schema = json.loads(text)
    parts = [part for _, part in parts_of(schema)]
    for part in parts:
        if any(holds_rounded_integer(part[key]) for key in EXACT if key in part):
            raise ValueError(TOO_LARGE)
        if "prefixItems" in part and "additionalItems" in part:
            part.setdefault("items", part.pop("additionalItems"))
    _exclude_integers(parts)
    return json.dumps(schema)


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


def _exclude_integers(parts: list[dict[str, Any]]) -> None:
    """Replace exclusive bounds that are integers by the doubles next to them, where the other bound, which may stand in
    another part (`allOf`, `$ref`), is less than 1 away."""
    uppers, lowers = list(_fractions(parts, UPPER)), list(_fractions(parts, LOWER))
    below, above = set(map(math.floor, uppers)), set(map(math.ceil, lowers))
    for part in parts:
        low, high = (part.get(key) for key in ("exclusiveMinimum", "exclusiveMaximum"))
        if type(low) in (int, float) and low in below:
            part["exclusiveMinimum"] = math.nextafter(low, math.inf) if low else NEXT_TO_ZERO
        if type(high) in (int, float) and high in above:
            part["exclusiveMaximum"] = math.nextafter(high, -math.inf) if high else -NEXT_TO_ZERO


def _fractions(parts: list[dict[str, Any]], keys: tuple[str, ...]) -> Iterator[float]:
    """The values of `keys` that are finite and no integers."""
    values = (part.get(key) for part in parts for key in keys)
    return (value for value in values if type(value) is float and math.isfinite(value) and not value.is_integer())
