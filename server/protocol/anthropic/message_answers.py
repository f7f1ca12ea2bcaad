"""Models of the answers of /v1/messages and of the events of its streams, for /openapi.json and for tests."""

from typing import Annotated, Any, Literal

from pydantic import Field, RootModel

from engine.telemetry.request_log import RequestReport
from server.protocol.answers import Answer, Model, ModelList

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class NoThreads(Answer):
    """Details of the refusal of a request with `thread`: this server stores no conversation."""

    error_code: Literal["thread_unsupported_request"]
    unsupported: list[str]


class AnthropicError(Answer):
    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "not_found_error",
        "request_too_large",
        "rate_limit_error",
        "api_error",
        "overloaded_error",
    ]
    message: str
    details: NoThreads | None = None  # if the request has `thread`; never null


class AnthropicErrorEnvelope(Answer):
    """The body of every 4xx and 5xx of these routes, and the last event of a stream that fails."""

    type: Literal["error"]
    error: AnthropicError


class AnswerText(Answer):
    type: Literal["text"]
    text: str


class AnswerThinking(Answer):
    type: Literal["thinking"]
    thinking: str
    signature: str  # holds the thinking if the request omits it from the answer


class AnswerToolUse(Answer):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = Annotated[AnswerText | AnswerThinking | AnswerToolUse, Field(discriminator="type")]


class ThinkingTokens(Answer):
    thinking_tokens: int


class MessageUsage(Answer):
    input_tokens: int  # without the tokens that the prefix cache had
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens


class ClearedThinking(Answer):
    type: Literal["clear_thinking_20251015"]
    cleared_thinking_turns: int
    cleared_input_tokens: int


class ClearedToolUses(Answer):
    type: Literal["clear_tool_uses_20250919"]
    cleared_tool_uses: int
    cleared_input_tokens: int


class AppliedEdits(Answer):
    """The edits in the order in which they were applied, without those that changed nothing."""

    applied_edits: list[Annotated[ClearedThinking | ClearedToolUses, Field(discriminator="type")]]


class AnthropicMessage(Answer):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    context_management: AppliedEdits = AppliedEdits(applied_edits=[])  # if the request has context_management
    timings: list[RequestReport] = []  # with return_timings; in a stream in message_delta


class OriginalLength(Answer):
    original_input_tokens: int  # before the edits


class TokenCount(Answer):
    input_tokens: int
    context_management: OriginalLength = OriginalLength(original_input_tokens=0)  # if the request has it


class MessageStart(Answer):
    type: Literal["message_start"]
    message: AnthropicMessage


class Ping(Answer):
    type: Literal["ping"]


class BlockStart(Answer):
    type: Literal["content_block_start"]
    index: int
    content_block: AnswerBlock


class TextPiece(Answer):
    type: Literal["text_delta"]
    text: str


class ThinkingPiece(Answer):
    type: Literal["thinking_delta"]
    thinking: str


class JsonPiece(Answer):
    type: Literal["input_json_delta"]
    partial_json: str


class SignaturePiece(Answer):
    type: Literal["signature_delta"]
    signature: str


class BlockDelta(Answer):
    type: Literal["content_block_delta"]
    index: int
    delta: Annotated[TextPiece | ThinkingPiece | SignaturePiece | JsonPiece, Field(discriminator="type")]


class BlockStop(Answer):
    type: Literal["content_block_stop"]
    index: int


class MessageEnd(Answer):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Answer):
    type: Literal["message_delta"]
    delta: MessageEnd
    usage: MessageUsage
    context_management: AppliedEdits = AppliedEdits(applied_edits=[])
    timings: list[RequestReport] = []


class MessageStop(Answer):
    type: Literal["message_stop"]


class MessageEvent(
    RootModel[
        Annotated[
            MessageStart
            | Ping
            | BlockStart
            | BlockDelta
            | BlockStop
            | MessageDelta
            | MessageStop
            | AnthropicErrorEnvelope,
            Field(discriminator="type"),
        ]
    ]
):
    """One event of a stream. The last event is message_stop or error."""


class AnthropicModel(Answer):
    type: Literal["model"]
    id: str
    display_name: str
    created_at: str  # RFC 3339
    lifecycle: Literal["active"]
    max_input_tokens: int
    max_tokens: int


class AnthropicModelList(Answer):
    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


class EitherModel(RootModel[Model | AnthropicModel]):
    """Anthropic's form if the request has the header anthropic-version."""


class EitherModelList(RootModel[ModelList | AnthropicModelList]):
    """Anthropic's form, with limit, after_id and before_id, if the request has the header anthropic-version."""
