"""The request of POST /v1/chat/completions."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, FailFast, Field, model_validator

from engine.thinking import FIELD
from server.config import ServerConfig
from server.errors import MAX_NAME_LENGTH, invalid
from server.protocol.chat_message import Content, Message
from server.protocol.field_checks import field_error
from server.protocol.generation_request import GenerationRequest, ranged_field
from server.protocol.grammars.response_format import RENAMED
from server.protocol.harmless import CHAT_INERT, INERT, ServiceTier
from server.protocol.strict import Strict
from server.protocol.tools import CustomTool, Tool, ToolChoice, ToolChoiceField, ToolsField, check_choice

# Names that a chat template gets from the server; a client may not set them through chat_template_kwargs.
RESERVED_TEMPLATE_NAMES = frozenset(
    {"add_generation_prompt", "bos_token", "chat_template", "conversation", "documents", "eos_token", "messages"}
    | {"pad_token", "raise_exception", "return_dict", "self", "strftime_now", "tokenize", "tools", "unk_token"}
)
MAX_TEMPLATE_KWARGS = 16
MAX_TEMPLATE_STRING = 256
MAX_DOCUMENTS = 256


def _template_kwargs(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_TEMPLATE_KWARGS:
        raise field_error("invalid_value", f"may hold at most {MAX_TEMPLATE_KWARGS} entries")
    for name, setting in value.items():
        if not name.isidentifier() or len(name) > MAX_NAME_LENGTH or name in RESERVED_TEMPLATE_NAMES:
            raise field_error("unsupported_value", "is not a name that a client may set", name)
        if not isinstance(setting, (bool, int, float, str)):
            raise field_error("invalid_type", "must be a string, a number, true or false", name)
        if isinstance(setting, str) and len(setting) > MAX_TEMPLATE_STRING:
            raise field_error("invalid_value", f"must be at most {MAX_TEMPLATE_STRING} characters", name)
    return value


TemplateKwargsForm = Annotated[
    dict[str, bool | int | float | Annotated[str, Field(max_length=MAX_TEMPLATE_STRING)]],
    Field(
        max_length=MAX_TEMPLATE_KWARGS,
        json_schema_extra={
            "propertyNames": {
                "maxLength": MAX_NAME_LENGTH,
                "pattern": r"^[^\W\d]\w*$",
                "not": {"enum": sorted(RESERVED_TEMPLATE_NAMES)},
            }
        },
    ),
]
TemplateKwargs = Annotated[
    dict[str, Any],
    BeforeValidator(_template_kwargs, json_schema_input_type=TemplateKwargsForm),
]


Documents = Annotated[list[dict[str, str]], FailFast(), Field(max_length=MAX_DOCUMENTS)]


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ReasoningOptions(Strict):
    """OpenRouter's object. Each field has a second name at the top level; `enabled` is enable_thinking there."""

    inert = {"exclude": (False,), "summary": ("auto",)}

    effort: Effort | None = None
    max_tokens: int | None = Field(default=None, ge=0, lt=2**31)
    enabled: bool | None = None


class Prediction(Strict):
    """OpenAI's predicted output: text that much of the answer will repeat. It changes the speed, never the answer."""

    type: Literal["content"]
    content: Content


class ChatCompletionRequest(GenerationRequest):
    """POST /v1/chat/completions. Without max_completion_tokens and max_tokens, the context length limits the answer."""

    inert = INERT | CHAT_INERT
    renamed = RENAMED | {"functions": "tools", "function_call": "tool_choice"}

    messages: Annotated[list[Message], FailFast(), Field(min_length=1)]
    max_completion_tokens: int | None = ranged_field(None, 0)
    logprobs: bool = False
    top_logprobs: int | None = ranged_field(None, 0)
    add_generation_prompt: bool | None = None  # default: true, unless continue_final_message is set
    continue_final_message: bool = False
    reasoning_effort: Effort | None = None
    thinking_token_budget: int | None = Field(None, ge=0, lt=2**31)  # vLLM's: see engine/thinking.py
    enable_thinking: bool | None = None  # as in chat_template_kwargs
    reasoning: ReasoningOptions = Field(default_factory=ReasoningOptions)
    verbosity: Literal["low", "medium", "high"] | None = None
    prediction: Prediction | None = None
    service_tier: ServiceTier | None = None  # if given, the answer says "default", the only tier here
    documents: Documents = Field(default_factory=list)
    add_special_tokens: bool = False  # the chat template writes special tokens itself
    chat_template_kwargs: TemplateKwargs = Field(default_factory=dict)
    tools: ToolsField = Field(default_factory=list)
    tool_choice: ToolChoiceField = None  # default: auto if there are tools, else none
    parallel_tool_calls: bool = True

    @model_validator(mode="after")
    def _tools_fit(self) -> "ChatCompletionRequest":
        if self.tools or self.tool_choice is not None:
            check_choice(self.tools, self.tool_choice)
        return self

    @property
    def choice(self) -> ToolChoice:
        """tool_choice, or its default."""
        choice: ToolChoice | None = self.tool_choice
        return choice or ToolChoice("auto" if self.tools else "none")

    @property
    def offered_tools(self) -> list[Tool | CustomTool]:
        """The tools that the prompt describes: none with "none", only the named ones with allowed_tools."""
        if self.choice.mode == "none":
            return []
        subset = None if self.choice.one else self.choice.names
        return [tool for tool in self.tools if subset is None or tool.function.name in subset]

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> "ChatCompletionRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise field_error("invalid_value", "may be given only with logprobs: true", "top_logprobs")
        return self

    @model_validator(mode="after")
    def _reasoning_says_one_thing(self) -> "ChatCompletionRequest":
        for name, field in (("effort", "reasoning_effort"), ("max_tokens", FIELD), ("enabled", "enable_thinking")):
            ours, theirs = getattr(self, field), getattr(self.reasoning, name)
            if ours is not None and theirs is not None and ours != theirs:
                raise field_error("invalid_value", f"must equal {field}: leave one of them out", "reasoning", name)
        return self

    @property
    def thinking_budget(self) -> int | None:
        """Maximum number of thinking tokens; None: no limit."""
        budget = self.thinking_token_budget
        return self.reasoning.max_tokens if budget is None else budget

    @property
    def effort(self) -> str | None:
        """How much the model should think. A hint to the chat template, not a limit."""
        return self.reasoning_effort or self.reasoning.effort

    @property
    def thinks(self) -> bool | None:
        """Whether the model should think at all: a hint to the chat template. None if the request does not say."""
        if self.enable_thinking is not None or self.reasoning.enabled is not None:
            return self.reasoning.enabled if self.enable_thinking is None else self.enable_thinking
        return False if self.effort == "none" else None

    @model_validator(mode="after")
    def _one_way_to_begin(self) -> "ChatCompletionRequest":
        if self.continue_final_message and self.add_generation_prompt:
            text = "may not be combined with add_generation_prompt: true, which begins a new message"
            raise field_error("invalid_value", text, "continue_final_message")
        return self

    @property
    def has_tools(self) -> bool:
        """True if the prompt involves tools: tools are offered, or earlier turns have calls or results of tools."""
        return bool(self.offered_tools) or any(
            message.tool_calls or message.role == "tool" for message in self.messages
        )

    @property
    def adds_generation_prompt(self) -> bool:
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt

    def check_limits(self, config: ServerConfig) -> None:
        super().check_limits(config)
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= config.max_top_logprobs:
            raise invalid(f"top_logprobs must be an integer from 0 to {config.max_top_logprobs}.", "top_logprobs")
