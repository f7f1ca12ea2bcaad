"""Strict models: no coercion, no field dropped in silence, one short error that names the field.

A field is one of four kinds: honoured (declared in a model), ignored because it cannot change the output (`ignored`),
accepted only at the values that describe what this server does anyway (`inert`; any other value is a 400 that names the
field), or unknown (400). null stands for an absent field everywhere.
"""

import difflib
from collections.abc import Collection
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, ValidationError, model_validator
from pydantic.json_schema import JsonSchemaValue

from server.errors import MAX_NAME_LENGTH, field_path, invalid
from server.protocol.field_checks import field_error
from server.protocol.harmless import ADAPTERS, ANYTHING
from server.protocol.unknown_fields import is_ignored

# Names that different requests give to the same field. An error suggests the name that this request has.
SYNONYMS = (
    ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens", "max_length"),
    ("messages", "prompt", "input"),
    ("stop", "stop_sequences"),
)
HONOURED: set[str] = set()  # fields of all requests: a field sent to the wrong endpoint is an error in every case
NEAR = 0.7  # lowest difflib ratio of a suggested name: "stop" and "top_p" have 0.67


class Strict(BaseModel):
    """Accepts exact types only; drops nulls and harmless fields before pydantic validates the rest."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    is_request: ClassVar[bool] = False  # True for a whole body, False for a part of a body
    ignored: ClassVar[Collection[str]] = frozenset()
    inert: ClassVar[dict[str, tuple[Any, ...]]] = {}
    renamed: ClassVar[dict[str, str]] = {}  # old name -> new name, which the error suggests
    foreign: ClassVar[dict[str, str]] = {}  # other servers' name -> our name, which the error suggests

    @model_validator(mode="before")
    @classmethod
    def _drop_harmless(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        fields = cls._translate_spellings(fields)
        return {name: value for name, value in fields.items() if not cls._is_harmless(name, value)}

    @classmethod
    def _translate_spellings(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields with other servers' spellings replaced. Requests that accept such spellings override this."""
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
        if name not in cls.inert:  # checked here: pydantic would collect an error for each of a million fields
            cls._check_unknown(name)
            return True
        if any(type(value) is type(known) and value == known for known in cls.inert[name]):  # 0 is not false
            return True
        raise field_error("unsupported_value", "is not supported by this server: leave it out", name)

    @classmethod
    def _check_unknown(cls, name: str) -> None:
        """Raises unless the server ignores unknown fields. A field known elsewhere or by another name always raises:
        ignoring it would drop a setting that the client wants."""
        elsewhere = cls.is_request and name in HONOURED
        is_known = elsewhere or name in cls.foreign or any(name in group for group in cls._synonyms())
        if is_known or not is_ignored(name):
            raise field_error("unknown_parameter", f"is not a field of this request{cls._nearest(name)}", name)

    @classmethod
    def _synonyms(cls) -> list[tuple[str, ...]]:
        """The groups of SYNONYMS that contain a field of this model."""
        return [group for group in SYNONYMS if not cls.model_fields.keys().isdisjoint(group)]

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        if cls.is_request:
            HONOURED.update(cls.model_fields)

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The JSON schema of the model: optional fields may be null, and ignored and inert fields are listed too."""
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
    """Validates a JSON object. InvalidRequestError names the first wrong field and never repeats its value."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        path, text, code = _first_error(error)
        name = field_path(path)
        raise invalid(f"{name} {text}{'' if text.endswith('?') else '.'}", name, code) from None


def validated(kind: type[AnyModel], value: Any) -> AnyModel:
    """`value` as `kind`, for validators of a field: the first wrong field is an error of a field below `value`."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        path, text, code = _first_error(error)
        raise field_error(code, text, *path) from None


def _check_kind(name: str, value: Any) -> None:
    """Checks that an ignored field holds a value of its documented type."""
    try:
        ADAPTERS.get(name, ANYTHING).validate_python(value)
    except ValidationError as error:
        path, text, code = _first_error(error)
        # pydantic adds "[key]" to the path where the name of an entry is wrong; the name itself stands before it.
        raise field_error(code, text, name, *(part for part in path if part != "[key]")) from None


def _first_error(error: ValidationError) -> tuple[tuple[int | str, ...], str, str]:
    """(path of the field, text that follows the field's name, code) of the first error."""
    first = error.errors(include_url=False, include_input=False)[0]
    context = first.get("ctx", {})
    if "path" in context:  # made by field_error
        return (*first["loc"], *context["path"]), first["msg"], first["type"]
    text, code = PHRASES.get(first["type"], (first["msg"].replace("Input should", "must"), "invalid_value"))
    return first["loc"], text.format(**context), code
