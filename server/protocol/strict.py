"""Strict models: no coercion, nothing dropped in silence, one short error that names the field.

A field is one of four things: honoured (declared in a model), ignored because it cannot change the output (`ignored`),
inert at the values that mean what this server does anyway (`inert`; any other value is a 400 that names it), or unknown
(400). null stands for an absent field everywhere.
"""

import difflib
from collections.abc import Collection
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, ValidationError, model_validator
from pydantic.json_schema import JsonSchemaValue

from engine.errors import InvalidRequestError
from server.errors import MAX_NAME_LENGTH, field_path, invalid
from server.protocol.harmless import ADAPTERS, ANYTHING
from server.protocol.unknown_fields import field_error as field_error
from server.protocol.unknown_fields import is_ignored

# Names that one thing has in different requests, so that the one of this request can be told where another is written.
SYNONYMS = (
    ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens", "max_length"),
    ("messages", "prompt", "input"),
    ("stop", "stop_sequences"),
)
HONOURED: set[str] = set()  # fields of all requests: one that is in the wrong request is no unknown field
NEAR = 0.7  # of difflib's ratio: "stop" and "top_p" have 0.67


class Strict(BaseModel):
    """Takes exact types only; drops nulls and harmless fields before pydantic looks."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    is_request: ClassVar[bool] = False  # a whole body, not a part of one
    ignored: ClassVar[Collection[str]] = frozenset()
    inert: ClassVar[dict[str, tuple[Any, ...]]] = {}
    renamed: ClassVar[dict[str, str]] = {}  # old names: an error says the new one
    foreign: ClassVar[dict[str, str]] = {}  # other servers' names: so it does of them

    @model_validator(mode="before")
    @classmethod
    def _drop_harmless(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        fields = cls._in_our_words(fields)
        return {name: value for name, value in fields.items() if not cls._is_harmless(name, value)}

    @classmethod
    def _in_our_words(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """With other servers' spellings replaced, where there are some."""
        return fields

    @classmethod
    def _is_harmless(cls, name: str, value: Any) -> bool:
        if value is None:
            return True
        if name in cls.ignored:
            _check_kind(name, value)
            return True
        if name in cls.model_fields:
            return False
        if name in cls.renamed:
            raise field_error("unsupported_value", f"is the old name of {cls.renamed[name]}: use that", name)
        if name not in cls.inert:  # not left to pydantic, which would collect an error for each of a million fields
            cls._check_unknown(name)
            return True
        if any(type(value) is type(known) and value == known for known in cls.inert[name]):  # 0 is not false
            return True
        raise field_error("unsupported_value", "is not supported by this server: leave it out", name)

    @classmethod
    def _check_unknown(cls, name: str) -> None:
        """Raise, unless unknown fields are ignored and this one stands for nothing that is known: in another place, or
        by another name."""
        elsewhere = cls.is_request and name in HONOURED
        is_known = elsewhere or name in cls.foreign or any(name in group for group in cls._synonyms())
        if is_known or not is_ignored(name):
            raise field_error("unknown_parameter", f"is not a field of this request{cls._nearest(name)}", name)

    @classmethod
    def _synonyms(cls) -> list[tuple[str, ...]]:
        """Of the names of its fields."""
        return [group for group in SYNONYMS if not cls.model_fields.keys().isdisjoint(group)]

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        if cls.is_request:
            HONOURED.update(cls.model_fields)

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """With null for every field that may be absent, and with the fields that are ignored or inert."""
        schema = handler.resolve_ref_schema(handler(core_schema))
        fields = schema.setdefault("properties", {})
        for name in fields.keys() - set(schema.get("required", ())):
            known = fields[name]
            if {"type": "null"} not in known.get("anyOf", ()):
                about = {key: known.pop(key) for key in ("title", "default", "description") if key in known}
                fields[name] = {"anyOf": [known, {"type": "null"}], **about}
        for name in cls.ignored:
            kind = ADAPTERS.get(name, ANYTHING).json_schema()
            nullable = {"anyOf": [kind, {"type": "null"}]} if kind else {}
            fields.setdefault(name, {**nullable, "description": "has no effect"})
        for name, values in cls.inert.items():
            fields.setdefault(name, {"enum": [*values, None]})
        return schema

    @classmethod
    def _nearest(cls, name: str) -> str:
        groups = (group for group in cls._synonyms() if name in group)
        same = (synonym for group in groups for synonym in group if synonym in cls.model_fields)
        near = difflib.get_close_matches(name[:MAX_NAME_LENGTH].lower(), cls.model_fields, n=1, cutoff=NEAR)
        meant = cls.foreign.get(name) or next(same, "".join(near))
        return f"; did you mean {meant}?" if meant else ""


AnyModel = TypeVar("AnyModel", bound=Strict)

# pydantic's error type -> (what follows the field's name, OpenAI's code)
PHRASES = {
    "bool_type": ("must be true or false", "invalid_type"),
    "dict_type": ("must be an object", "invalid_type"),
    "float_type": ("must be a number", "invalid_type"),
    "int_type": ("must be an integer", "invalid_type"),
    "list_type": ("must be a list", "invalid_type"),
    "literal_error": ("must be {expected}", "unsupported_value"),
    "missing": ("is required", "missing_required_parameter"),
    "model_type": ("must be an object", "invalid_type"),
    "string_too_short": ("must not be empty", "invalid_value"),
    "string_too_long": ("must be at most {max_length} characters", "invalid_value"),
    "string_type": ("must be a string", "invalid_type"),
    "too_long": ("may hold at most {max_length} entries", "invalid_value"),
    "too_short": ("must not be empty", "invalid_value"),
}


def parse_request(kind: type[AnyModel], body: dict[str, Any]) -> AnyModel:
    """Validate a JSON object; InvalidRequestError names the first wrong field and never repeats its value."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise _describe(first["type"], first["loc"], first["msg"], first.get("ctx", {})) from None


def validated(kind: type[AnyModel], value: Any) -> AnyModel:
    """`value` as `kind`, for validators of a field: the first wrong field is an error of a field below it."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        path, text, code = _explain(first["type"], first["loc"], first["msg"], first.get("ctx", {}))
        raise field_error(code, text, *path) from None


def _describe(
    error_type: str, loc: tuple[int | str, ...], message: str, context: dict[str, Any]
) -> InvalidRequestError:
    path, text, code = _explain(error_type, loc, message, context)
    name = field_path(path)
    return invalid(f"{name} {text}{'' if text.endswith('?') else '.'}", name, code)


def _explain(
    error_type: str, loc: tuple[int | str, ...], message: str, context: dict[str, Any]
) -> tuple[tuple[int | str, ...], str, str]:
    """(path of the field, what is said after its name, code)."""
    text, code = (message, error_type) if "path" in context else _phrase(error_type, message, context)
    return (*loc, *context.get("path", ())), text, code


def _phrase(error_type: str, message: str, context: dict[str, Any]) -> tuple[str, str]:
    """What is said of one of pydantic's own errors after the field's name, and its code."""
    text, code = PHRASES.get(error_type, (message.replace("Input should", "must"), "invalid_value"))
    return text.format(**context), code


def _check_kind(name: str, value: Any) -> None:
    """An ignored field still has to hold what is documented for it."""
    try:
        ADAPTERS.get(name, ANYTHING).validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        text, code = _phrase(first["type"], first["msg"], first.get("ctx", {}))
        path = [part for part in first["loc"] if part != "[key]"]  # of an entry whose name is wrong: that name
        raise field_error(code, text, name, *path) from None
