"""Reads JSON files of a checkpoint, which may be damaged or hostile. Used on the Driver's side and by the models."""

import json
from pathlib import Path
from typing import Any

from engine.errors import ModelError

MAX_JSON_BYTES = 64 << 20  # an index of the largest sharded checkpoints is below 10 MB


def read_json_object(path: Path) -> dict[str, Any]:
    """Parse a file that must hold an object; ModelError if it is missing, too large or malformed."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelError(f"{path} is larger than {MAX_JSON_BYTES >> 20} MiB: not a file of this kind.")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, not {type(value).__name__}.")
    return value


def read_json(path: Path, required: bool = False) -> dict[str, Any]:
    """Read a JSON object from a checkpoint; {} if the file is missing and not `required`. Raises ModelError."""
    if not path.is_file():
        if required:
            raise ModelError(f"{path.parent} has no {path.name}: it is not a model folder in Hugging Face form")
        return {}
    return read_json_object(path)
