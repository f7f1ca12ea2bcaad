"""Checks for validators that read a field by hand: field errors, objects, and fields that no API knows."""

from collections.abc import Collection, Mapping
from typing import Any

from pydantic_core import PydanticCustomError

from server.protocol.unknown_fields import is_ignored


def field_error(code: str, text: str, *path: str | int) -> PydanticCustomError:
    """An error of the field at `path` below the field under validation; `text` follows the field's name."""
    return PydanticCustomError(code, "{text}", {"text": text, "path": path})


def unknown_field(text: str, *path: str | int) -> None:
    """Raises the error of an unknown field at `path`. Returns if unknown fields are ignored: the caller drops it."""
    if not is_ignored(str(path[-1])):
        raise field_error("unknown_parameter", text, *path)


def fields_of(value: Any, *path: str | int) -> dict[str, Any]:
    """The fields of the object `value` without nulls, which stand for absent fields. A field error if no object."""
    if not isinstance(value, dict):
        raise field_error("invalid_type", "must be an object", *path)
    return {name: part for name, part in value.items() if part is not None}


def known_fields(
    fields: Mapping[str, Any], known: Collection[str], *path: str | int, text: str = "is not a known field"
) -> dict[str, Any]:
    """The fields of `fields` that are in `known`, without nulls. Every other field that is not null is an error, unless
    the server ignores unknown fields."""
    found = {}
    for name, value in fields.items():
        if value is None:
            continue
        if name in known:
            found[name] = value
        else:
            unknown_field(text, *path, name)
    return found
