"""Converts values written as bare text into JSON of the type that a schema tells."""

import json
from typing import Any

from server.tools.calls.json_object import SPACE

FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"

STRING = frozenset({"string"})
# Limit of the subschemas visited per argument: many arguments may refer to the same large part of a schema.
MAX_LOOKS = 256
MAX_REFERENCES, MAX_REFERENCE = 16, 256  # length of a chain of references; characters of a reference
PYTHON = {"True": "true", "False": "false", "None": "null"}  # Python's spelling, which templates without tojson use
TYPE_OF = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


def parameter_types(function: dict[str, Any], key: str) -> frozenset[str]:
    """JSON types that the schema of a function's arguments allows for `key`; empty if the schema names no types."""
    schema = resolved(function, function)
    properties = schema.get("properties")
    if isinstance(properties, dict) and key in properties:
        return types_of(properties[key], function)
    return types_of(schema.get("additionalProperties"), function)


def types_of(schema: Any, root: dict[str, Any]) -> frozenset[str]:
    """JSON types that `schema`, a part of `root`, allows. Visits at most MAX_LOOKS branches and values: branches may
    refer to each other."""
    found: set[str] = set()
    left, looks = [schema], 0
    while left and looks < MAX_LOOKS:
        schema = resolved(left.pop(), root)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        named = schema.get("type")
        looks += 1
        if isinstance(named, str | list):
            found |= {named} if isinstance(named, str) else {name for name in named[:MAX_LOOKS] if type(name) is str}
        elif isinstance(values, list):
            found |= {type_of(value) for value in values[:MAX_LOOKS]}
            looks += len(values)
        else:
            for key in ("anyOf", "oneOf", "allOf"):
                left += schema[key][:MAX_LOOKS] if isinstance(schema.get(key), list) else []
    return frozenset(found)


def resolved(schema: Any, root: dict[str, Any]) -> dict[str, Any]:
    """The schema that `$ref` refers to in `root`, or `schema` itself without `$ref`; empty if that is no object."""
    for _ in range(MAX_REFERENCES):
        if not isinstance(schema, dict) or not isinstance(reference := schema.get("$ref"), str):
            break
        schema = _pointed(root, reference)
    return schema if isinstance(schema, dict) else {}


def _pointed(root: Any, reference: str) -> Any:
    if not reference.startswith("#") or len(reference) > MAX_REFERENCE:
        return None
    for part in reference[1:].split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        root = root.get(part) if isinstance(root, dict) else None
    return root


def type_of(value: Any) -> str:
    return TYPE_OF.get(type(value), "null")


def as_json(text: str, types: frozenset[str]) -> str:
    """The JSON of a value written as `text`: of one of `types` if possible, else of the type that the text looks like.

    If only strings are allowed, the text itself is the string. If other types are allowed too, a text that is JSON of
    such a type becomes that value. The result is valid JSON for every text.
    """
    if types == STRING:
        return json.dumps(text, ensure_ascii=False)
    bare = text.strip(SPACE)
    bare = PYTHON.get(bare, bare)
    kind = _kind(bare)
    if kind is not None and (kind in types or (kind == "integer" and "number" in types)):
        return bare if kind != "string" else json.dumps(text, ensure_ascii=False)
    if "string" in types or kind is None or (kind == "string" and not types):
        return json.dumps(text, ensure_ascii=False)
    return bare


def _kind(text: str) -> str | None:
    """Type of a JSON text; None if `text` is no JSON."""
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, float) and value.is_integer():
        return "integer"
    return type_of(value)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
