"""Objects that list their properties and say nothing of others have no others.

JSON Schema allows any others there, and a model that is held to such a schema may write them until it is cut: of 20
answers of the bundled model to the schema of a person, 3 ended in time, and 16 with this. xgrammar's strict mode, which
is what vLLM's users get, reads schemas so, too. What is closed allows less, so an answer obeys the schema as it was
sent; `"additionalProperties": true` keeps an object open. A schema that composes objects of parts is left as it is:
closing one part would forbid what another asks for, or under oneOf let pass what fits another part while that is open.
"""

from collections.abc import Iterator
from typing import Any

MAX_DEPTH = 64  # the checker refuses what is deeper
# Where subschemas are: in an object by name, in a list, or the value itself. Anything else, as in enum, is no schema.
BY_NAME = ("properties", "$defs", "definitions")
IN_LISTS = ("anyOf", "prefixItems")
ITSELF = ("items", "additionalProperties")
COMPOSES = frozenset(
    {"$dynamicRef", "$recursiveRef", "allOf", "contains", "dependencies", "dependentSchemas", "else", "if", "not"}
    | {"oneOf", "patternProperties", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"}
)
ELSEWHERE = frozenset({"$ref", "anyOf"})  # beside what speaks of properties, these compose, too
OF_OBJECTS = frozenset({"additionalProperties", "minProperties", "properties", "required"})
OPEN = ("additionalProperties", "minProperties")  # the schema speaks of others, or may need them


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with such objects closed; the same where it composes, or is deeper than MAX_DEPTH."""
    return _closed(schema) if _is_plain(schema, 0) else schema


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
