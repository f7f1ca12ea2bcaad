"""Finds the values of keywords that llguidance refuses: a pattern with look-around, a bound that is too large.

llguidance's lenient mode ignores keywords that it does not know. A known keyword whose value it cannot use is an error
in both modes, and the error names no place. So each value is compiled by itself, in a small schema.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from engine.grammars.corrected_schema import TOO_LARGE, holds_rounded_integer
from engine.grammars.schema_parts import PATTERNS, Path, parts_of
from engine.structured_output import OPTIONAL

MAX_TRIALS = 256  # values compiled per grammar, 0.1 to 1 ms each; further values count as unusable
MAX_PATH = 100  # characters of a path in an error
PLAIN = range(1, 1 << 31)  # integers that llguidance accepts for every keyword of numbers
TEXTS = frozenset({"format", "pattern"})
UNTRIED = f"the schema has more than {MAX_TRIALS} values that may be unusable"
# Keyword -> types of the values that it constrains.
TYPES_OF = {
    **dict.fromkeys(("format", "maxLength", "minLength", "pattern"), ("string",)),
    **dict.fromkeys(
        ("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf"), ("integer", "number")
    ),
    **dict.fromkeys(("maxItems", "minItems"), ("array",)),
    **dict.fromkeys(("maxProperties", "minProperties"), ("object",)),
}
IDENTIFIER = re.compile(r"[a-zA-Z][a-zA-Z0-9_]*")
UNKNOWN = re.compile(r"Unimplemented keys: (\[.*\])")
OVERLAP = "oneOf constraints are not supported"
NO_OVERLAP = "oneOf is supported only if no value fits two of its alternatives: use anyOf"
# `%json` before a schema, and the tokens and comments of Lark that may contain the same characters. Strings and regular
# expressions match without their end, too: otherwise the search would start anew at every quote and slash in them.
LARK_PARTS = re.compile(
    r"""(?:#|//)[^\n]*|<[^<>\s]+>|"(?:[^"\\\n]|\\.)*"?|/(?:[^/\\]|\\.)+/?|(?P<json>%json\s*)(?=\{)"""
)
OPTIONAL_TERMINAL = re.compile(rf"^({OPTIONAL}\w+: )(/.+/)$", re.MULTILINE)
ANY_TEXT = r"/(.|\n)*/"

FaultOf = Callable[[str], str]  # compiles a text; returns the fault, or ""


@dataclass(frozen=True)
class Unusable:
    """The value of `key` in `part`, which is a part of the schema and can be changed."""

    part: dict[str, Any]
    key: str
    path: Path
    fault: str

    def __str__(self) -> str:
        path = json_path(self.path)
        return f"{path if len(path) <= MAX_PATH else path[:MAX_PATH] + '...'}: {self.fault}"


def limited(fault_of: FaultOf) -> FaultOf:
    """`fault_of` for the first MAX_TRIALS texts. Each text is tried once; texts beyond them have the fault UNTRIED."""
    known: dict[str, str] = {}

    def limited_fault_of(text: str) -> str:
        if text not in known:
            if len(known) == MAX_TRIALS:
                return UNTRIED
            known[text] = fault_of(text)
        return known[text]

    return limited_fault_of


def unusable_values(schema: Any, fault_of: FaultOf, error: str = "") -> Iterator[Unusable]:
    """The values that llguidance refuses, in the order of the schema.

    fault_of: compiles a schema, given as JSON. error: the error of the whole schema in strict mode; keywords that it
    names are unusable, too.
    """
    found = UNKNOWN.search(error)
    unknown = frozenset(re.findall(r'"([^"]+)"', found[1]) if found else ())
    shared = {key: schema[key] for key in ("$defs", "definitions") if isinstance(schema, dict) and key in schema}

    def fault_of_keyword(part: dict[str, Any], key: str) -> str:
        if key in unknown:
            return "this keyword cannot be enforced"
        if key in ("const", "enum"):
            return TOO_LARGE if holds_rounded_integer(part[key]) else ""
        if key in TYPES_OF:
            return _fault_of_value(part, key, fault_of)
        if key == "oneOf" and error.startswith(NO_OVERLAP):
            fault = fault_of(json.dumps(shared | {key: part[key]}))
            return fault if fault.startswith(NO_OVERLAP) else ""
        return ""

    for path, part in parts_of(schema):
        for key, value in part.items():
            if fault := fault_of_keyword(part, key):
                yield Unusable(part, key, (*path, key), fault)
            elif key == PATTERNS and isinstance(value, dict):
                for pattern in value:
                    if fault := _reason(fault_of(json.dumps({"type": "object", PATTERNS: {pattern: {}}}))):
                        yield Unusable(value, pattern, (*path, key, pattern), fault)


def without_unusable_values(schema: Any, fault_of: FaultOf) -> bool:
    """Delete the values that llguidance refuses. Returns True if there were any."""
    found = list(unusable_values(schema, fault_of))
    for value in found:
        del value.part[value.key]
    return bool(found)


def usable_lark(text: str, schema_fault_of: FaultOf, lark_fault_of: FaultOf) -> str:
    """A grammar of the server without the values that llguidance refuses in its lenient schemas, and with any text in
    place of the optional terminals that it refuses."""
    schema_fault_of, lark_fault_of = limited(schema_fault_of), limited(lark_fault_of)
    text = OPTIONAL_TERMINAL.sub(
        lambda found: found[1] + (ANY_TEXT if lark_fault_of(f"start: {found[2]}\n") else found[2]), text
    )

    def usable(schema: str) -> str:
        value = json.loads(schema)
        is_lenient = value.get("x-guidance", {}).get("lenient", False)
        return json.dumps(value) if is_lenient and without_unusable_values(value, schema_fault_of) else schema

    return with_schemas(text, usable)


def with_schemas(text: str, change: Callable[[str], str]) -> str:
    """A Lark grammar with `change` of each schema behind `%json`. Stops at the first text there that is no JSON:
    llguidance refuses it."""
    pieces, at = [], 0
    while found := LARK_PARTS.search(text, at):
        pieces.append(text[at : found.end()])
        at = found.end()
        if found["json"]:
            try:
                _, end = json.JSONDecoder().raw_decode(text, at)
            except (ValueError, RecursionError):
                break
            pieces.append(change(text[at:end]))
            at = end
    return "".join([*pieces, text[at:]])


def json_path(path: Path) -> str:
    """A path in the form of the package jsonschema: $.properties.name['a b'][0]."""
    parts = []
    for key in path:
        if isinstance(key, int):
            parts.append(f"[{key}]")
        elif IDENTIFIER.fullmatch(key):
            parts.append(f".{key}")
        else:
            escaped = key.replace("\\", "\\\\").replace("'", "\\'")
            parts.append(f"['{escaped}']")
    return "".join(["$", *parts])


def _fault_of_value(part: Mapping[str, Any], key: str, fault_of: FaultOf) -> str:
    """The fault of one value for one of the types that the part allows, or ""."""
    value, allowed = part[key], part.get("type", ())
    # Below an unknown keyword the keys may be names, whose values are no numbers and strings.
    if isinstance(value, dict | list) or (key not in TEXTS and type(value) is int and value in PLAIN):
        return ""
    types = [name for name in TYPES_OF[key] if name == allowed or (isinstance(allowed, list) and name in allowed)]
    faults = (fault_of(json.dumps({"type": name, key: value})) for name in types or TYPES_OF[key])
    fault = next(filter(None, faults), "")
    # llguidance writes ranges of numbers and lengths as regular expressions.
    return TOO_LARGE if "regex" in fault and key not in TEXTS else _reason(fault)


def _reason(fault: str) -> str:
    """The fault without the text of the regular expression, which the client has."""
    return fault.rpartition("\nerror: ")[2]
