"""Models of the answers, for /openapi.json and for tests. The server writes answers as bytes, without these models.

A field without a default is in every answer; a field that no model declares is in none. Tests check live answers,
whole and streamed, against these models.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from engine.telemetry.request_log import RequestReport

FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorObject(Answer):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(Answer):
    """The body of every 4xx and 5xx, and the last event of a stream that fails."""

    error: ErrorObject


class PromptTokensDetails(Answer):
    cached_tokens: int
    truncated_tokens: int = 0  # with truncate_prompt_tokens


class CompletionTokensDetails(Answer):
    reasoning_tokens: int = 0  # absent if reasoning is not split
    accepted_prediction_tokens: int = 0  # this and the next with a prediction
    rejected_prediction_tokens: int = 0


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ChatUsage(Usage):
    # Absent if reasoning is not split and nothing was predicted; never null.
    completion_tokens_details: CompletionTokensDetails | None = None


class _Head(Answer):
    id: str
    created: int
    model: str
    system_fingerprint: str
    service_tier: Literal["default"] = "default"  # in answers to chat requests with service_tier
    timings: list[RequestReport] = []  # with return_timings; in a stream on the last chunk


class PromptTokenLogprob(Answer):
    logprob: float
    rank: int | None
    decoded_token: str


# With prompt_logprobs: one entry per prompt token, token id -> logprob; null for the first token.
PromptLogprobs = list[dict[str, PromptTokenLogprob] | None]


class CompletionLogprobs(Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class _CompletionChoice(Answer):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    token_ids: list[int] = []  # with return_token_ids; in a stream the new ones
    prompt_token_ids: list[int] = []  # with return_token_ids; in a stream on the first chunk of a choice


class CompletionChoice(_CompletionChoice):
    finish_reason: FinishReason
    stop_reason: str | int | None
    prompt_logprobs: PromptLogprobs = []


class CompletionChunkChoice(_CompletionChoice):
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None


class Completion(_Head):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(_Head):
    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    obfuscation: str = ""  # with include_obfuscation, on chunks that have choices
    usage: Usage | None = None  # with include_usage: null on all chunks but the last, which has no choices


class Embedding(Answer):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str  # with encoding_format base64: little-endian fp32


class EmbeddingUsage(Answer):
    prompt_tokens: int
    total_tokens: int


class Embeddings(Answer):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class TokenLogprob(Answer):
    token: str
    logprob: float
    bytes: list[int]


class ChosenTokenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Answer):
    content: list[ChosenTokenLogprob]
    refusal: None


class CalledFunction(Answer):
    name: str
    arguments: str = Field(description="a JSON object; may be cut off if finish_reason is length")


class ToolCall(Answer):
    id: str
    type: Literal["function"]
    function: CalledFunction


class CustomCalled(Answer):
    name: str
    input: str


class CustomToolCall(Answer):
    id: str
    type: Literal["custom"]
    custom: CustomCalled


class AssistantMessage(Answer):
    role: Literal["assistant"]
    content: str | None  # null if the message has only calls or reasoning
    refusal: None
    reasoning_content: str = ""
    tool_calls: list[Annotated[ToolCall | CustomToolCall, Field(discriminator="type")]] = []


class ChatChoice(Answer):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: str | int | None
    token_ids: list[int] = []


class ChatCompletion(_Head):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: ChatUsage
    prompt_token_ids: list[int] = []  # with return_token_ids
    prompt_logprobs: PromptLogprobs = []


class CalledFunctionDelta(Answer):
    name: str = ""  # with the first delta of a call
    arguments: str


class CustomCalledDelta(Answer):
    name: str = ""  # with the first delta of a call
    input: str


class ToolCallDelta(Answer):
    index: int
    id: str = ""  # with the first delta of a call, as is `type`
    type: Literal["function", "custom"] = "function"
    function: CalledFunctionDelta | None = None  # in calls of functions; never null
    custom: CustomCalledDelta | None = None  # in calls of custom tools; never null


class ChatDelta(Answer):
    role: Literal["assistant"] = "assistant"
    content: str | None = ""  # null beside the role if the message does not start with text
    refusal: None = None
    reasoning_content: str = ""
    tool_calls: list[ToolCallDelta] = []


class ChatChunkChoice(Answer):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: str | int | None = None
    token_ids: list[int] = []


class ChatCompletionChunk(_Head):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    obfuscation: str = ""
    usage: ChatUsage | None = None
    prompt_token_ids: list[int] = []


class DefaultSamplingParams(Answer):
    """Values of the fields that a request leaves out."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float


class Model(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int
    default_sampling_params: DefaultSamplingParams
    state: str


class ModelState(Answer):
    """`level` 0: awake."""

    state: Literal["starting", "ready", "restarting", "sleeping", "waking", "draining", "stopped"]
    level: Literal[0, 1, 2]


class IsSleeping(Answer):
    is_sleeping: bool


class ModelList(Answer):
    object: Literal["list"]
    data: list[Model]


class Health(Answer):
    """`models`: the phase of each, where there are several."""

    status: Literal["ok"]
    models: dict[str, str] = {}


class Unhealthy(Answer):
    status: Literal["unhealthy"]
    error: ErrorObject
    models: dict[str, str] = {}


class Ready(Answer):
    status: Literal["ready"]
    phase: Literal["ready", "sleeping", "waking"]
    models: dict[str, str] = {}


class NotReady(Answer):
    status: Literal["not ready"]
    phase: str
    error: ErrorObject
    models: dict[str, str] = {}


class Version(Answer):
    version: str


class Tokens(Answer):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(Answer):
    prompt: str


class RequestTimings(Answer):
    id: str
    object: Literal["request.timings"]
    timings: list[RequestReport]


class KVBlocks(BaseModel):
    """The state of every KV block. The fields are those of KVView in engine/telemetry/kv_view.py."""

    model_config = ConfigDict(extra="allow")
    states: str = Field(description="one letter per block; `legend` explains the letters")
    legend: dict[str, Any]


class LastSteps(BaseModel):
    """The last steps of the engine. The fields are those of StepsView in engine/telemetry/step_log.py."""

    model_config = ConfigDict(extra="allow")
    columns: list[str] = Field(description="names of the fields of a step")
    steps: list[list[Any]] = Field(description="the oldest first")
