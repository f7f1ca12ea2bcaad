"""Reads JSON files of a checkpoint, which may be damaged or hostile. Used on the Driver's side and by the models."""

import json
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from engine.errors import ModelError

T = TypeVar("T", bound=msgspec.Struct)
MAX_JSON_BYTES = 64 << 20  # an index of the largest sharded checkpoints is below 10 MB


def read_json_object(path: Path) -> dict[str, Any]:
    """Parse a file that must hold an object; ModelError if it is missing, too large or malformed."""
    content = _read(path)
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, not {type(value).__name__}.")
    return value


def read_json_fields(path: Path, fields: type[T]) -> T:
    """Read the fields that a msgspec.Struct names; the others are skipped, fifteen times as fast as they are parsed.
    `fields()` if the file is missing. ModelError if it is too large or malformed."""
    if not path.is_file():
        return fields()
    content = _read(path)
    try:
        return msgspec.json.decode(content, type=fields)
    except (ValueError, RecursionError) as error:  # ValueError: also msgspec's own errors, and bytes that are not UTF-8
        raise ModelError(f"{path} is not valid JSON: {error}") from error


def _read(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelError(f"{path} is larger than {MAX_JSON_BYTES >> 20} MiB: not a file of this kind.")
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}.") from error


def read_json(path: Path, required: bool = False) -> dict[str, Any]:
    """Read a JSON object from a checkpoint; {} if the file is missing and not `required`. Raises ModelError."""
    if not path.is_file():
        if required:
            raise ModelError(f"{path.parent} has no {path.name}: it is not a model folder in Hugging Face form")
        return {}
    return read_json_object(path)
