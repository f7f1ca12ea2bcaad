"""Tools of a chat request: what may be called, whether it must be, and the calls of earlier turns."""

import json
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
MAX_ARGUMENTS_DEPTH = 128  # as deep as calls are read from what a model writes
SURROGATE = re.compile("[\ud800-\udfff]")
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
NO_ARGUMENTS = f"must be a JSON object, as text, of finite numbers and at most {MAX_ARGUMENTS_DEPTH} levels"
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
    ignored = FUNCTION_IGNORED

    name: str = Field(max_length=256)
    arguments: str

    @property
    def parsed(self) -> dict[str, Any]:
        return parse_arguments(self.arguments)

    @field_validator("arguments")
    @classmethod
    def _are_an_object(cls, text: str) -> str:
        try:
            parse_arguments(text)
        except ValueError:
            raise field_error("invalid_value", NO_ARGUMENTS) from None
        return text


def parse_arguments(text: str) -> dict[str, Any]:
    """The arguments of a call; an empty text has none. ValueError for what is no JSON object that a prompt can hold.

    A model may write half of a surrogate pair, which comes back with the conversation: U+FFFD stands for it then.
    """
    try:
        value = json.loads(text or "{}")
        whole = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict) or is_nested_deeper(value, MAX_ARGUMENTS_DEPTH):
        raise ValueError("not an object, or nested too deeply")
    if SURROGATE.search(whole):
        value = json.loads(whole.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace"))
    return dict(value)


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
