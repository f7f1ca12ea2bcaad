"""The request of Anthropic's POST /v1/messages, and the chat request that it stands for."""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, model_validator

from engine.errors import InvalidRequestError
from engine.sampling_params import MAX_STOP_STRINGS
from server.errors import NO_THREADS
from server.protocol.chat import ChatCompletionRequest, TemplateKwargs
from server.protocol.generation import within
from server.protocol.sampling_extras import SamplingExtras
from server.protocol.strict import Strict, field_error, parse_request
from server.protocol.structured_output import MAX_DESCRIPTION, parse_response_format
from server.protocol.translated import renamed, without

MAX_TOOLS = 128
MAX_NAME = 256  # characters of the name or id of a call
MAX_MESSAGES = 100_000  # Anthropic's limit
CACHE = "cache_control"  # a hint for speed on every block: equal prefixes are found without it
# How a chat request names what is sent here.
NAMES = (
    (r"messages.*", "messages"),
    (r"(tools\[\d+\])\.function\.parameters", r"\1.input_schema"),
    (r"(tools\[\d+\])\.function", r"\1"),
    (r"tool_choice.*", "tool_choice"),
    (r"response_format(\.json_schema\.schema|\.json_schema)?", "output_config.format"),
    (r"max_completion_tokens", "max_tokens"),
    (r"stop$", "stop_sequences"),
)
ChatMessage = dict[str, Any]


def in_our_terms(error: InvalidRequestError) -> InvalidRequestError:
    return renamed(error, NAMES)


def _blocks(value: Any, kinds: tuple[str, ...], *path: str | int) -> list[dict[str, Any]]:
    """Content as a list of blocks, each with the fields of its type."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise field_error("invalid_type", "must be a string or a list of blocks", *path)
    return [_block(block, kinds, *path, i) for i, block in enumerate(value)]


# Type of a block -> its fields: those that must be there with their types, and others.
FIELDS: dict[str, tuple[dict[str, type], tuple[str, ...]]] = {
    "text": ({"text": str}, ("citations",)),
    "thinking": ({"thinking": str}, ("signature",)),
    "tool_use": ({"id": str, "name": str, "input": dict}, ("caller",)),
    "tool_result": ({"tool_use_id": str}, ("content", "is_error")),
}


def _block(block: Any, kinds: tuple[str, ...], *path: str | int) -> dict[str, Any]:
    if not isinstance(block, dict):
        raise field_error("invalid_type", "must be an object", *path)
    kind = block.get("type")
    if kind not in kinds:
        text = f"must be {' or '.join(map(repr, kinds))} here: this server takes text only"
        raise field_error("unsupported_value", text, *path, "type")
    required, others = FIELDS[kind]
    fields = {name: value for name, value in block.items() if value is not None and name not in ("type", CACHE)}
    for name in fields:
        if name not in required and name not in others:
            raise field_error("unknown_parameter", f"is not a field of a block of type {kind}", *path, name)
    for name, python_type in required.items():
        if not isinstance(fields.get(name), python_type):
            kind_of = "a string" if python_type is str else "an object"
            raise field_error("invalid_type", f"must be {kind_of}", *path, name)
    return {"type": kind, **fields}


def _system(value: Any) -> Any:
    return "\n".join(block["text"] for block in _blocks(value, ("text",)))


def _messages(value: Any) -> Any:
    """As messages of a chat. Turns of one role that follow each other are one turn, as Anthropic has it."""
    if not isinstance(value, list):
        raise field_error("invalid_type", "must be a list")
    if not 1 <= len(value) <= MAX_MESSAGES:
        raise field_error("invalid_value", f"must hold 1 to {MAX_MESSAGES} messages")
    messages: list[ChatMessage] = []
    for i, message in enumerate(value):
        if not isinstance(message, dict):
            raise field_error("invalid_type", "must be an object", i)
        for name in message:
            if name not in ("role", "content"):
                raise field_error("unknown_parameter", "is not a field of a message", i, name)
        role = message.get("role")
        if role == "assistant":
            blocks = _blocks(message.get("content"), ("text", "thinking", "tool_use"), i, "content")
            _check_calls(blocks, i)
            _add_assistant(messages, blocks)
        elif role == "user":
            blocks = _blocks(message.get("content"), ("text", "tool_result"), i, "content")
            _add_user(messages, blocks, i)
        elif role == "system":
            text = "\n".join(block["text"] for block in _blocks(message.get("content"), ("text",), i, "content"))
            messages.append({"role": "system", "content": text})
        else:
            raise field_error("invalid_value", "must be 'user', 'assistant' or 'system'", i, "role")
    return messages


def _check_calls(blocks: list[dict[str, Any]], i: int) -> None:
    calls = [(j, block) for j, block in enumerate(blocks) if block["type"] == "tool_use"]
    for j, block in calls:
        for name in ("id", "name"):
            if not 1 <= len(block[name]) <= MAX_NAME:
                raise field_error("invalid_value", f"must have 1 to {MAX_NAME} characters", i, "content", j, name)


def _add_assistant(messages: list[ChatMessage], blocks: list[dict[str, Any]]) -> None:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    message = messages[-1]
    for block in blocks:
        if block["type"] == "text":
            message["content"] += "\n" * bool(message["content"]) + block["text"]
        elif block["type"] == "thinking":
            message["reasoning_content"] = message.get("reasoning_content", "") + block["thinking"]
        else:
            function = {"name": block["name"], "arguments": _arguments(block["input"])}
            message.setdefault("tool_calls", []).append({"id": block["id"], "type": "function", "function": function})


def _arguments(value: dict[str, Any]) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise field_error("invalid_value", "has a tool_use whose input is nested too deeply") from None


def _add_user(messages: list[ChatMessage], blocks: list[dict[str, Any]], i: int) -> None:
    texts = []
    for j, block in enumerate(blocks):
        if block["type"] == "text":
            texts.append(block["text"])
        else:
            messages.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": _result(block, i, j)})
    if not texts and blocks:
        return
    text = "\n".join(texts)
    if messages and messages[-1]["role"] == "user":
        messages[-1]["content"] += "\n" + text
    else:
        messages.append({"role": "user", "content": text})


def _result(block: dict[str, Any], i: int, j: int) -> str:
    """What a tool said. Chat templates have no place for failure, so the text says it."""
    content = _blocks(block.get("content", ""), ("text",), i, "content", j, "content")
    text = "\n".join(part["text"] for part in content)
    failed = block.get("is_error", False)
    if not isinstance(failed, bool):
        raise field_error("invalid_type", "must be true or false", i, "content", j, "is_error")
    return f"Error: {text}" if failed else text


def _format(value: Any) -> Any:
    """As a chat's response_format. Anthropic's schemas have no name, and are always strict."""
    if not isinstance(value, dict):
        raise field_error("invalid_type", "must be an object")
    schema, kind = value.get("schema"), value.get("type")
    if kind != "json_schema":
        raise field_error("invalid_value", "must be 'json_schema'", "type")
    for name in value.keys() - {"type", "schema"}:
        raise field_error("unknown_parameter", "is not a field of it", name)
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    without("json_schema", parse_response_format, form)
    return form


# What these fields look like, for /openapi.json.


class JsonFormat(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class TextBlock(BaseModel):
    type: Literal["text"]
    text: str


class ContentBlock(BaseModel):
    """With the fields that Anthropic documents for its type."""

    type: Literal["text", "thinking", "tool_use", "tool_result"]


class TurnMessage(BaseModel):
    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


System = Annotated[str, BeforeValidator(_system, json_schema_input_type=str | list[TextBlock])]
Format = Annotated[Any, BeforeValidator(_format, json_schema_input_type=JsonFormat)]
Turns = Annotated[list[TurnMessage], Field(min_length=1)]
Messages = Annotated[list[dict[str, Any]], BeforeValidator(_messages, json_schema_input_type=Turns)]


class OutputConfig(Strict):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: Format = None  # as a chat's response_format


class Thinking(Strict):
    """Disabled: a template that can is told not to think. Else the model thinks as it does; budgets are wishes."""

    ignored = frozenset({"budget_tokens"})
    inert = {"display": ("summarized",)}

    type: Literal["enabled", "disabled", "adaptive"]


class AnthropicTool(Strict):
    ignored = frozenset({CACHE, "eager_input_streaming", "input_examples"})
    inert = {"allowed_callers": (["direct"],), "defer_loading": (False,)}
    foreign = {"function": "name", "parameters": "input_schema"}

    type: Literal["custom"] = "custom"
    name: str
    description: str = Field("", max_length=MAX_DESCRIPTION)
    input_schema: dict[str, Any]
    strict: bool = False

    @property
    def for_chat(self) -> dict[str, Any]:
        function = self.model_dump(include={"name", "description", "strict"}) | {"parameters": self.input_schema}
        return {"type": "function", "function": function}


class AnthropicToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _names_a_tool(self) -> "AnthropicToolChoice":
        if (self.type == "tool") != (self.name is not None):
            raise field_error("invalid_value", "is needed with type 'tool', and with no other", "name")
        return self

    @property
    def for_chat(self) -> Any:
        if self.name is not None:
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class MessagesPrompt(Strict):
    """What makes the prompt: all of POST /v1/messages/count_tokens."""

    ignored = frozenset({CACHE, "user_profile_id", "workspace_id", "inference_geo"})
    inert = {"speed": ("standard",), "container": (), "context_management": (), "mcp_servers": ([],)}

    model: str
    messages: Messages
    system: System | None = None
    tools: Annotated[list[AnthropicTool], FailFast(), Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig = Field(default_factory=OutputConfig)
    chat_template_kwargs: TemplateKwargs = Field(default_factory=dict)

    @classmethod
    def _is_harmless(cls, name: str, value: Any) -> bool:
        if name == "thread" and value is not None:
            text = "is not supported: this server stores nothing, so send the whole conversation as messages"
            raise field_error(NO_THREADS, text, name)
        return super()._is_harmless(name, value)

    @model_validator(mode="after")
    def _a_choice_needs_tools(self) -> "MessagesPrompt":
        if not self.tools and self.tool_choice is not None and self.tool_choice.type in ("any", "tool"):
            raise field_error("invalid_value", "may be given only with tools", "tool_choice")
        return self

    @property
    def continues(self) -> bool:
        """A last message of the assistant is the beginning of the answer, unless it calls tools: that one is whole."""
        last = self.messages[-1]
        return bool(last["role"] == "assistant" and not last.get("tool_calls"))

    def chat_fields(self) -> dict[str, Any]:
        """The body of a chat request with the same prompt."""
        system = [] if not self.system else [{"role": "system", "content": self.system}]
        thinks = self.thinking is None or self.thinking.type != "disabled"
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": [*system, *self.messages],
            "continue_final_message": self.continues,
            "reasoning_effort": self.output_config.effort if thinks else "none",
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        if self.output_config.format is not None:
            fields["response_format"] = self.output_config.format
        if self.tools:
            fields["tools"] = [tool.for_chat for tool in self.tools]
        if self.tools and self.tool_choice is not None:
            fields["tool_choice"] = self.tool_choice.for_chat
            fields["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        return fields

    def to_chat(self) -> ChatCompletionRequest:
        """InvalidRequestError in the words of this API."""
        try:
            return parse_request(ChatCompletionRequest, self.chat_fields())
        except InvalidRequestError as error:
            raise in_our_terms(error) from None


class MessagesRequest(MessagesPrompt, SamplingExtras):
    """POST /v1/messages."""

    ignored = MessagesPrompt.ignored | {"metadata"}
    inert = MessagesPrompt.inert | {"service_tier": ("auto", "standard_only")}
    foreign = {"response_format": "output_config.format"}

    max_tokens: int = Field(ge=1)
    stop_sequences: Annotated[list[str], FailFast(), Field(max_length=MAX_STOP_STRINGS)] = Field(default_factory=list)
    temperature: float = Field(1.0, ge=0.0, le=1.0)
    top_p: float = within(1.0, 0.0, 1.0)
    top_k: int = within(0, -1, 2**31 - 1)
    stream: bool = False

    def chat_fields(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k")}
        own |= {"max_completion_tokens": self.max_tokens, "stop": self.stop_sequences}
        return super().chat_fields() | self.extras() | own
