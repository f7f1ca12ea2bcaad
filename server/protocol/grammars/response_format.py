"""response_format (OpenAI's) and structured_outputs (vLLM's) as the StructuredOutput that they ask for."""

import json
import re
from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from engine.structured_output import MAX_TEXT_BYTES, StructuredOutput
from server.protocol.grammars.closed_objects import closed
from server.protocol.strict import field_error
from server.protocol.unknown_fields import unknown_field

KINDS = ("json", "regex", "choice", "grammar", "json_object")
# Names that vLLM once had for what structured_outputs holds.
RENAMED = {f"guided_{kind}": f"structured_outputs.{kind}" for kind in KINDS}
# What other servers' fields are called here, where the spelling does not tell.
FOREIGN = {
    "ebnf": "structured_outputs.grammar",
    "grammar": "structured_outputs.grammar",
    "json_schema": "response_format",
    "n_predict": "max_tokens",
    "random_seed": "seed",
    "regex": "structured_outputs.regex",
}
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
MAX_DESCRIPTION = 1 << 16  # characters, here and of a tool
TOO_LARGE = f"may be at most {MAX_TEXT_BYTES} bytes"
MAX_SCHEMA_DEPTH = 128  # of what a prompt may show; what is compiled has a lower limit
TOO_DEEP = f"may be nested at most {MAX_SCHEMA_DEPTH} levels deep"


# What the two fields look like, for /openapi.json.


class JsonSchemaFormat(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = Field(pattern=f"^{NAME.pattern}$")
    description: str | None = Field(None, max_length=MAX_DESCRIPTION)
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextResponse(BaseModel):
    type: Literal["text"]


class JsonObjectResponse(BaseModel):
    type: Literal["json_object"]


class JsonSchemaResponse(BaseModel):
    type: Literal["json_schema"]
    json_schema: JsonSchemaFormat


class StructuredOutputs(BaseModel):
    """Exactly one of them."""

    model_config = ConfigDict(extra="forbid")

    json_: dict[str, Any] | str | bool | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


def parse_response_format(value: Any) -> StructuredOutput | None:
    """None for plain text. Errors name the part below response_format."""
    fields = _object(value)
    kind = fields.pop("type", None)
    if kind not in ("text", "json_object", "json_schema"):
        raise field_error("invalid_value", "must be 'text', 'json_object' or 'json_schema'", "type")
    schema = fields.pop("json_schema", None) if kind == "json_schema" else None
    _nothing_else(fields)
    if kind != "json_schema":
        return None if kind == "text" else StructuredOutput.json_object()
    if schema is None:
        raise field_error("missing_required_parameter", "must have json_schema where type is 'json_schema'")
    return _from_json_schema(schema)


def parse_structured_outputs(value: Any) -> StructuredOutput:
    """Errors name the part below structured_outputs."""
    fields = _object(value)
    given = {kind: fields.pop(kind) for kind in KINDS if kind in fields}
    if given.get("json_object") is False:
        del given["json_object"]
    _nothing_else(fields)
    if len(given) != 1:
        raise field_error("invalid_value", f"must have exactly one of {', '.join(KINDS)}")
    [(kind, part)] = given.items()
    if kind == "json_object":
        if part is not True:
            raise field_error("invalid_type", "must be true or false", kind)
        return StructuredOutput.json_object()
    if kind == "choice":
        return StructuredOutput("choice", to_json_text(_checked_choices(part), kind))
    if kind == "json" and not isinstance(part, str):
        if not isinstance(part, dict | bool):
            raise field_error("invalid_type", "must be a JSON schema: an object, or its text", kind)
        return StructuredOutput("json_schema", _schema_text(part, kind))
    if not isinstance(part, str):
        raise field_error("invalid_type", "must be a string", kind)
    if not part:
        raise field_error("invalid_value", "must not be empty", kind)
    if len(part.encode("utf-8", "surrogatepass")) > MAX_TEXT_BYTES:
        raise field_error("invalid_value", TOO_LARGE, kind)
    return StructuredOutput("json_schema" if kind == "json" else kind, part)


def _from_json_schema(value: Any) -> StructuredOutput:
    at = "json_schema"
    fields = _object(value, at)
    schema, strict = fields.pop("schema", None), fields.pop("strict", False)
    name, description = fields.pop("name", None), fields.pop("description", "")
    _nothing_else(fields, at)
    if name is None:
        raise field_error("missing_required_parameter", "is required", at, "name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise field_error("invalid_value", "must be up to 64 letters, digits, underscores and dashes", at, "name")
    if not isinstance(description, str):
        raise field_error("invalid_type", "must be a string", at, "description")
    if len(description) > MAX_DESCRIPTION:
        raise field_error("invalid_value", f"must be at most {MAX_DESCRIPTION} characters", at, "description")
    if not isinstance(strict, bool):
        raise field_error("invalid_type", "must be true or false", at, "strict")
    if schema is None:
        raise field_error("missing_required_parameter", "is required", at, "schema")
    if not isinstance(schema, dict):
        raise field_error("invalid_type", "must be an object", at, "schema")
    return StructuredOutput("json_schema", _schema_text(schema, at, "schema"), lenient=not strict)


def _object(value: Any, *path: str) -> dict[str, Any]:
    """Without what is null, as everywhere."""
    if not isinstance(value, dict):
        raise field_error("invalid_type", "must be an object", *path)
    return {name: part for name, part in value.items() if part is not None}


def _nothing_else(fields: dict[str, Any], *path: str) -> None:
    for name in fields:
        unknown_field("is not a field of it", *path, name)


def _checked_choices(value: Any) -> list[str]:
    if not isinstance(value, list) or not value:
        raise field_error("invalid_type", "must be a list of strings, not empty", "choice")
    for i, choice in enumerate(value):
        if not isinstance(choice, str):
            raise field_error("invalid_type", "must be a string", "choice", i)
    return value


def _schema_text(schema: dict[str, Any] | bool, *path: str) -> str:
    text = to_json_text(schema, *path)  # it is small, then
    return text if isinstance(schema, bool) else to_json_text(closed(schema), *path)


def to_json_text(value: Any, *path: str) -> str:
    """In ASCII. A value that cannot be short enough is refused before it is written."""
    if not _is_small(value):
        raise field_error("invalid_value", TOO_LARGE, *path)
    try:
        text = json.dumps(value, separators=(",", ":"))
    except RecursionError:
        raise field_error("invalid_value", TOO_DEEP, *path) from None
    if is_nested_deeper(value, MAX_SCHEMA_DEPTH):
        raise field_error("invalid_value", TOO_DEEP, *path)
    if len(text) > MAX_TEXT_BYTES:
        raise field_error("invalid_value", TOO_LARGE, *path)
    return text


def is_nested_deeper(value: Any, levels: int) -> bool:
    """Than so many lists and objects within each other."""
    containers = [value] if isinstance(value, list | dict) else []
    while containers and levels:
        parts = chain.from_iterable(part.values() if isinstance(part, dict) else part for part in containers)
        containers = [part for part in parts if isinstance(part, list | dict)]
        levels -= 1
    return bool(containers)


def _is_small(value: Any) -> bool:
    """Whether it has no more values and characters than the longest text; stops counting there."""
    left = MAX_TEXT_BYTES
    stack = [value]
    while stack and left >= 0:
        part = stack.pop()
        left -= len(part) if isinstance(part, str) else 1
        if isinstance(part, list | dict):
            left -= len(part)
            if left >= 0:
                stack.extend(part if isinstance(part, list) else [*part, *part.values()])
    return left >= 0


ResponseFormat = Annotated[
    Any,
    BeforeValidator(
        parse_response_format, json_schema_input_type=TextResponse | JsonObjectResponse | JsonSchemaResponse
    ),
]
StructuredOutputsField = Annotated[
    Any, BeforeValidator(parse_structured_outputs, json_schema_input_type=StructuredOutputs)
]
