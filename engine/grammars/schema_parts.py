"""Finds the subschemas of a JSON schema."""

from collections.abc import Iterator
from typing import Any

PATTERNS = "patternProperties"
BY_NAME = frozenset({"$defs", "definitions", "dependentSchemas", PATTERNS, "properties"})  # their keys are names
DATA = frozenset({"const", "default", "enum", "example", "examples"})  # their values are no schemas

Path = tuple[str | int, ...]


def parts_of(schema: Any) -> Iterator[tuple[Path, dict[str, Any]]]:
    """(path, part) of every subschema, the schema itself first. References may lead anywhere, so parts below unknown
    keywords count, too."""
    return _parts(schema, (), False)


def _parts(value: Any, path: Path, named: bool) -> Iterator[tuple[Path, dict[str, Any]]]:
    """named: the keys of `value` are names, not keywords."""
    if isinstance(value, dict):
        if not named:
            yield path, value
        for key, inner in value.items():
            if isinstance(inner, dict | list) and (named or key not in DATA):
                yield from _parts(inner, (*path, key), not named and key in BY_NAME)
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _parts(inner, (*path, i), False)
