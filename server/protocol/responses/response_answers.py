"""Models of the answers of /v1/responses and of the events of its streams, for /openapi.json and for tests."""

from typing import Annotated, Any, Literal

from pydantic import Field, RootModel

from engine.telemetry.request_log import RequestReport
from server.protocol.answers import Answer, ChosenTokenLogprob

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(Answer):
    type: Literal["output_text"]
    text: str
    annotations: list[Any] = Field(max_length=0)
    logprobs: list[ChosenTokenLogprob]


class ReasoningText(Answer):
    type: Literal["reasoning_text"]
    text: str


class MessageItem(Answer):
    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningItem(Answer):
    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[Any] = Field(max_length=0)
    content: list[ReasoningText]
    encrypted_content: str = ""  # with include: ["reasoning.encrypted_content"], see docs/api.md


class FunctionCallItem(Answer):
    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    namespace: str = ""  # if the tool belongs to a namespace
    arguments: str


class CustomToolCallItem(Answer):
    id: str
    type: Literal["custom_tool_call"]
    status: ItemStatus
    call_id: str
    name: str
    namespace: str = ""
    input: str


class LocalShellAction(Answer):
    type: Literal["exec"]
    command: list[str]
    env: dict[str, str]
    timeout_ms: int = 0
    working_directory: str = ""


class LocalShellCallItem(Answer):
    id: str
    type: Literal["local_shell_call"]
    status: Literal["completed"]
    call_id: str
    action: LocalShellAction


class ShellAction(Answer):
    commands: list[str]
    timeout_ms: int | None
    max_output_length: int | None


class ShellCallItem(Answer):
    id: str
    type: Literal["shell_call"]
    status: Literal["completed"]
    call_id: str
    action: ShellAction


class PatchOperation(Answer):
    type: Literal["create_file", "update_file", "delete_file"]
    path: str
    diff: str = ""  # absent for delete_file


class ApplyPatchCallItem(Answer):
    id: str
    type: Literal["apply_patch_call"]
    status: Literal["completed"]
    call_id: str
    operation: PatchOperation


OutputItem = Annotated[
    MessageItem
    | ReasoningItem
    | FunctionCallItem
    | CustomToolCallItem
    | LocalShellCallItem
    | ShellCallItem
    | ApplyPatchCallItem,
    Field(discriminator="type"),
]


class InputTokensDetails(Answer):
    cached_tokens: int
    cache_write_tokens: int  # always 0: this server charges nothing for filling its cache


class OutputTokensDetails(Answer):
    reasoning_tokens: int


class ResponseUsage(Answer):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(Answer):
    code: Literal["server_error", "rate_limit_exceeded"]
    message: str


class IncompleteDetails(Answer):
    reason: Literal["max_output_tokens"]


class TextSettings(Answer):
    format: dict[str, Any]
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningSettings(Answer):
    effort: str | None
    summary: None
    max_tokens: int = 0  # if the request has a limit


class ResponseObject(Answer):
    """A response: the settings of the request, its state and its output."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    output: list[OutputItem]
    usage: ResponseUsage | None
    model: str
    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    top_logprobs: int
    text: TextSettings
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    max_tool_calls: int | None
    reasoning: ReasoningSettings
    truncation: Literal["auto", "disabled"]
    metadata: dict[str, str]
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    service_tier: Literal["default"]
    store: Literal[False]
    background: Literal[False]
    previous_response_id: None
    timings: list[RequestReport] = []  # with return_timings; in a stream in the last event


class InputTokens(Answer):
    object: Literal["response.input_tokens"]
    input_tokens: int


class _Event(Answer):
    sequence_number: int


class ResponseState(_Event):
    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: ResponseObject


class ItemEvent(_Event):
    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class _InItem(_Event):
    item_id: str
    output_index: int


class _InPart(_InItem):
    content_index: int


class PartEvent(_InPart):
    type: Literal["response.content_part.added", "response.content_part.done"]
    part: Annotated[OutputText | ReasoningText, Field(discriminator="type")]


class TextDelta(_InPart):
    type: Literal["response.output_text.delta"]
    delta: str
    obfuscation: str = ""  # with include_obfuscation
    logprobs: list[ChosenTokenLogprob]


class TextDone(_InPart):
    type: Literal["response.output_text.done"]
    text: str
    logprobs: list[ChosenTokenLogprob]


class ReasoningDelta(_InPart):
    type: Literal["response.reasoning_text.delta"]
    delta: str
    obfuscation: str = ""  # with include_obfuscation


class ReasoningDone(_InPart):
    type: Literal["response.reasoning_text.done"]
    text: str


class ArgumentsDelta(_InItem):
    type: Literal["response.function_call_arguments.delta"]
    delta: str
    obfuscation: str = ""  # with include_obfuscation


class ArgumentsDone(_InItem):
    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


class InputDelta(_InItem):
    type: Literal["response.custom_tool_call_input.delta"]
    delta: str
    obfuscation: str = ""  # with include_obfuscation


class InputDone(_InItem):
    type: Literal["response.custom_tool_call_input.done"]
    input: str


class ErrorEvent(_Event):
    """The event before response.failed."""

    type: Literal["error"]
    code: str | None
    message: str
    param: str | None


class ResponseEvent(
    RootModel[
        Annotated[
            ResponseState
            | ItemEvent
            | PartEvent
            | TextDelta
            | TextDone
            | ReasoningDelta
            | ReasoningDone
            | ArgumentsDelta
            | ArgumentsDone
            | InputDelta
            | InputDone
            | ErrorEvent,
            Field(discriminator="type"),
        ]
    ]
):
    """One event of a stream. The last event is response.completed, .incomplete or .failed."""
