"""The request of POST /v1/responses, and its translation into a chat request."""

import re
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, model_validator

from engine.errors import InvalidRequestError
from server.protocol.chat_completions import ChatCompletionRequest, Effort, TemplateKwargs
from server.protocol.field_checks import field_error, fields_of
from server.protocol.generation_request import ranged_field
from server.protocol.grammars.response_format import (
    JsonObjectResponse,
    JsonSchemaFormat,
    TextResponse,
    parse_response_format,
)
from server.protocol.harmless import REASONING_INERT, RESPONSES_IGNORED, ServiceTier
from server.protocol.responses.items import (
    BRING_TOOLS,
    FOREIGN_ITEMS,
    READERS,
    Items,
    read_items,
    turns,
    with_instructions,
    without_earlier_thoughts,
)
from server.protocol.responses.response_tools import ToolSet, ToolsField, parse_choice
from server.protocol.strict import Strict, parse_request
from server.protocol.tools import MAX_TOOLS
from server.protocol.translated import SamplingExtras, below, renamed, without

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"
# All but the first two concern tools that run on a server. This server runs none, so they have no effect.
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]
NEEDS_STORE = {  # field that needs stored answers -> what the client can do instead
    "previous_response_id": "send the whole conversation as input",
    "conversation": "send all of it as input",
    "background": "wait for the answer, or stream it",
    "prompt": "send what it stands for as instructions and input",
}
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512
# Field of the chat request -> field of this API, for errors.
NAMES = (
    (r"messages.*", "input"),
    (r"tool_choice.*", "tool_choice"),
    (r"response_format(\.json_schema)?", "text.format"),
    (r"max_(completion_)?tokens", "max_output_tokens"),
)
OF_A_TOOL = re.compile(r"tools\[(\d+)\](?:\.(?:function|custom)\b)?(\.format\.grammar\b)?")


def _text_format(value: Any) -> Any:
    fields = fields_of(value)
    if "json_schema" in fields:
        text = "is not a field here: name, schema and strict stand beside type"
        raise field_error("unknown_parameter", text, "json_schema")
    without("json_schema", parse_response_format, chat_format(fields))
    return fields


def chat_format(fields: dict[str, Any]) -> dict[str, Any]:
    """text.format in the form of response_format, where an object `json_schema` holds the fields of a schema."""
    if fields.get("type") != "json_schema":
        return fields
    return {"type": "json_schema", "json_schema": {name: part for name, part in fields.items() if name != "type"}}


def _metadata(value: Any) -> Any:
    if not isinstance(value, dict):
        raise field_error("invalid_type", "must be an object")
    if len(value) > MAX_METADATA:
        raise field_error("invalid_value", f"may hold at most {MAX_METADATA} entries")
    for name, text in value.items():
        if len(name) > MAX_METADATA_KEY:
            raise field_error("invalid_value", f"must have names of at most {MAX_METADATA_KEY} characters")
        if not isinstance(text, str):
            raise field_error("invalid_type", "must be a string", name)
        if len(text) > MAX_METADATA_VALUE:
            raise field_error("invalid_value", f"must be at most {MAX_METADATA_VALUE} characters", name)
    return value


# Forms of these fields for /openapi.json.


class JsonSchemaText(JsonSchemaFormat):
    type: Literal["json_schema"]


class InputItem(BaseModel):
    """A message, a call, the output of a call, reasoning, or added tools, with the fields that OpenAI documents."""

    type: Literal[tuple([*READERS, *BRING_TOOLS, *sorted(FOREIGN_ITEMS)])] = "message"  # type: ignore[valid-type]


class ResponseChosenTool(BaseModel):
    """A function or custom tool by its name, or a tool that the client runs by its type."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["function", "custom", "local_shell", "shell", "apply_patch"]
    name: str | None = None
    namespace: str | None = None


class AllowedTool(BaseModel):
    """A chosen tool, or all tools of a namespace. Tools that run on OpenAI's servers are skipped."""

    type: str
    name: str | None = None
    namespace: str | None = None


class AllowedTools(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[AllowedTool] = Field(min_length=1, max_length=MAX_TOOLS)


Input = Annotated[Items, PlainValidator(read_items, json_schema_input_type=str | list[InputItem])]
Format = Annotated[
    dict[str, Any],
    BeforeValidator(_text_format, json_schema_input_type=TextResponse | JsonObjectResponse | JsonSchemaText),
]
ToolChoiceField = Annotated[
    Any,
    BeforeValidator(
        parse_choice, json_schema_input_type=Literal["none", "auto", "required"] | ResponseChosenTool | AllowedTools
    ),
]
Metadata = Annotated[dict[str, str], BeforeValidator(_metadata, json_schema_input_type=dict[str, str])]


class TextConfig(Strict):
    format: Format = Field(default_factory=lambda: {"type": "text"})
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(Strict):
    """How much the model should think. The answer has the reasoning in full, never a summary."""

    inert = REASONING_INERT

    context: Literal["auto", "current_turn", "all_turns"] = "auto"  # turns whose reasoning the template gets
    effort: Effort | None = None
    max_tokens: int | None = Field(default=None, ge=0, lt=2**31)  # limit of the thinking tokens, OpenRouter's field


class ResponseStreamOptions(Strict):
    include_obfuscation: bool = False  # see server/output/stream_options.py


class ResponsePrompt(Strict):
    """The fields that determine the prompt; the whole body of POST /v1/responses/input_tokens."""

    is_request = True

    ignored = RESPONSES_IGNORED.keys() | {"parallel_tool_calls"}
    inert = {name: () for name in (*NEEDS_STORE, "moderation", "personality")} | {
        "background": (False,),
        "context_management": ([],),
    }

    model: str | None = None
    input: Input
    instructions: str | None = None
    text: TextConfig = Field(default_factory=TextConfig)
    reasoning: ReasoningConfig = Field(default_factory=ReasoningConfig)
    tools: ToolsField = Field(default_factory=list)
    tool_choice: ToolChoiceField = "auto"
    truncation: Literal["auto", "disabled"] = "disabled"
    chat_template_kwargs: TemplateKwargs = Field(default_factory=dict)

    @classmethod
    def _is_harmless(cls, name: str, value: Any) -> bool:
        if name in NEEDS_STORE and value not in (None, False):
            text = f"is not supported: this server stores nothing, so {NEEDS_STORE[name]}"
            raise field_error("unsupported_value", text, name)
        return super()._is_harmless(name, value)

    @model_validator(mode="after")
    def _a_choice_needs_tools(self) -> "ResponsePrompt":
        if not self.tools and not self.input.tools and self.tool_choice not in ("auto", "none"):
            raise field_error("invalid_value", "may be given only with tools", "tool_choice")
        if len(self.tool_set.offered) > MAX_TOOLS:
            raise field_error(
                "invalid_value", f"may hold at most {MAX_TOOLS} entries, with those of namespaces", "tools"
            )
        below(self.tool_set.chat_choice, self.tool_choice, "tool_choice")
        return self

    @cached_property
    def tool_set(self) -> ToolSet:
        return ToolSet([(f"tools[{i}]", tool) for i, tool in enumerate(self.tools)], self.input.tools)

    @property
    def chat_choice(self) -> Any:
        return self.tool_set.chat_choice(self.tool_choice)

    @property
    def left_out(self) -> list[str]:
        """Types of the tools and items that the prompt omits."""
        return self.tool_set.hosted + self.input.left_out

    @property
    def num_turns(self) -> int:
        """Number of turns of the input. A turn starts with a message of the user after a message of another role."""
        return len(turns(self.input.messages))

    def in_our_terms(self, error: InvalidRequestError) -> InvalidRequestError:
        """An error of the chat request as an error of the field that the client sent."""
        found = OF_A_TOOL.match(error.param or "")
        if found is None or int(found[1]) >= len(self.tool_set.offered):
            return renamed(error, NAMES)
        path = self.tool_set.offered[int(found[1])].path
        return renamed(error, ((OF_A_TOOL.pattern, path + (".format" if found[2] else "")),))

    def chat_fields(self, first_turn: int = 0) -> dict[str, Any]:
        """The body of a chat request with the same prompt, without the turns before `first_turn`."""
        messages = self.input.messages
        if first_turn:
            starts = turns(messages)
            messages = messages[: starts[0]] + messages[starts[first_turn] :]
        if self.reasoning.context == "current_turn":
            messages = without_earlier_thoughts(messages)
        tools = {"tools": [tool.chat for tool in self.tool_set.offered], "tool_choice": self.chat_choice}
        return {
            "model": self.model or "",
            "messages": with_instructions(self.instructions, messages),
            "response_format": chat_format(self.text.format),
            "reasoning": self.reasoning.model_dump(exclude={"context"}),
            "verbosity": self.text.verbosity,
            "chat_template_kwargs": self.chat_template_kwargs,
            **(tools if self.tool_set.offered else {}),
        }

    def to_chat(self, first_turn: int = 0) -> ChatCompletionRequest:
        """The chat request with the same prompt. InvalidRequestError names a field of the chat: see in_our_terms."""
        return parse_request(ChatCompletionRequest, self.chat_fields(first_turn))


class ResponseRequest(ResponsePrompt, SamplingExtras):
    """POST /v1/responses. Without max_output_tokens, the context length limits the answer."""

    # `store` has no effect because no answer is ever stored; the others are hints for speed.
    ignored = RESPONSES_IGNORED.keys() | {"prompt_cache_options", "prompt_cache_retention", "store"}
    foreign = {"response_format": "text.format", "reasoning_effort": "reasoning.effort"}

    model: str
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0.0, le=2.0)
    top_p: float = ranged_field(1.0, 0.0, 1.0)
    top_k: int = ranged_field(0, -1, 2**31 - 1)
    top_logprobs: int = Field(0, ge=0, le=20)
    max_tool_calls: int | None = Field(None, ge=1, le=2**31 - 1)  # about tools that run on a server: echoed only
    include: list[Includable] = Field(default_factory=list)
    parallel_tool_calls: bool = True
    metadata: Metadata = Field(default_factory=dict)
    user: str | None = Field(None, max_length=MAX_METADATA_VALUE)
    safety_identifier: str | None = Field(None, max_length=MAX_METADATA_VALUE)
    prompt_cache_key: str | None = Field(None, max_length=MAX_METADATA_VALUE)
    service_tier: ServiceTier | None = None
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> "ResponseRequest":
        if self.stream_options is not None and not self.stream:
            raise field_error("invalid_value", "may be given only with stream: true", "stream_options")
        return self

    @property
    def include_obfuscation(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_obfuscation

    @property
    def encrypts_reasoning(self) -> bool:
        return ENCRYPTED_REASONING in self.include

    @property
    def logprobs(self) -> bool:
        return LOGPROBS in self.include or self.top_logprobs > 0

    def chat_fields(self, first_turn: int = 0) -> dict[str, Any]:
        fields = super().chat_fields(first_turn) | self.extras()
        fields |= {name: getattr(self, name) for name in ("temperature", "top_p", "top_k")}
        fields["max_completion_tokens"] = self.max_output_tokens
        if self.logprobs:
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        if self.tool_set.offered:
            fields["parallel_tool_calls"] = self.parallel_tool_calls
        return fields
