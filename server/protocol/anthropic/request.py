"""The request of Anthropic's POST /v1/messages, and its translation into a chat request."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, model_validator

from engine.errors import ContextLengthError, InvalidRequestError, PromptSize
from engine.sampling_params import MAX_STOP_STRINGS
from server.errors import NO_THREADS
from server.protocol.anthropic.blocks import FIELDS, FOREIGN_BLOCKS, TEXTS, read_blocks
from server.protocol.anthropic.context_management import ContextManagement, Edit
from server.protocol.anthropic.signatures import omitted_thinking
from server.protocol.anthropic.tools import (
    NOT_HERE,
    SEARCH,
    AnthropicHostedTool,
    AnthropicTool,
    AnthropicToolChoice,
    ToolsField,
)
from server.protocol.chat_completions import ChatCompletionRequest, TemplateKwargs
from server.protocol.field_checks import field_error, unknown_field
from server.protocol.generation_request import ranged_field
from server.protocol.grammars.response_format import parse_response_format
from server.protocol.harmless import ANTHROPIC_IGNORED, ANTHROPIC_INERT, OUTPUT_CONFIG_IGNORED, THINKING_IGNORED
from server.protocol.strict import Strict, parse_request
from server.protocol.translated import SamplingExtras, add_text, join_texts, renamed, without

MAX_NAME = 256  # characters of the name or id of a call
MAX_MESSAGES = 100_000  # Anthropic's limit
# Field of the chat request -> field of this API, for errors.
NAMES = (
    (r"messages.*", "messages"),
    (r"(tools\[\d+\])\.function\.parameters", r"\1.input_schema"),
    (r"(tools\[\d+\])\.function", r"\1"),
    (r"tool_choice.*", "tool_choice"),
    (r"response_format\.json_schema\.schema(?=[.\[])", "output_config.format.schema"),
    (r"response_format(\.json_schema\.schema|\.json_schema)?", "output_config.format"),
    (r"max_completion_tokens", "max_tokens"),
    (r"stop$", "stop_sequences"),
)
LOADED = "The tool {} can be called now."  # text of a tool_reference in the prompt
SEPARATORS = {"content": "\n", "reasoning_content": ""}  # between the parts of a turn's texts
ChatMessage = dict[str, Any]
Path = tuple[str | int, ...]


@dataclass(frozen=True)
class ToolChange:
    """A message that adds a deferred tool to the prompt or removes a tool. `path`: its place below `messages`."""

    name: str
    added: bool
    path: Path


@dataclass(frozen=True)
class History:
    """The messages in the form of a chat request, and the changes that they make to the tools. `left_out`: types of the
    blocks that the prompt omits."""

    messages: list[ChatMessage]
    tool_changes: tuple[ToolChange, ...] = ()
    left_out: tuple[str, ...] = ()


def in_our_terms(error: InvalidRequestError, tools: Sequence[int] | None = None) -> InvalidRequestError:
    """The same error about the field that the client sent. `tools`: index in the request of each tool of the chat.

    Anthropic's clients parse the message of a prompt that is too long, by exactly these words, to shorten the prompt.
    """
    if isinstance(error, ContextLengthError) and error.size is not None:
        return ContextLengthError(_too_long(error.size), error.param, error.size)
    error = renamed(error, NAMES)
    place = re.match(r"tools\[(\d+)\]", error.param or "")
    if place is None or tools is None:
        return error
    return renamed(error, ((re.escape(place[0]), f"tools[{tools[int(place[1])]}]"),))


def _too_long(size: PromptSize) -> str:
    if size.num_tokens <= size.longest and size.max_tokens is not None:
        return (
            f"input length and `max_tokens` exceed context limit: {size.num_tokens} + {size.max_tokens} > "
            f"{size.context}, decrease input length or `max_tokens` and try again"
        )
    return f"prompt is too long: {max(size.num_tokens, size.longest + 1)} tokens > {size.longest} maximum"


def _system(value: Any) -> Any:
    return "\n".join(block["text"] for block in read_blocks(value, ("text",)))


def _messages(value: Any) -> History:
    """The messages in the form of a chat. Consecutive turns of one role become one turn, as in Anthropic's API."""
    if not isinstance(value, list):
        raise field_error("invalid_type", "must be a list")
    if not 1 <= len(value) <= MAX_MESSAGES:
        raise field_error("invalid_value", f"must hold 1 to {MAX_MESSAGES} messages")
    messages: list[ChatMessage] = []
    changes: list[ToolChange] = []
    left_out: dict[str, None] = {}
    of_user = [i for i, turn in enumerate(value) if isinstance(turn, dict) and turn.get("role") == "user"]
    last_user = of_user[-1] if of_user else 0
    for i, message in enumerate(value):
        if not isinstance(message, dict):
            raise field_error("invalid_type", "must be an object", i)
        role = message.get("role")
        for name in message:
            if name not in ("role", "content") and not (name == "clear_at" and role == "system"):
                unknown_field("is not a field of a message", i, name)
        if role == "assistant":
            blocks = read_blocks(message.get("content"), ("text", "thinking", "tool_use"), i, "content")
            _check_calls(blocks, i)
            left_out |= {block["type"]: None for block in blocks if block["type"] in FOREIGN_BLOCKS}
            _add_assistant(messages, [block for block in blocks if block["type"] not in FOREIGN_BLOCKS])
        elif role == "user":
            blocks = read_blocks(message.get("content"), (*TEXTS, "tool_result"), i, "content")
            _add_user(messages, blocks, i, changes)
        elif role == "system":
            blocks = read_blocks(message.get("content"), ("text", "tool_addition", "tool_removal"), i, "content")
            _add_system(messages, blocks, i, changes, _is_cleared(message, i, last_user))
        else:
            raise field_error("invalid_value", "must be 'user', 'assistant' or 'system'", i, "role")
    join_texts(messages, SEPARATORS)
    return History(messages, tuple(changes), tuple(left_out))


def _check_calls(blocks: list[dict[str, Any]], i: int) -> None:
    calls = [(j, block) for j, block in enumerate(blocks) if block["type"] == "tool_use"]
    for j, block in calls:
        for name in ("id", "name"):
            if not 1 <= len(block[name]) <= MAX_NAME:
                raise field_error("invalid_value", f"must have 1 to {MAX_NAME} characters", i, "content", j, name)


# The functions that add turns leave the texts of users and assistants in parts, which join_texts joins.


def _add_assistant(messages: list[ChatMessage], blocks: list[dict[str, Any]]) -> None:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": []})
    message = messages[-1]
    for block in blocks:
        if block["type"] == "text":
            add_text(message, "content", block["text"])
        elif block["type"] == "thinking":
            add_text(message, "reasoning_content", block["thinking"] or omitted_thinking(block.get("signature")))
        else:
            function = {"name": block["name"], "arguments": _arguments(block["input"])}
            message.setdefault("tool_calls", []).append({"id": block["id"], "type": "function", "function": function})


def _arguments(value: dict[str, Any]) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise field_error("invalid_value", "has a tool_use whose input is nested too deeply") from None


def _is_cleared(message: dict[str, Any], i: int, last_user: int) -> bool:
    """True for a system message that was valid only until the next user message, if that has come."""
    clear_at = message.get("clear_at") or "never"
    if clear_at not in ("never", "next_user_message"):
        raise field_error("invalid_value", "must be 'next_user_message' or 'never'", i, "clear_at")
    return bool(clear_at == "next_user_message" and i < last_user)


def _add_system(
    messages: list[ChatMessage], blocks: list[dict[str, Any]], i: int, changes: list[ToolChange], is_cleared: bool
) -> None:
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    for j, block in enumerate(blocks):
        if block["type"] == "text":
            continue
        tool, path = block["tool"], (i, "content", j, "tool")
        if tool.get("type") != "tool_reference":
            text = "must be 'tool_reference': here a tool is declared in `tools`, with defer_loading"
            raise field_error("unsupported_value", text, *path, "type")
        if not isinstance(tool.get("name"), str):
            raise field_error("invalid_type", "must be a string", *path, "name")
        changes.append(ToolChange(tool["name"], block["type"] == "tool_addition", (*path, "name")))
    if (texts or not blocks) and not is_cleared:
        messages.append({"role": "system", "content": "\n".join(texts)})


def _add_user(messages: list[ChatMessage], blocks: list[dict[str, Any]], i: int, changes: list[ToolChange]) -> None:
    texts = []
    for j, block in enumerate(blocks):
        if block["type"] == "text":
            texts.append(block["text"])
        else:
            text = _result(block, i, j, changes)
            messages.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": text})
    if not texts and blocks:
        return
    text = "\n".join(texts)
    if messages and messages[-1]["role"] == "user":
        messages[-1]["content"].append(text)
    else:
        messages.append({"role": "user", "content": [text]})


def _result(block: dict[str, Any], i: int, j: int, changes: list[ToolChange]) -> str:
    """The text of a tool's result. Chat templates have no place for failure, so the text says so."""
    path = (i, "content", j, "content")
    content = read_blocks(block.get("content", ""), (*TEXTS, "tool_reference"), *path)
    for k, part in enumerate(content):
        if part["type"] == "tool_reference":
            changes.append(ToolChange(part["tool_name"], True, (*path, k, "tool_name")))
    text = "\n".join(part["text"] if "text" in part else LOADED.format(part["tool_name"]) for part in content)
    failed = block.get("is_error", False)
    if not isinstance(failed, bool):
        raise field_error("invalid_type", "must be true or false", i, "content", j, "is_error")
    return f"Error: {text}" if failed else text


def _format(value: Any) -> Any:
    """`value` in the form of response_format. Anthropic's schemas have no name and are always strict."""
    if not isinstance(value, dict):
        raise field_error("invalid_type", "must be an object")
    schema, kind = value.get("schema"), value.get("type")
    if kind != "json_schema":
        raise field_error("invalid_value", "must be 'json_schema'", "type")
    for name in [name for name in value if name not in ("type", "schema")]:
        unknown_field("is not a known field", name)
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    without("json_schema", parse_response_format, form)
    return form


# Forms of these fields for /openapi.json.


class JsonFormat(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class TextBlock(BaseModel):
    type: Literal["text"]
    text: str


BLOCKS = [kind for kind in FIELDS if kind != "tool_reference"]  # that one is part of a tool_result


class ContentBlock(BaseModel):
    """A block with the fields that Anthropic documents for its type."""

    type: Literal[tuple([*BLOCKS, *sorted(FOREIGN_BLOCKS)])]  # type: ignore[valid-type]


class TurnMessage(BaseModel):
    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]
    clear_at: Literal["next_user_message", "never"] | None = None  # in system messages only


System = Annotated[str, BeforeValidator(_system, json_schema_input_type=str | list[TextBlock])]
Format = Annotated[Any, BeforeValidator(_format, json_schema_input_type=JsonFormat)]
Turns = Annotated[list[TurnMessage], Field(min_length=1)]
Messages = Annotated[Any, BeforeValidator(_messages, json_schema_input_type=Turns)]


class OutputConfig(Strict):
    ignored = OUTPUT_CONFIG_IGNORED

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: Format = None  # after validation in the form of a chat's response_format


class Thinking(Strict):
    """Thinking options. `disabled`: the chat template is told not to think, if it supports that.

    Otherwise the model thinks as it was trained to. budget_tokens is a limit for models whose thinking is marked in the
    text; for other models it has no effect.
    """

    ignored = THINKING_IGNORED

    type: Literal["enabled", "disabled", "adaptive"]
    display: Literal["summarized", "updates", "omitted"] = "summarized"  # the first two: in full
    budget_tokens: int | None = Field(None, ge=1024, lt=2**31)


class MessagesPrompt(Strict):
    """The fields that determine the prompt; the whole body of POST /v1/messages/count_tokens."""

    is_request = True

    foreign = {"output_format": "output_config.format"}
    ignored = {name: reason for name, reason in ANTHROPIC_IGNORED.items() if name != "metadata"}
    inert = {name: values for name, values in ANTHROPIC_INERT.items() if name != "service_tier"}

    model: str
    messages: Messages
    system: System | None = None
    tools: ToolsField = Field(default_factory=list)
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig = Field(default_factory=OutputConfig)
    context_management: ContextManagement | None = None
    chat_template_kwargs: TemplateKwargs = Field(default_factory=dict)

    @classmethod
    def _is_harmless(cls, name: str, value: Any) -> bool:
        if name == "thread" and value is not None:
            text = "is not supported: this server stores nothing, so send the whole conversation as messages"
            raise field_error(NO_THREADS, text, name)
        return super()._is_harmless(name, value)

    @model_validator(mode="after")
    def _a_choice_needs_tools(self) -> "MessagesPrompt":
        choice, names = self.tool_choice, [tool.name for tool in self.own_tools]
        if choice is None or choice.type not in ("any", "tool") or choice.name in names:
            return self
        if not self.tools:
            raise field_error("invalid_value", "may be given only with tools", "tool_choice")
        hosted = [tool for tool in self.tools if isinstance(tool, AnthropicHostedTool)]
        if found := [tool for tool in hosted if tool.name == choice.name or (choice.name is None and not names)]:
            text = f"cannot be {choice.name or choice.type!r}: {found[0].kind} {NOT_HERE}"
            raise field_error("unsupported_value", text, "tool_choice")
        if choice.name is not None:
            raise field_error("invalid_value", "names a tool that is not among the tools", "tool_choice")
        return self

    @model_validator(mode="after")
    def _changes_are_of_tools(self) -> "MessagesPrompt":
        names = {tool.name for tool in self.own_tools}
        for change in self.history.tool_changes:
            if change.name not in names:
                raise field_error("invalid_value", "is not the name of one of the tools", "messages", *change.path)
        return self

    @property
    def history(self) -> History:
        history: History = self.messages
        return history

    @property
    def own_tools(self) -> list[AnthropicTool]:
        """The tools that the client runs."""
        return [tool for tool in self.tools if isinstance(tool, AnthropicTool)]

    @property
    def left_out(self) -> list[str]:
        """Types of the tools and blocks that the prompt omits."""
        hosted = dict.fromkeys(tool.kind for tool in self.tools if isinstance(tool, AnthropicHostedTool))
        return [*hosted, *self.history.left_out]

    @property
    def shows_thinking(self) -> bool:
        return self.thinking is None or self.thinking.display != "omitted"

    @property
    def edits(self) -> list[Edit]:
        return [] if self.context_management is None else self.context_management.edits

    @property
    def continues(self) -> bool:
        """True if the answer continues the last message: an assistant's message without calls, which end a message."""
        last = self.history.messages[-1]
        return bool(last["role"] == "assistant" and not last.get("tool_calls"))

    @property
    def offered_tools(self) -> list[int]:
        """Indices of the tools that the prompt describes: not deferred, loaded by the messages, or named by
        tool_choice. The last change of a tool counts. Tools that Anthropic's servers would search are not deferred."""
        searched = any(isinstance(tool, AnthropicHostedTool) and tool.kind.startswith(SEARCH) for tool in self.tools)
        changed = {change.name: change.added for change in self.history.tool_changes}
        if self.tool_choice is not None and self.tool_choice.name is not None:
            changed[self.tool_choice.name] = True
        own = [(i, tool) for i, tool in enumerate(self.tools) if isinstance(tool, AnthropicTool)]
        return [i for i, tool in own if changed.get(tool.name, searched or not tool.defer_loading)]

    def chat_fields(self) -> dict[str, Any]:
        """The body of a chat request with the same prompt."""
        system = [] if not self.system else [{"role": "system", "content": self.system}]
        thinks = self.thinking is None or self.thinking.type != "disabled"
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": [*system, *self.history.messages],
            "continue_final_message": self.continues,
            "reasoning_effort": self.output_config.effort if thinks else "none",
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        if self.output_config.format is not None:
            fields["response_format"] = self.output_config.format
        if offered := self.offered_tools:
            fields["tools"] = [tool.for_chat for i in offered if isinstance(tool := self.tools[i], AnthropicTool)]
        if offered and self.tool_choice is not None:
            fields["tool_choice"] = self.tool_choice.for_chat
            fields["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        return fields

    def to_chat(self, messages: list[ChatMessage] | None = None) -> ChatCompletionRequest:
        """The chat request with the same prompt, with `messages` in place of its own if given.

        InvalidRequestError names the client's field.
        """
        asked = self
        if messages is not None:
            asked = self.model_copy(update={"messages": replace(self.history, messages=messages)})
        try:
            return parse_request(ChatCompletionRequest, asked.chat_fields())
        except InvalidRequestError as error:
            raise in_our_terms(error, self.offered_tools) from None


class MessagesRequest(MessagesPrompt, SamplingExtras):
    """POST /v1/messages."""

    ignored = ANTHROPIC_IGNORED
    inert = ANTHROPIC_INERT
    foreign = MessagesPrompt.foreign | {"response_format": "output_config.format"}

    max_tokens: int = Field(ge=1)
    stop_sequences: Annotated[
        list[Annotated[str, Field(min_length=1)]], FailFast(), Field(max_length=MAX_STOP_STRINGS)
    ] = Field(default_factory=list)
    temperature: float = Field(1.0, ge=0.0, le=1.0)
    top_p: float = ranged_field(1.0, 0.0, 1.0)
    top_k: int = ranged_field(0, -1, 2**31 - 1)
    stream: bool = False

    def chat_fields(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k")}
        own |= {"max_completion_tokens": self.max_tokens, "stop": self.stop_sequences}
        return super().chat_fields() | self.extras() | own
