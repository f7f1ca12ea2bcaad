"""What the endpoints answer, for /openapi.json and for tests; answers are written without these models, as bytes.

A field without a default is always there. Nothing else is: tests hold live answers, streamed ones too, against this.
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
    """Every 4xx and 5xx, and the last event of a stream that breaks."""

    error: ErrorObject


class PromptTokensDetails(Answer):
    cached_tokens: int
    truncated_tokens: int = 0  # with truncate_prompt_tokens


class CompletionTokensDetails(Answer):
    reasoning_tokens: int


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ChatUsage(Usage):
    completion_tokens_details: CompletionTokensDetails | None = None  # unless reasoning is not split; never null


class _Head(Answer):
    id: str
    created: int
    model: str
    system_fingerprint: str
    service_tier: Literal["default"] = "default"  # of chats that name one
    timings: list[RequestReport] = []  # with return_timings, in a stream on the last chunk


class PromptTokenLogprob(Answer):
    logprob: float
    rank: int | None
    decoded_token: str


# With prompt_logprobs, for each token of the prompt: token id -> what it is; null for the first.
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
    token_ids: list[int] = []  # with return_token_ids, in a stream those that are new
    prompt_token_ids: list[int] = []  # the same, in a stream on the first chunk of a choice


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
    obfuscation: str = ""  # with include_obfuscation, but on chunks without choices
    usage: Usage | None = None  # with include_usage: null but on the last chunk, which has no choices


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
    arguments: str = Field(description="a JSON object, unless finish_reason is length")


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
    content: str | None  # null where there are calls or thoughts alone
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
    id: str = ""  # with the first delta of a call, and so is `type`
    type: Literal["function", "custom"] = "function"
    function: CalledFunctionDelta | None = None  # of a function, and never null
    custom: CustomCalledDelta | None = None  # of a custom tool, and never null


class ChatDelta(Answer):
    role: Literal["assistant"] = "assistant"
    content: str | None = ""  # null with the role, where the message does not begin with text
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
    """Of fields that a request leaves out."""

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


class ModelList(Answer):
    object: Literal["list"]
    data: list[Model]


class Health(Answer):
    status: Literal["ok"]


class Unhealthy(Answer):
    status: Literal["unhealthy"]
    error: ErrorObject


class Ready(Answer):
    status: Literal["ready"]
    phase: Literal["ready"]


class NotReady(Answer):
    status: Literal["not ready"]
    phase: str
    error: ErrorObject


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
    """Every KV block; its fields are those of KVView in engine/telemetry/kv_view.py."""

    model_config = ConfigDict(extra="allow")
    states: str = Field(description="a letter per block, which `legend` explains")
    legend: dict[str, Any]


class LastSteps(BaseModel):
    """What the last steps did; its fields are those of StepsView in engine/telemetry/step_log.py."""

    model_config = ConfigDict(extra="allow")
    columns: list[str] = Field(description="names of the fields of a step")
    steps: list[list[Any]] = Field(description="the oldest first")
