"""Reads response_format (OpenAI's) and structured_outputs (vLLM's) into a StructuredOutput."""

import json
import re
from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from engine.structured_output import MAX_TEXT_BYTES, StructuredOutput
from server.protocol.field_checks import field_error, fields_of, known_fields
from server.protocol.grammars.closed_objects import closed

KINDS = ("json", "regex", "choice", "grammar", "json_object")
# vLLM's former names of the fields of structured_outputs.
RENAMED = {f"guided_{kind}": f"structured_outputs.{kind}" for kind in KINDS}
# Other servers' field -> our field, for names that are too different to be suggested by spelling.
FOREIGN = {
    "ebnf": "structured_outputs.grammar",
    "grammar": "structured_outputs.grammar",
    "json_schema": "response_format",
    "n_predict": "max_tokens",
    "random_seed": "seed",
    "regex": "structured_outputs.regex",
}
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
MAX_DESCRIPTION = 1 << 16  # characters of the description of a format or a tool
TOO_LARGE = f"may be at most {MAX_TEXT_BYTES} bytes"
MAX_SCHEMA_DEPTH = 128  # levels of any schema in a request; schemas that are compiled have a lower limit
TOO_DEEP = f"may be nested at most {MAX_SCHEMA_DEPTH} levels deep"


# Forms of the two fields for /openapi.json.


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
    """Exactly one of the fields must be given."""

    model_config = ConfigDict(extra="forbid")

    json_: dict[str, Any] | str | bool | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


def parse_response_format(value: Any) -> StructuredOutput | None:
    """Returns the form that response_format asks for; None for plain text. Field errors name the part below it."""
    fields = fields_of(value)
    kind = fields.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise field_error("invalid_value", "must be 'text', 'json_object' or 'json_schema'", "type")
    known_fields(fields, ("type", "json_schema") if kind == "json_schema" else ("type",))
    if kind != "json_schema":
        return None if kind == "text" else StructuredOutput.json_object()
    if "json_schema" not in fields:
        raise field_error("missing_required_parameter", "must have json_schema where type is 'json_schema'")
    return _from_json_schema(fields["json_schema"])


def parse_structured_outputs(value: Any) -> StructuredOutput:
    """Returns the form that structured_outputs asks for. Field errors name the part below it."""
    given = known_fields(fields_of(value), KINDS)
    if given.get("json_object") is False:
        del given["json_object"]
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
    return StructuredOutput("json_schema", _closed_text(part, kind)) if kind == "json" else StructuredOutput(kind, part)


def _from_json_schema(value: Any) -> StructuredOutput:
    at = "json_schema"
    fields = known_fields(fields_of(value, at), ("name", "description", "schema", "strict"), at)
    schema, strict = fields.get("schema"), fields.get("strict", False)
    name, description = fields.get("name"), fields.get("description", "")
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


def _checked_choices(value: Any) -> list[str]:
    if not isinstance(value, list) or not value:
        raise field_error("invalid_type", "must be a list of strings, not empty", "choice")
    for i, choice in enumerate(value):
        if not isinstance(choice, str):
            raise field_error("invalid_type", "must be a string", "choice", i)
    return value


def _schema_text(schema: dict[str, Any] | bool, *path: str) -> str:
    text = to_json_text(schema, *path)  # also limits the size and depth, before `closed` walks the schema
    return text if isinstance(schema, bool) else to_json_text(closed(schema), *path)


def _closed_text(text: str, *path: str) -> str:
    """A schema that the client sends as a text, with closed objects. A text that is no object stays as it is: the
    compiler says why."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return _schema_text(schema, *path) if isinstance(schema, dict) else text


def to_json_text(value: Any, *path: str) -> str:
    """`value` as compact JSON in ASCII. A field error if the text is too long or nested too deeply; a value whose text
    cannot be short enough is refused before the text is made."""
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
    """True if `value` has more than `levels` nested lists and objects."""
    containers = [value] if isinstance(value, list | dict) else []
    while containers and levels:
        parts = chain.from_iterable(part.values() if isinstance(part, dict) else part for part in containers)
        containers = [part for part in parts if isinstance(part, list | dict)]
        levels -= 1
    return bool(containers)


def _is_small(value: Any) -> bool:
    """False if `value` has more values and characters than MAX_TEXT_BYTES; stops counting there."""
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
