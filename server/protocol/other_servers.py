"""Other servers' spellings of our fields: llama.cpp's and Ollama's, in chat and completion requests.

Ollama's own API has them in an object `options`. Clients of its OpenAI-compatible API send that object too, where it
also holds names of ours.
"""

from typing import Any

from server.protocol.field_checks import field_error, unknown_field

SPELLINGS = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
NO_LIMIT = {"num_predict": (-1, -2)}  # values that stand for "up to the context length"
OPTIONS = "options"
IN_OPTIONS = (
    "frequency_penalty", "min_p", "num_ctx", "presence_penalty", "seed", "stop", "temperature", "top_k", "top_p"
)  # fmt: skip


def translate_spellings(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a request with these spellings replaced. A field error if two spellings contradict each other."""
    if fields.keys().isdisjoint((OPTIONS, *SPELLINGS)):
        return fields
    options = fields.get(OPTIONS)
    if not isinstance(options, dict | None):
        raise field_error("invalid_type", "must be an object", OPTIONS)
    found = {name: value for name, value in fields.items() if name not in (OPTIONS, *SPELLINGS)}
    for name in SPELLINGS:
        _set_field(found, name, fields.get(name), (name,))
    for name, value in (options or {}).items():
        if value is None:
            continue
        if name in SPELLINGS or name in IN_OPTIONS:
            _set_field(found, name, value, (OPTIONS, name))
        else:
            unknown_field("is not one of the options that this server has", OPTIONS, name)
    return found


def _set_field(found: dict[str, Any], name: str, value: Any, path: tuple[str, ...]) -> None:
    ours = SPELLINGS.get(name, name)
    if type(value) is int and value in NO_LIMIT.get(name, ()):
        value = None
    if value is None:
        return
    if name in SPELLINGS and not isinstance(value, int if ours == "max_tokens" else int | float):
        raise field_error("invalid_type", f"must be {'an integer' if ours == 'max_tokens' else 'a number'}", *path)
    if found.get(ours) is None:
        found[ours] = value
    elif type(found[ours]) is not type(value) or found[ours] != value:
        raise field_error("invalid_value", f"must equal {ours}: leave one of them out", *path)


def options_schema(fields: dict[str, Any]) -> dict[str, Any]:
    """JSON schemas of these spellings, made from the schemas (`fields`) of the fields that they stand for."""
    spellings = {name: _described(fields[ours], f"another name of {ours}") for name, ours in SPELLINGS.items()}
    options = spellings | {name: fields[name] for name in IN_OPTIONS}
    kinds = [{"type": "object", "properties": options, "additionalProperties": False}, {"type": "null"}]
    return {**spellings, OPTIONS: {"anyOf": kinds, "description": "fields of the request, as Ollama has them"}}


def _described(field: dict[str, Any], text: str) -> dict[str, Any]:
    return {name: part for name, part in field.items() if name not in ("title", "default")} | {"description": text}
