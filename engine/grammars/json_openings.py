"""How far one token can lengthen the shortest end of a JSON text: the largest part of its schema that a text may open.

The shortest end of a text holds what the schema still requires. So only parts that it may also leave out lengthen it:
optional properties, further items of an array, and alternatives (`anyOf`, `enum`, types) other than the shortest.
Lengths are in tokens and rather too large. A schema with keywords that are not known here has no bound.
"""

import json
import math
from collections.abc import Callable
from typing import Any

ANY_VALUE = 2  # `""`, `{}` or `0`, and a separator
ANY_KEY = 8  # a key that the schema does not name
FORMAT = 40  # bytes of the longest format: a UUID has 36
LONG = 256  # characters of a text that is not encoded to count its tokens
MAX_PASSES = 8  # more only for long chains of references to parts that refer back
NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
# Keywords that leave it to other parts what a value is, or say nothing about it.
REFERRING = frozenset(
    "$ref anyOf oneOf allOf $schema $id $comment $anchor $defs definitions title description default examples "
    "deprecated readOnly writeOnly".split()
)
KNOWN = REFERRING.union(
    "type const enum properties required additionalProperties unevaluatedProperties minProperties maxProperties items "
    "prefixItems additionalItems unevaluatedItems minItems maxItems uniqueItems minLength maxLength format".split(),
    NUMBERS,
)
TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")


def largest_opening(schema: Any, num_tokens: Callable[[str], int]) -> float:
    """Tokens of the largest part that a text of `schema` may open; inf if that has no bound.

    num_tokens: the number of tokens of a text.
    """
    try:
        return _Parts(schema, num_tokens).largest()
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError, RecursionError):
        return math.inf  # no such schema, numbers beyond a double, or too long a chain of references


class _Parts:
    """The parts of one schema. A part that refers to itself has the length of the pass before, inf in the first."""

    def __init__(self, root: Any, num_tokens: Callable[[str], int]) -> None:
        self._root, self._count = root, num_tokens
        self._counted: dict[str, int] = {}
        self._before: dict[int, float] = {}  # the least length of each part, by id()
        self._least: dict[int, float] = {}
        self._largest: float = 0

    def largest(self) -> float:
        for _ in range(MAX_PASSES):
            self._before, self._least, self._largest = self._least, {}, ANY_VALUE
            self._length(self._root)
            if self._least == self._before:
                return self._largest
        return math.inf

    def _num_tokens(self, value: Any) -> int:
        """Tokens of a value that the schema gives."""
        text = json.dumps(value)
        if len(text) > LONG:
            return len(text)
        if text not in self._counted:
            self._counted[text] = self._count(text)
        return self._counted[text]

    def _open(self, length: float) -> None:
        self._largest = max(self._largest, length)

    def _length(self, part: Any) -> float:
        """The least length of a part. Notes what it opens."""
        if isinstance(part, bool):
            return ANY_VALUE
        if id(part) not in self._least:
            self._least[id(part)] = self._before.get(id(part), math.inf)
            self._least[id(part)] = self._of_keywords(part)
        return self._least[id(part)]

    def _of_keywords(self, part: dict[str, Any]) -> float:
        if not all(name in KNOWN or name.startswith("x-") for name in part):
            self._open(math.inf)
            return math.inf
        lengths = [self._length(one) for one in part.get("allOf", [])]
        for name in ("anyOf", "oneOf"):
            if name in part:
                lengths.append(self._shortest([self._length(one) for one in part[name]]))
        if "$ref" in part:
            lengths.append(self._length(self._target(part["$ref"])))
        if "const" in part or "enum" in part:
            values = [part["const"]] if "const" in part else part["enum"]
            lengths.append(self._shortest([self._num_tokens(value) for value in values]))
        elif not lengths or part.keys() - REFERRING:
            types = part.get("type", TYPES)
            types = [types] if isinstance(types, str) else types
            lengths.append(self._shortest([self._of_type(part, name) for name in types]))
        return sum(lengths)

    def _shortest(self, lengths: list[float]) -> float:
        if len(lengths) > 1:
            self._open(max(lengths))
        return min(lengths)

    def _of_type(self, part: dict[str, Any], name: str) -> float:
        if name == "object":
            return self._of_object(part)
        if name == "array":
            return self._of_array(part)
        if name == "string":
            least: int = part.get("minLength", 0)
            return ANY_VALUE + least + (FORMAT if "format" in part else 0)
        if name in ("number", "integer"):
            return ANY_VALUE + max(_digits(part[bound]) if bound in part else 0 for bound in NUMBERS)
        return ANY_VALUE

    def _of_object(self, part: dict[str, Any]) -> float:
        total: float = ANY_VALUE
        required = frozenset(part.get("required", []))
        for key, value in {**dict.fromkeys(required, True), **part.get("properties", {})}.items():
            length = self._num_tokens(key) + ANY_VALUE + self._length(value)
            if key in required:
                total += length
            else:
                self._open(length)
        others = part.get("additionalProperties", part.get("unevaluatedProperties", True))
        if others is not False:
            self._open(ANY_KEY + ANY_VALUE + self._length(others))
        return total if part.get("minProperties", 0) <= len(required) else math.inf

    def _of_array(self, part: dict[str, Any]) -> float:
        first = [1 + self._length(item) for item in part.get("prefixItems", [])]
        others = part.get("items", part.get("additionalItems", True))
        length, least = 1 + self._length(others), part.get("minItems", 0)
        total: float = ANY_VALUE + sum(first[:least])
        for opened in first[least:]:
            self._open(opened)
        if others is not False:
            self._open(length)
        return total + length * (least - len(first)) if least > len(first) else total

    def _target(self, reference: str) -> Any:
        """The target of a reference within the schema. KeyError for another reference."""
        root, *keys = reference.split("/")
        if root != "#":
            raise KeyError(reference)
        part = self._root
        for key in keys:
            part = part[int(key)] if isinstance(part, list) else part[key.replace("~1", "/").replace("~0", "~")]
        return part


def _digits(bound: float) -> int:
    """Characters of a number near a bound, written in full."""
    return len(f"{abs(bound):.0f}") + len(json.dumps(bound))
