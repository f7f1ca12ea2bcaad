"""Base of the requests of /v1/completions and /v1/chat/completions.

SamplingParams checks the ranges, once for every caller of the engine.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, FailFast, Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue

from engine.sampling_params import MAX_BAD_WORDS, SamplingParams
from engine.structured_output import StructuredOutput
from server.config import ServerConfig
from server.errors import invalid
from server.protocol.field_checks import field_error
from server.protocol.grammars.response_format import FOREIGN, RENAMED, ResponseFormat, StructuredOutputsField
from server.protocol.harmless import IGNORED, INERT
from server.protocol.other_servers import options_schema, translate_spellings
from server.protocol.strict import Strict

MAX_LOGIT_BIAS = 1024
TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")  # one spelling per token id: two keys of a map never mean the same token
MAX_TIMEOUT = 86400.0  # seconds


def _stop_strings(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise field_error("invalid_type", "must be a string or a list of strings")
    return [value] if isinstance(value, str) else value


def _bounded_bias(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIAS:
        raise field_error("invalid_value", f"may hold at most {MAX_LOGIT_BIAS} tokens")
    return value


def _token_ids(value: Any) -> Any:
    if not isinstance(value, list):
        raise field_error("invalid_type", "must be a list")
    if set(map(type, value)) - {int}:
        at = next(i for i, token_id in enumerate(value) if type(token_id) is not int)
        raise field_error("invalid_type", "must be an integer", at)
    return value


def _early_stopping(value: Any) -> Any:
    if not isinstance(value, bool) and value != "never":
        raise field_error("invalid_value", 'must be true, false or "never"')
    return value


Stop = Annotated[list[str], FailFast(), BeforeValidator(_stop_strings, json_schema_input_type=str | list[str])]
LogitBias = Annotated[dict[str, float], BeforeValidator(_bounded_bias, json_schema_input_type=dict[str, float])]
EarlyStopping = Annotated[Any, BeforeValidator(_early_stopping, json_schema_input_type=bool | Literal["never"])]


Seed = Annotated[int | None, Field(ge=-(2**63), lt=2**63)]  # OpenAI's range; the engine accepts more
Salt = Annotated[str, Field(min_length=1, max_length=128, json_schema_extra={"default": None})]  # "" stands for absent
AllowedTokenIds = Annotated[Any, BeforeValidator(_token_ids, json_schema_input_type=list[int])]


def ranged_field(default: Any, low: float, high: float | None = None) -> Any:
    """A field that shows its range in the schema only: SamplingParams or `check_limits` checks it."""
    schema: dict[str, Any] = {"minimum": low} if high is None else {"minimum": low, "maximum": high}
    return Field(default, json_schema_extra=schema)


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: see server/output/stream_options.py
    include_obfuscation: bool = False  # see server/output/stream_options.py


class GenerationRequest(Strict):
    """The fields of both endpoints. Fields that OpenAI does not have carry vLLM's names and meanings."""

    is_request = True
    ignored = IGNORED
    inert = INERT
    renamed = RENAMED
    foreign = FOREIGN

    model: str
    n: int = ranged_field(1, 1)
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float = Field(1.0, ge=0.0, le=2.0)  # OpenAI's range; the engine accepts more
    top_p: float = ranged_field(1.0, 0.0, 1.0)
    presence_penalty: float = ranged_field(0.0, -2.0, 2.0)
    frequency_penalty: float = ranged_field(0.0, -2.0, 2.0)
    logit_bias: LogitBias | None = None
    seed: Seed = None
    stop: Stop = Field(default_factory=list)
    max_tokens: int | None = ranged_field(None, 0)
    response_format: ResponseFormat = None
    # vLLM's extensions
    top_k: int = ranged_field(0, -1, 2**31 - 1)
    min_p: float = ranged_field(0.0, 0.0, 1.0)
    repetition_penalty: float = ranged_field(1.0, 0.0, 100.0)
    stop_token_ids: Annotated[list[int], FailFast(), Field(max_length=1024)] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = ranged_field(0, 0)
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsField = None
    prompt_logprobs: int | None = ranged_field(None, 0)
    bad_words: Annotated[list[str], FailFast(), Field(max_length=MAX_BAD_WORDS)] = Field(default_factory=list)
    allowed_token_ids: AllowedTokenIds = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    truncate_prompt_tokens: int | None = Field(None, ge=-1, lt=2**31)
    truncation_side: Literal["left", "right"] = "left"
    use_beam_search: bool = False  # see server/intake/beam_search.py
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    timeout: float | None = Field(None, gt=0.0, le=MAX_TIMEOUT)  # ours: seconds from acceptance to the last token
    cache_salt: Salt = ""
    num_ctx: int | None = Field(None, ge=1)  # Ollama's: the smallest context length that the client needs
    return_timings: bool = False  # ours: see server/routes/debug_requests.py

    @classmethod
    def _translate_spellings(cls, fields: dict[str, Any]) -> dict[str, Any]:
        return translate_spellings(fields)

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = super().__get_pydantic_json_schema__(core_schema, handler)
        for name, field in options_schema(schema["properties"]).items():
            schema["properties"].setdefault(name, field)
        return schema

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> "GenerationRequest":
        if self.stream_options is not None and not self.stream:
            raise field_error("invalid_value", "may be given only with stream: true", "stream_options")
        if self.includes_running_usage and not self.include_usage:
            text = "may be given only with include_usage: true"
            raise field_error("invalid_value", text, "stream_options", "continuous_usage_stats")
        return self

    @model_validator(mode="after")
    def _prompt_logprobs_come_whole(self) -> "GenerationRequest":
        if self.prompt_logprobs is not None and self.stream:
            text = "is not available with stream: true; /v1/completions streams prompt logprobs with echo and logprobs"
            raise field_error("unsupported_value", text, "prompt_logprobs")
        return self

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Number of alternatives that the engine reports for each prompt token; None: no logprobs of the prompt."""
        return self.prompt_logprobs

    @model_validator(mode="after")
    def _truncation_leaves_something(self) -> "GenerationRequest":
        if self.truncate_prompt_tokens == 0:
            raise field_error("invalid_value", "must be -1 (as many as fit) or at least 1", "truncate_prompt_tokens")
        return self

    def check_limits(self, config: ServerConfig) -> None:
        """Raises InvalidRequestError if a field exceeds the limits of this server."""
        if self.prompt_logprobs is not None and not 0 <= self.prompt_logprobs <= config.max_top_logprobs:
            raise invalid(f"prompt_logprobs must be an integer from 0 to {config.max_top_logprobs}.", "prompt_logprobs")

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def includes_running_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def include_obfuscation(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_obfuscation

    @property
    def num_samples(self) -> int:
        """Number of samples generated per prompt, of which n are returned."""
        return self.n

    @property
    def structured_output(self) -> StructuredOutput | None:
        output: StructuredOutput | None = self.structured_outputs or self.response_format
        return output

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
            structured_output=self.structured_output,
            prompt_logprobs=self.num_prompt_logprobs,
            bad_words=tuple(self.bad_words),
            allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
        )

    def _token_biases(self) -> dict[int, float] | None:
        if self.logit_bias is None:
            return None
        for key in self.logit_bias:
            if not TOKEN_ID.fullmatch(key):
                raise invalid("logit_bias must map token ids, written as strings, to numbers.", "logit_bias")
        return {int(key): bias for key, bias in self.logit_bias.items()}
