"""Tools of a chat request: what may be called, whether it must be, and the calls of earlier turns."""

import json
import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, FailFast, Field, field_validator

from server.protocol.closed_objects import closed
from server.protocol.harmless import CALL_IGNORED, FUNCTION_IGNORED, TOOL_INERT
from server.protocol.strict import Strict, field_error
from server.protocol.structured_output import MAX_DESCRIPTION, is_nested_deeper, to_json_text

MAX_TOOLS = 128
# Arguments of earlier calls beyond these limits are shown to the model as text, not as an object.
MAX_ARGUMENTS_DEPTH = 128  # as deep as calls are read from what a model writes
MAX_ARGUMENTS_BRACKETS, MAX_ARGUMENTS_COMMAS = 1 << 16, 1 << 20  # in all the text, those within strings among them
MAX_INTEGER_DIGITS = 1 << 10  # of what Python turns into an integer, in quadratic time
SURROGATE = re.compile("[\ud800-\udfff]")
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


class FunctionDefinition(Strict):
    """What may be called. Without `parameters`: a function that takes none."""

    name: str = Field(json_schema_extra={"pattern": f"^{NAME.pattern}$"})
    description: str = Field("", max_length=MAX_DESCRIPTION)
    parameters: dict[str, Any] | None = None
    strict: bool = False

    @field_validator("name")
    @classmethod
    def _is_a_name(cls, name: str) -> str:
        if not NAME.fullmatch(name):
            raise field_error("invalid_value", "must be up to 64 letters, digits, underscores and dashes")
        return name

    @field_validator("parameters")
    @classmethod
    def _are_of_an_object(cls, schema: dict[str, Any]) -> dict[str, Any]:
        to_json_text(schema)
        if schema.get("type", "object") != "object":
            raise field_error("invalid_value", "must be 'object': arguments have names", "type")
        return schema

    @property
    def schema(self) -> dict[str, Any]:  # type: ignore[override]
        """Of its arguments, always an object's."""
        if self.parameters is None:
            return {**NO_PARAMETERS, "additionalProperties": False}
        return {**closed(self.parameters), "type": "object"}

    def for_template(self) -> dict[str, Any]:
        """As transformers hands a tool to a chat template."""
        parameters = {**NO_PARAMETERS, **(self.parameters or {})}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


class Tool(Strict):
    inert = TOOL_INERT
    foreign = {name: f"function.{name}" for name in ("name", "description", "parameters", "strict")}

    type: Literal["function"]
    function: FunctionDefinition


class FunctionOfHistory(Strict):
    """`arguments` may be any text: a model may have written no JSON, or was cut, and the call stays in the history."""

    ignored = FUNCTION_IGNORED

    name: str = Field(max_length=256)
    arguments: str

    @property
    def parsed(self) -> dict[str, Any] | None:
        return parse_arguments(self.arguments)


def parse_arguments(text: str) -> dict[str, Any] | None:
    """The arguments of a call, at most MAX_ARGUMENTS_DEPTH levels; an empty text has none. None: not such an object.

    A number that no double holds (1e400, NaN) is kept as the text of that number. A model may write half of a surrogate
    pair, which comes back with the conversation: U+FFFD stands for it.
    """
    if text.count("[") + text.count("{") > MAX_ARGUMENTS_BRACKETS or text.count(",") > MAX_ARGUMENTS_COMMAS:
        return None
    try:
        value = json.loads(text.strip() or "{}", parse_float=_float, parse_int=_int, parse_constant=str)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or is_nested_deeper(value, MAX_ARGUMENTS_DEPTH):
        return None
    if "\\u" in text or SURROGATE.search(text):
        whole = json.dumps(value, ensure_ascii=False)
        value = json.loads(whole.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace"))
    return dict(value)


def _float(text: str) -> float | str:
    value = float(text)
    return value if math.isfinite(value) else text


def _int(text: str) -> int | str:
    return int(text) if len(text) <= MAX_INTEGER_DIGITS else text


class ToolCallOfHistory(Strict):
    """A call of an earlier turn."""

    ignored = CALL_IGNORED

    id: str = Field(min_length=1, max_length=256)
    type: Literal["function"] = "function"
    function: FunctionOfHistory


ToolCallsField = Annotated[list[ToolCallOfHistory], FailFast(), Field(max_length=MAX_TOOLS)]


@dataclass(frozen=True)
class ToolChoice:
    """`mode`: none, auto or required; `names`: those that may be called, None for all; `one`: exactly one call."""

    mode: str
    names: tuple[str, ...] | None = None
    one: bool = False


# What tool_choice looks like, for /openapi.json.


class ChosenFunction(BaseModel):
    name: str


class ChosenTool(BaseModel):
    type: Literal["function"]
    function: ChosenFunction


class ToolSubset(BaseModel):
    mode: Literal["auto", "required"]
    tools: list[ChosenTool]


class AllowedToolsChoice(BaseModel):
    type: Literal["allowed_tools"]
    allowed_tools: ToolSubset


def parse_tool_choice(value: Any) -> ToolChoice:
    """Errors name the part below tool_choice."""
    if value in ("none", "auto", "required"):
        return ToolChoice(value)
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "function":
        return ToolChoice("required", (_function_name(value, ()),), one=True)
    if kind != "allowed_tools":
        text = "must be 'none', 'auto', 'required', or an object of type 'function' or 'allowed_tools'"
        raise field_error("invalid_value", text)
    subset = _only(value, ("type", "allowed_tools"), ()).get("allowed_tools")
    at = ("allowed_tools",)
    fields = _only(subset, ("mode", "tools"), at)
    mode, tools = fields.get("mode"), fields.get("tools")
    if mode not in ("auto", "required"):
        raise field_error("invalid_value", "must be 'auto' or 'required'", *at, "mode")
    if not isinstance(tools, list) or not 1 <= len(tools) <= MAX_TOOLS:
        raise field_error("invalid_type", f"must be a list of 1 to {MAX_TOOLS} tools", *at, "tools")
    return ToolChoice(mode, tuple(_function_name(tool, (*at, "tools", i)) for i, tool in enumerate(tools)))


def _function_name(value: Any, at: tuple[str | int, ...]) -> str:
    fields = _only(value, ("type", "function"), at)
    if fields.get("type") != "function":
        raise field_error("unsupported_value", "must be 'function'", *at, "type")
    name = _only(fields.get("function"), ("name",), (*at, "function")).get("name")
    if not isinstance(name, str):
        raise field_error("invalid_type", "must be a string", *at, "function", "name")
    return name


def _only(value: Any, names: tuple[str, ...], at: tuple[str | int, ...]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise field_error("invalid_type", "must be an object", *at)
    fields = {name: part for name, part in value.items() if part is not None}
    for name in fields:
        if name not in names:
            raise field_error("unknown_parameter", "is not a field of it", *at, name)
    return fields


ToolsField = Annotated[list[Tool], FailFast(), Field(max_length=MAX_TOOLS)]
ToolChoiceField = Annotated[
    Any,
    BeforeValidator(
        parse_tool_choice, json_schema_input_type=Literal["none", "auto", "required"] | ChosenTool | AllowedToolsChoice
    ),
]


def check_choice(tools: list[Tool], choice: ToolChoice | None) -> None:
    """Raises a field error where tools and tool_choice do not fit together."""
    if len(tools) > 1:
        names = [tool.function.name for tool in tools]
        (name, count), *_ = Counter(names).most_common(1)
        if count > 1:
            again = len(names) - 1 - names[::-1].index(name)
            raise field_error("invalid_value", "must differ from the other tools'", "tools", again, "function", "name")
    if choice is None:
        return
    if not tools and choice.mode != "none":
        raise field_error("invalid_value", "may be given only with tools", "tool_choice")
    known = {tool.function.name for tool in tools}
    if choice.names is not None and not known.issuperset(choice.names):
        raise field_error("invalid_value", "names a function that is not among the tools", "tool_choice")
