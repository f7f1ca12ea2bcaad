"""The tools of /v1/messages. Tools that run on Anthropic's servers are left out of the prompt."""

import re
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, FailFast, Field, PlainValidator, model_validator

from server.errors import MAX_NAME_LENGTH
from server.protocol.field_checks import field_error
from server.protocol.grammars.response_format import MAX_DESCRIPTION
from server.protocol.harmless import ANTHROPIC_TOOL_IGNORED, ANTHROPIC_TOOL_INERT
from server.protocol.strict import Strict, validated
from server.protocol.tools import MAX_TOOLS

# Types of tools, which may end in the date of a version.
HOSTED = re.compile(
    r"(advisor|code_execution|mcp_toolset|tool_search_tool(_bm25|_regex)?|web_fetch|web_search)(_[0-9]{8})?"
)
SEARCH = "tool_search_tool"
CLIENT_RUN = re.compile(r"(bash|browser_toolset|computer|computer_toolset|memory|text_editor)_[0-9]{8}")
NOT_HERE = "runs on Anthropic's servers, not on this one: leave it out, or let the model choose"


class AnthropicTool(Strict):
    """A tool. With `defer_loading` the prompt omits the tool until the conversation refers to it."""

    ignored = ANTHROPIC_TOOL_IGNORED
    inert = ANTHROPIC_TOOL_INERT
    foreign = {"function": "name", "parameters": "input_schema"}

    type: Literal["custom"] = "custom"
    name: str
    description: str = Field("", max_length=MAX_DESCRIPTION)
    input_schema: dict[str, Any]
    strict: bool = False
    defer_loading: bool = False

    @property
    def for_chat(self) -> dict[str, Any]:
        function = self.model_dump(include={"name", "description", "strict"}) | {"parameters": self.input_schema}
        return {"type": "function", "function": function}


class AnthropicHostedTool(Strict):
    """A tool that runs on Anthropic's servers, such as web_search_20250305. Its other fields are not checked."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(max_length=MAX_NAME_LENGTH, json_schema_extra={"pattern": f"^{HOSTED.pattern}$"})
    name: str = Field("", max_length=MAX_NAME_LENGTH)

    @property
    def kind(self) -> str:
        """The type without the date of its version."""
        return re.sub("_[0-9]{8}$", "", self.type)

    @classmethod
    def _is_harmless(cls, name: str, value: Any) -> bool:
        return value is None


def _tool(value: Any) -> AnthropicTool | AnthropicHostedTool:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind == "custom":
        return validated(AnthropicTool, value)
    if HOSTED.fullmatch(kind):
        return validated(AnthropicHostedTool, value)
    if CLIENT_RUN.fullmatch(kind):
        text = f"is {kind!r}, whose schema only Anthropic's models know: send a 'custom' tool with an input_schema"
    else:
        text = "must be 'custom', or the type of a tool that runs on Anthropic's servers, which the prompt omits"
    raise field_error("unsupported_value", text, "type")


ToolField = Annotated[
    AnthropicTool | AnthropicHostedTool,
    PlainValidator(_tool, json_schema_input_type=AnthropicTool | AnthropicHostedTool),
]
ToolsField = Annotated[list[ToolField], FailFast(), Field(max_length=MAX_TOOLS)]


class AnthropicToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _names_a_tool(self) -> "AnthropicToolChoice":
        if (self.type == "tool") != (self.name is not None):
            raise field_error("invalid_value", "is required with type 'tool', and not allowed with other types", "name")
        return self

    @property
    def for_chat(self) -> Any:
        if self.name is not None:
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type
