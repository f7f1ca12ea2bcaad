"""Tools of a chat request: their definitions, tool_choice, and the calls of earlier turns."""

import json
import math
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, FailFast, Field, PlainValidator, field_validator

from engine.structured_output import StructuredOutput
from server.http.json_bounds import STRING
from server.protocol.field_checks import field_error, fields_of, known_fields
from server.protocol.grammars.closed_objects import closed_arguments
from server.protocol.grammars.lark_in_json import MAX_DEFINITION, LarkError, lark_of_json_string
from server.protocol.grammars.response_format import MAX_DESCRIPTION, to_json_text
from server.protocol.harmless import CALL_IGNORED, FUNCTION_IGNORED, TOOL_IGNORED
from server.protocol.strict import Strict, validated

MAX_TOOLS = 1024  # OpenAI's limit is 128; agents with several MCP servers send more to Anthropic's API
MAX_CALLS = 128  # calls of one turn of the history
MAX_LARK_TOOLS = 16  # tools of a request that have a Lark grammar
MAX_INTEGER_DIGITS = 1 << 10  # longest integer that is parsed: Python needs quadratic time
SURROGATE = re.compile("[\ud800-\udfff]")
NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")  # Anthropic's rule. OpenAI's chat has 64: MCP names exceed that
INPUT = "input"  # name of the argument that holds the text of a custom tool's call
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


def check_name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise field_error("invalid_value", "must be up to 128 letters, digits, underscores and dashes")
    return name


class FunctionDefinition(Strict):
    """A function that the model may call. A function without `parameters` has no arguments."""

    name: str = Field(json_schema_extra={"pattern": f"^{NAME.pattern}$"})
    description: str = Field("", max_length=MAX_DESCRIPTION)
    parameters: dict[str, Any] | None = None
    strict: bool = False

    @field_validator("name")
    @classmethod
    def _is_a_name(cls, name: str) -> str:
        return check_name(name)

    @field_validator("parameters")
    @classmethod
    def _are_of_an_object(cls, schema: dict[str, Any]) -> dict[str, Any]:
        to_json_text(schema)
        if schema.get("type", "object") != "object":
            raise field_error("invalid_value", "must be 'object': arguments have names", "type")
        return schema

    @property
    def schema(self) -> dict[str, Any]:  # type: ignore[override]
        """JSON schema of the arguments, always an object's."""
        if self.parameters is None:
            return {**NO_PARAMETERS, "additionalProperties": False}
        return {**closed_arguments(self.parameters), "type": "object"}

    def for_template(self) -> dict[str, Any]:
        """The tool in the form in which transformers passes tools to a chat template."""
        parameters = {**NO_PARAMETERS, **(self.parameters or {})}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


class Tool(Strict):
    ignored = TOOL_IGNORED
    foreign = {name: f"function.{name}" for name in ("name", "description", "parameters", "strict")}

    type: Literal["function"]
    function: FunctionDefinition

    @property
    def form(self) -> tuple[StructuredOutput, str]:
        """(form of the arguments, path of the field that errors of the form name)."""
        schema = StructuredOutput.json_schema(self.function.schema, lenient=not self.function.strict)
        return schema, "function.parameters"


class LarkFunction(FunctionDefinition):
    """A custom tool with a Lark grammar, as a function of one string, INPUT. A JSON schema cannot express the grammar.

    `quoted`: Lark grammar of the string as JSON spells it, with the closing quote and without the opening one.
    """

    quoted: str


class TextFormat(Strict):
    type: Literal["text"]


class Grammar(Strict):
    """`definition`: llguidance's Lark or a regular expression of Rust's regex crate; it describes the whole text."""

    syntax: Literal["lark", "regex"]
    definition: str = Field(min_length=1, max_length=MAX_DEFINITION)


class GrammarFormat(Strict):
    foreign = {"syntax": "grammar.syntax", "definition": "grammar.definition"}

    type: Literal["grammar"]
    grammar: Grammar


FORMATS: dict[str, type[TextFormat] | type[GrammarFormat]] = {"text": TextFormat, "grammar": GrammarFormat}


def by_type(kinds: dict[str, Any], value: Any) -> Any:
    """`value` as the model of its `type`, which is checked before any other field. `kinds`: type -> model."""
    if not isinstance(value, dict):
        raise field_error("invalid_type", "must be an object")
    kind = value.get("type")
    if kind is None:
        raise field_error("missing_required_parameter", f"is required: {listed(kinds)}", "type")
    if not isinstance(kind, str) or kind not in kinds:
        raise field_error("unsupported_value", f"must be {listed(kinds)}", "type")
    return validated(kinds[kind], value)


def listed(kinds: Collection[str]) -> str:
    *most, last = (f"'{kind}'" for kind in kinds)
    return f"{', '.join(most)} or {last}" if most else last


class CustomDefinition(Strict):
    """A tool whose call has a text instead of arguments."""

    foreign = {"parameters": "format"}

    name: str = Field(json_schema_extra={"pattern": f"^{NAME.pattern}$"})
    description: str = Field("", max_length=MAX_DESCRIPTION)
    format: Annotated[
        TextFormat | GrammarFormat,
        PlainValidator(partial(by_type, FORMATS), json_schema_input_type=TextFormat | GrammarFormat),
    ] = TextFormat(type="text")

    @field_validator("name")
    @classmethod
    def _is_a_name(cls, name: str) -> str:
        return check_name(name)


class CustomTool(Strict):
    """A custom tool. The model sees a function of one string, INPUT: chat templates and call formats know functions
    only."""

    ignored = TOOL_IGNORED
    foreign = {name: f"custom.{name}" for name in ("name", "description", "format")}

    type: Literal["custom"]
    custom: CustomDefinition

    @property
    def lark(self) -> str | None:
        """The tool's Lark grammar, or None."""
        form = self.custom.format
        return form.grammar.definition if isinstance(form, GrammarFormat) and form.grammar.syntax == "lark" else None

    @cached_property
    def function(self) -> FunctionDefinition:
        grammar = self.custom.format.grammar if isinstance(self.custom.format, GrammarFormat) else None
        text: dict[str, Any] = {"type": "string", "description": "the whole input, as text"}
        if grammar is not None:
            text["description"] = f"the whole input, a text of this {grammar.syntax} grammar: {grammar.definition}"
        if grammar is not None and grammar.syntax == "regex":
            text["pattern"] = f"^(?:{grammar.definition})$"
        fields: dict[str, Any] = {
            "name": self.custom.name,
            "description": self.custom.description,
            "parameters": {
                "type": "object",
                "properties": {INPUT: text},
                "required": [INPUT],
                "additionalProperties": False,
            },
            "strict": grammar is not None,
        }
        if grammar is not None and grammar.syntax == "lark":
            return LarkFunction.model_construct(**fields, quoted=lark_of_json_string(grammar.definition))
        return FunctionDefinition.model_construct(**fields)

    @property
    def form(self) -> tuple[StructuredOutput, str]:
        """See Tool."""
        if not isinstance(self.custom.format, GrammarFormat):
            return StructuredOutput.json_schema(self.function.schema), "custom"
        grammar = self.custom.format.grammar
        kind = "grammar" if grammar.syntax == "lark" else "regex"
        return StructuredOutput(kind, grammar.definition), "custom.format.grammar.definition"


TOOLS: dict[str, type[Tool] | type[CustomTool]] = {"function": Tool, "custom": CustomTool}


class FunctionOfHistory(Strict):
    """`arguments` may be any text: a model may write invalid JSON or be cut off, and the call stays in the history."""

    ignored = FUNCTION_IGNORED

    name: str = Field(max_length=256)
    arguments: str

    @property
    def parsed(self) -> dict[str, Any] | None:
        return parse_arguments(self.arguments)


def parse_arguments(text: str) -> dict[str, Any] | None:
    """The arguments of a call; an empty text stands for no arguments. None if `text` is no JSON object or exceeds the
    bounds STRING.

    A number that no double can hold (1e400, NaN) is kept as text. A lone surrogate, which a model may write and which
    comes back with the conversation, becomes U+FFFD.
    """
    try:
        STRING.check(text)
        value = json.loads(text.strip() or "{}", parse_float=_float, parse_int=_int, parse_constant=str)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
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


class CustomOfHistory(Strict):
    name: str = Field(max_length=256)
    input: str


class CustomCallOfHistory(Strict):
    """A call of a custom tool in an earlier turn."""

    ignored = CALL_IGNORED

    id: str = Field(min_length=1, max_length=256)
    type: Literal["custom"]
    custom: CustomOfHistory

    @cached_property
    def function(self) -> FunctionOfHistory:
        arguments = json.dumps({INPUT: self.custom.input}, ensure_ascii=False)
        return FunctionOfHistory.model_construct(name=self.custom.name, arguments=arguments)


CALLS: dict[str, type[ToolCallOfHistory] | type[CustomCallOfHistory]] = {
    "function": ToolCallOfHistory,
    "custom": CustomCallOfHistory,
}


def _call_of_history(value: Any) -> Any:
    has_type = not isinstance(value, dict) or value.get("type") is not None
    return by_type(CALLS, value if has_type else {**value, "type": "function"})


CallField = Annotated[
    ToolCallOfHistory | CustomCallOfHistory,
    PlainValidator(_call_of_history, json_schema_input_type=ToolCallOfHistory | CustomCallOfHistory),
]


def _check_number_of_calls(value: Any) -> Any:
    if isinstance(value, list) and len(value) > MAX_CALLS:
        raise field_error("invalid_value", f"has more than {MAX_CALLS} calls in one turn: leave some out")
    return value


ToolCallsField = Annotated[
    list[CallField], FailFast(), Field(max_length=MAX_CALLS), BeforeValidator(_check_number_of_calls)
]


@dataclass(frozen=True)
class ToolChoice:
    """`mode`: none, auto or required. `names`: tools that may be called; None: all. `one`: exactly one call."""

    mode: str
    names: tuple[str, ...] | None = None
    one: bool = False


# Forms of tool_choice for /openapi.json.


class ChosenFunction(BaseModel):
    name: str


class ChosenTool(BaseModel):
    type: Literal["function"]
    function: ChosenFunction


class ChosenCustomTool(BaseModel):
    type: Literal["custom"]
    custom: ChosenFunction


class ToolSubset(BaseModel):
    mode: Literal["auto", "required"]
    tools: list[ChosenTool | ChosenCustomTool]


class AllowedToolsChoice(BaseModel):
    type: Literal["allowed_tools"]
    allowed_tools: ToolSubset


def parse_tool_choice(value: Any) -> ToolChoice:
    """Returns tool_choice as a value. Field errors name the part below tool_choice."""
    if value in ("none", "auto", "required"):
        return ToolChoice(value)
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind in TOOLS:
        return ToolChoice("required", (_tool_name(value, ()),), one=True)
    if kind != "allowed_tools":
        text = "must be 'none', 'auto', 'required', or an object of type 'function', 'custom' or 'allowed_tools'"
        raise field_error("invalid_value", text)
    subset = _only(value, ("type", "allowed_tools")).get("allowed_tools")
    at = ("allowed_tools",)
    fields = _only(subset, ("mode", "tools"), *at)
    mode, tools = fields.get("mode"), fields.get("tools")
    if mode not in ("auto", "required"):
        raise field_error("invalid_value", "must be 'auto' or 'required'", *at, "mode")
    if not isinstance(tools, list) or not 1 <= len(tools) <= MAX_TOOLS:
        raise field_error("invalid_type", f"must be a list of 1 to {MAX_TOOLS} tools", *at, "tools")
    return ToolChoice(mode, tuple(_tool_name(tool, (*at, "tools", i)) for i, tool in enumerate(tools)))


def _tool_name(value: Any, at: tuple[str | int, ...]) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict):
        raise field_error("invalid_type", "must be an object", *at)
    if not isinstance(kind, str) or kind not in TOOLS:
        raise field_error("unsupported_value", f"must be {listed(TOOLS)}", *at, "type")
    fields = _only(value, ("type", kind), *at)
    name = _only(fields.get(kind), ("name",), *at, kind).get("name")
    if not isinstance(name, str):
        raise field_error("invalid_type", "must be a string", *at, kind, "name")
    return name


def _only(value: Any, names: tuple[str, ...], *path: str | int) -> dict[str, Any]:
    return known_fields(fields_of(value, *path), names, *path)


ToolField = Annotated[
    Tool | CustomTool, PlainValidator(partial(by_type, TOOLS), json_schema_input_type=Tool | CustomTool)
]
ToolsField = Annotated[list[ToolField], FailFast(), Field(max_length=MAX_TOOLS)]
ToolChoiceField = Annotated[
    Any,
    BeforeValidator(
        parse_tool_choice,
        json_schema_input_type=Literal["none", "auto", "required"] | ChosenTool | ChosenCustomTool | AllowedToolsChoice,
    ),
]


def check_choice(tools: Sequence[Tool | CustomTool], choice: ToolChoice | None) -> None:
    """Raises a field error if tools and tool_choice contradict each other, or a grammar cannot be used."""
    _check_grammars(tools)
    if len(tools) > 1:
        names = [tool.function.name for tool in tools]
        (name, count), *_ = Counter(names).most_common(1)
        if count > 1:
            again = len(names) - 1 - names[::-1].index(name)
            raise field_error(
                "invalid_value", "must differ from the other tools'", "tools", again, tools[again].type, "name"
            )
    if choice is None:
        return
    if not tools and choice.mode != "none":
        raise field_error("invalid_value", "may be given only with tools", "tool_choice")
    known = {tool.function.name for tool in tools}
    if choice.names is not None and not known.issuperset(choice.names):
        raise field_error("invalid_value", "names a tool that is not among the tools", "tool_choice")


def _check_grammars(tools: Sequence[Tool | CustomTool]) -> None:
    larks = [(i, tool.lark) for i, tool in enumerate(tools) if isinstance(tool, CustomTool) and tool.lark is not None]
    for number, (i, definition) in enumerate(larks):
        path = ("tools", i, "custom", "format", "grammar", "definition")
        if number == MAX_LARK_TOOLS:
            raise field_error("invalid_value", f"is one too many: at most {MAX_LARK_TOOLS} may be in Lark", *path)
        try:
            lark_of_json_string(f"{definition}")
        except LarkError as error:
            raise field_error("invalid_value", str(error), *path) from None
