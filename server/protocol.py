"""Request models of the OpenAI endpoints, strict: no coercion, nothing dropped in silence.

A field is one of four things: honoured (declared below), ignored because it cannot change the output (IGNORED), inert
at the values that mean what this server does anyway (INERT; any other value is a 400 that names it), or unknown (400).
null stands for an absent field everywhere. Ranges are checked by SamplingParams, once for every caller of the engine.
"""

import difflib
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from engine.errors import InvalidRequestError
from engine.sampling_params import MAX_N, SamplingParams
from server.errors import MAX_NAME_LENGTH, field_path, invalid

IGNORED = frozenset(
    {
        "metadata",
        "parallel_tool_calls",  # without tools there is nothing to call in parallel
        "prediction",  # a hint for speed
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "store",
        "user",
    }
)
INERT: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "chat_template": (),  # a template of the client's would run in this process
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": ("none",),
    "functions": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}
MESSAGE_INERT: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "refusal": (),
    "tool_call_id": (),
    "tool_calls": ([],),
}
STREAM_INERT: dict[str, tuple[Any, ...]] = {"continuous_usage_stats": (False,)}

# Names that a chat template gets from the server; a client may not set them through chat_template_kwargs.
RESERVED_TEMPLATE_NAMES = frozenset(
    {"add_generation_prompt", "bos_token", "chat_template", "conversation", "documents", "eos_token", "messages"}
    | {"pad_token", "raise_exception", "return_dict", "self", "strftime_now", "tokenize", "tools", "unk_token"}
)
MAX_TEMPLATE_KWARGS = 16
MAX_TEMPLATE_STRING = 256
MAX_LOGIT_BIAS = 1024
MAX_TOP_LOGPROBS = 20  # the engine itself takes more


class _Strict(BaseModel):
    """Takes exact types only; drops nulls and harmless fields before pydantic looks."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    ignored: ClassVar[frozenset[str]] = frozenset()
    inert: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_harmless(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if not cls._is_harmless(name, value)}

    @classmethod
    def _is_harmless(cls, name: str, value: Any) -> bool:
        if value is None or name in cls.ignored:
            return True
        if name in cls.model_fields:
            return False
        if name not in cls.inert:  # not left to pydantic, which would collect an error for each of a million fields
            raise _error("unknown_parameter", f"is not a field of this request{cls._nearest(name)}", name)
        if value in cls.inert[name]:
            return True
        raise _error("unsupported_value", "is not supported by this server: leave it out", name)

    @classmethod
    def _nearest(cls, name: str) -> str:
        near = difflib.get_close_matches(name[:MAX_NAME_LENGTH], cls.model_fields, n=1)
        return f"; did you mean {near[0]}?" if near else ""


def _error(code: str, text: str, *path: str | int) -> PydanticCustomError:
    """An error of the field at `path` below the one under validation; `text` follows the field's name."""
    return PydanticCustomError(code, "{text}", {"text": text, "path": path})


def _stop_strings(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _message_text(value: Any) -> Any:
    """Content as one text: a string, or text parts joined by newlines. Anything but text is refused."""
    if not isinstance(value, list):
        return value
    if not value:
        raise _error("invalid_value", "must hold at least one part")
    texts = []
    for i, part in enumerate(value):
        if not isinstance(part, dict):
            raise _error("invalid_type", "must be an object", i)
        if part.get("type") != "text":
            raise _error("unsupported_value", "must be 'text': this server takes text only", i, "type")
        if not isinstance(part.get("text"), str):
            raise _error("invalid_type", "must be a string", i, "text")
        extra = [name for name, field in part.items() if name not in ("type", "text") and field is not None]
        if extra:
            raise _error("unknown_parameter", "is not a field of a text part", i, extra[0])
        texts.append(part["text"])
    return "\n".join(texts)


def _template_kwargs(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_TEMPLATE_KWARGS:
        raise _error("invalid_value", f"may hold at most {MAX_TEMPLATE_KWARGS} entries")
    for name, setting in value.items():
        if not name.isidentifier() or len(name) > MAX_NAME_LENGTH or name in RESERVED_TEMPLATE_NAMES:
            raise _error("unsupported_value", "is not a name that a client may set", name)
        if not isinstance(setting, (bool, int, float, str)):
            raise _error("invalid_type", "must be a string, a number, true or false", name)
        if isinstance(setting, str) and len(setting) > MAX_TEMPLATE_STRING:
            raise _error("invalid_value", f"must be at most {MAX_TEMPLATE_STRING} characters", name)
    return value


def _bounded_bias(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIAS:
        raise _error("invalid_value", f"may hold at most {MAX_LOGIT_BIAS} tokens")
    return value


def _early_stopping(value: Any) -> Any:
    if not isinstance(value, bool) and value != "never":
        raise _error("invalid_value", 'must be true, false or "never"')
    return value


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


Stop = Annotated[list[str], FailFast(), BeforeValidator(_stop_strings, json_schema_input_type=str | list[str])]
Content = Annotated[str, BeforeValidator(_message_text, json_schema_input_type=str | list[TextPart])]
TemplateKwargs = Annotated[
    dict[str, Any],
    BeforeValidator(_template_kwargs, json_schema_input_type=dict[str, bool | int | float | str]),
]
LogitBias = Annotated[dict[str, float], BeforeValidator(_bounded_bias, json_schema_input_type=dict[str, float])]
EarlyStopping = Annotated[Any, BeforeValidator(_early_stopping, json_schema_input_type=bool | Literal["never"])]
Prompt = Annotated[
    Any, BeforeValidator(lambda value: value, json_schema_input_type=str | list[str] | list[int] | list[list[int]])
]


class StreamOptions(_Strict):
    ignored = frozenset({"include_obfuscation"})
    inert = STREAM_INERT

    include_usage: bool = False


class Message(_Strict):
    """One turn of a conversation, text only. `developer` is rendered as `system`."""

    inert = MESSAGE_INERT

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: str | None = None

    def for_template(self) -> dict[str, Any]:
        role = "system" if self.role == "developer" else self.role
        named = {} if self.name is None else {"name": self.name}
        return {"role": role, "content": self.content, **named}


class GenerationRequest(_Strict):
    """What both endpoints share. Fields that OpenAI does not have carry vLLM's names and meanings."""

    ignored = IGNORED
    inert = INERT

    model: str
    n: int = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float = Field(1.0, ge=0.0, le=2.0)  # OpenAI's range; the engine itself takes more
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: LogitBias | None = None
    seed: int | None = None
    stop: Stop = Field(default_factory=list)
    max_tokens: int | None = None
    # vLLM's extensions
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: Annotated[list[int], FailFast(), Field(max_length=1024)] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    use_beam_search: bool = False  # see server/beam_search.py
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    cache_salt: str = Field("", max_length=128)

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> "GenerationRequest":
        if self.stream_options is not None and not self.stream:
            raise _error("invalid_value", "may be given only with stream: true", "stream_options")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def num_samples(self) -> int:
        """How many are generated of each prompt, to return n."""
        return self.n

    def sampling_params(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        return SamplingParams(
            n=self.num_samples,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self._token_biases(),
            seed=self.seed,
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            include_stop_str_in_output=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            max_tokens=max_tokens,
            logprobs=logprobs,
            skip_special_tokens=self.skip_special_tokens,
        )

    def _token_biases(self) -> dict[int, float] | None:
        if self.logit_bias is None:
            return None
        for key in self.logit_bias:
            if not (key.isascii() and key.isdigit() and len(key) <= 10):
                raise invalid("logit_bias must map token ids, written as strings, to numbers.", "logit_bias")
        return {int(key): bias for key, bias in self.logit_bias.items()}


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Prompt
    best_of: int | None = None
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    add_special_tokens: bool = True

    @property
    def num_samples(self) -> int:
        return self.n if self.best_of is None else self.best_of

    @property
    def ranks_samples(self) -> bool:
        return self.num_samples > self.n

    @model_validator(mode="after")
    def _refuse_what_is_not_there(self) -> "CompletionRequest":
        if self.best_of is not None:
            if not self.n <= self.best_of <= MAX_N:
                raise _error("invalid_value", f"must be at least n and at most {MAX_N}", "best_of")
            if self.stream and self.best_of > self.n:
                text = "must equal n with stream: true: the best samples are known only when all have ended"
                raise _error("unsupported_value", text, "best_of")
        if self.echo and self.logprobs is not None:
            raise _error("unsupported_value", "may not be combined with logprobs on this server", "echo")
        return self


class ChatCompletionRequest(GenerationRequest):
    """POST /v1/chat/completions. Without max_completion_tokens or max_tokens: to the end of the context."""

    inert = INERT | {"echo": (False,)}

    messages: Annotated[list[Message], FailFast(), Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool = False  # the chat template writes them
    chat_template_kwargs: TemplateKwargs = Field(default_factory=dict)

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> "ChatCompletionRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise _error("invalid_value", "may be given only with logprobs: true", "top_logprobs")
        return self


AnyRequest = TypeVar("AnyRequest", bound=GenerationRequest)

# pydantic's error type -> (what follows the field's name, OpenAI's code)
PHRASES = {
    "bool_type": ("must be true or false", "invalid_type"),
    "dict_type": ("must be an object", "invalid_type"),
    "float_type": ("must be a number", "invalid_type"),
    "int_type": ("must be an integer", "invalid_type"),
    "list_type": ("must be a list", "invalid_type"),
    "literal_error": ("must be {expected}", "unsupported_value"),
    "missing": ("is required", "missing_required_parameter"),
    "model_type": ("must be an object", "invalid_type"),
    "string_too_long": ("must be at most {max_length} characters", "invalid_value"),
    "string_type": ("must be a string", "invalid_type"),
    "too_long": ("may hold at most {max_length} entries", "invalid_value"),
    "too_short": ("must not be empty", "invalid_value"),
}


def parse_request(kind: type[AnyRequest], body: dict[str, Any]) -> AnyRequest:
    """Validate a JSON object; InvalidRequestError names the first wrong field and never repeats its value."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise _describe(first["type"], first["loc"], first["msg"], first.get("ctx", {})) from None


def _describe(
    error_type: str, loc: tuple[int | str, ...], message: str, context: dict[str, Any]
) -> InvalidRequestError:
    name = field_path((*loc, *context.get("path", ())))
    if "path" in context:
        text, code = message, error_type
    else:
        text, code = PHRASES.get(error_type, (message.replace("Input should", "must"), "invalid_value"))
        text = text.format(**context)
    return invalid(f"{name} {text}{'' if text.endswith('?') else '.'}", name, code)


def parse_prompts(prompt: Any, max_prompts: int) -> list[str] | list[list[int]]:
    """The four shapes of a completion prompt as one list: strings, or lists of token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise invalid("prompt must be a string, or a list of strings, token ids or lists of token ids.", "prompt")
    if not prompt:
        raise invalid("prompt is empty.", "prompt")
    if type(prompt[0]) is int:
        _check_all(prompt, int, "prompt", "an integer like the first entry")
        return [prompt]
    kind = type(prompt[0]) if type(prompt[0]) in (str, list) else str
    _check_all(prompt, kind, "prompt", "a string" if kind is str else "a list of token ids")
    if len(prompt) > max_prompts:
        raise invalid(f"prompt holds {len(prompt)} prompts; this server takes at most {max_prompts}.", "prompt")
    for i, ids in enumerate(prompt):
        if kind is list:
            _check_all(ids, int, f"prompt[{i}]", "an integer")
    return prompt


def _check_all(values: list[Any], kind: type, path: str, must_be: str) -> None:
    if not values:
        raise invalid(f"{path} is empty.", path)
    if set(map(type, values)) != {kind}:
        i = next(i for i, value in enumerate(values) if type(value) is not kind)
        raise invalid(f"{path}[{i}] must be {must_be}.", f"{path}[{i}]", "invalid_type")
