"""Closes objects: an object schema that lists its properties and does not mention others allows no others.

JSON Schema allows further properties there, and a model constrained by such a schema may write them until it is cut
off: with the schema of a person, 3 of 20 answers of the bundled model ended in time, and 16 with closed objects.
xgrammar's strict mode, which vLLM uses, reads schemas the same way. A closed schema allows less, so every answer obeys
the schema as it was sent; `"additionalProperties": true` keeps an object open. A schema that composes an object from
several parts is left unchanged: closing one part would forbid the properties of another or, under oneOf, accept an
object that fits another part as long as that part is open.

`"properties": {}` closes the arguments of a function only, where it is the usual spelling of "no arguments": a client
calls its code with what comes, and code without arguments accepts none. Elsewhere it often stands for any object.
"""

from collections.abc import Iterator
from typing import Any

MAX_DEPTH = 64  # levels; the grammar checker refuses deeper schemas
# Keywords whose values are subschemas: an object of them, a list of them, or one itself. Other values (enum) are not.
BY_NAME = ("properties", "$defs", "definitions")
IN_LISTS = ("anyOf", "prefixItems")
ITSELF = ("items", "additionalProperties")
COMPOSES = frozenset(
    {"$dynamicRef", "$recursiveRef", "allOf", "contains", "dependencies", "dependentSchemas", "else", "if", "not"}
    | {"oneOf", "patternProperties", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"}
)
ELSEWHERE = frozenset({"$ref", "anyOf"})  # these compose an object if a keyword of OF_OBJECTS stands beside them
OF_OBJECTS = frozenset({"additionalProperties", "minProperties", "properties", "required"})
OPEN = ("additionalProperties", "minProperties")  # the schema mentions further properties, or may need them


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with such objects closed. Returned unchanged if it composes objects or is deeper than MAX_DEPTH."""
    return _closed(schema) if _is_plain(schema, 0) else schema


def closed_arguments(schema: dict[str, Any]) -> dict[str, Any]:
    """closed() for the arguments of a function: an empty list of properties allows no argument."""
    lists_none = schema.get("properties") == {} and not schema.get("required")
    if lists_none and not any(name in schema for name in OPEN) and _is_plain(schema, 0):
        return {**closed(schema), "additionalProperties": False}
    return closed(schema)


def _is_plain(schema: dict[str, Any], depth: int) -> bool:
    if depth > MAX_DEPTH or not COMPOSES.isdisjoint(schema):
        return False
    if not ELSEWHERE.isdisjoint(schema) and not OF_OBJECTS.isdisjoint(schema):
        return False
    return all(_is_plain(part, depth + 1) for part in _parts(schema))


def _parts(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for keyword in BY_NAME:
        if isinstance(named := schema.get(keyword), dict):
            yield from (part for part in named.values() if isinstance(part, dict))
    for keyword in (*IN_LISTS, *ITSELF):
        parts = schema.get(keyword)
        yield from (part for part in (parts if isinstance(parts, list) else [parts]) if isinstance(part, dict))


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    found = dict(schema)
    for keyword in BY_NAME:
        if isinstance(named := schema.get(keyword), dict):
            found[keyword] = {name: _part(part) for name, part in named.items()}
    for keyword in (*IN_LISTS, *ITSELF):
        if keyword in schema:
            parts = schema[keyword]
            found[keyword] = [_part(part) for part in parts] if isinstance(parts, list) else _part(parts)
    if _lists_all(schema):
        found["additionalProperties"] = False
    return found


def _part(part: Any) -> Any:
    return _closed(part) if isinstance(part, dict) else part


def _lists_all(schema: dict[str, Any]) -> bool:
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, dict) or not properties or any(name in schema for name in OPEN):
        return False
    return isinstance(required, list) and all(isinstance(name, str) and name in properties for name in required)
