"""The request of POST /v1/completions."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from server.config import ServerConfig
from server.errors import invalid
from server.protocol.field_checks import field_error
from server.protocol.generation_request import GenerationRequest, ranged_field
from server.protocol.harmless import COMPLETION_IGNORED, IGNORED

Prompt = Annotated[
    Any, BeforeValidator(lambda value: value, json_schema_input_type=str | list[str] | list[int] | list[list[int]])
]


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    ignored = IGNORED | COMPLETION_IGNORED

    prompt: Prompt = Field("", description="absent or empty: the beginning of a new document")
    best_of: int | None = ranged_field(None, 1)
    echo: bool = False
    logprobs: int | None = ranged_field(None, 0)
    suffix: str | None = None
    add_special_tokens: bool = True

    @property
    def num_echo_logprobs(self) -> int | None:
        return self.logprobs if self.echo else None

    @property
    def num_prompt_logprobs(self) -> int | None:
        return max((k for k in (self.num_echo_logprobs, self.prompt_logprobs) if k is not None), default=None)

    @property
    def num_samples(self) -> int:
        return self.n if self.best_of is None else self.best_of

    @property
    def ranks_samples(self) -> bool:
        return self.num_samples > self.n

    @model_validator(mode="after")
    def _fields_fit_together(self) -> "CompletionRequest":
        if self.suffix and self.num_echo_logprobs is not None:  # the prompt's tokens include those of the suffix
            raise field_error("unsupported_value", "may not be combined with echo and logprobs", "suffix")
        if self.best_of is not None:
            if self.best_of < max(1, self.n):
                raise field_error("invalid_value", "must be at least n", "best_of")
            if self.stream and self.best_of > self.n:
                text = "must equal n with stream: true: the best samples are known only when all have ended"
                raise field_error("unsupported_value", text, "best_of")
        return self

    def check_limits(self, config: ServerConfig) -> None:
        super().check_limits(config)
        if self.best_of is not None and self.best_of > config.max_best_of:
            raise invalid(f"best_of must be an integer from n to {config.max_best_of}.", "best_of")
        if self.logprobs is not None and not 0 <= self.logprobs <= config.max_logprobs:
            raise invalid(f"logprobs must be an integer from 0 to {config.max_logprobs}.", "logprobs")


def parse_prompts(prompt: Any, max_prompts: int, name: str = "prompt") -> list[str] | list[list[int]]:
    """Returns the prompts as a list of strings or a list of lists of token ids, whichever of the four shapes was sent.

    `name` is the field that errors name. Raises InvalidRequestError.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise invalid(f"{name} must be a string, or a list of strings, token ids or lists of token ids.", name)
    if not prompt:
        raise invalid(f"{name} is empty.", name)
    if type(prompt[0]) is int:
        _check_all(prompt, int, name, "an integer like the first entry")
        return [prompt]
    kind = type(prompt[0]) if type(prompt[0]) in (str, list) else str
    _check_all(prompt, kind, name, "a string" if kind is str else "a list of token ids")
    if len(prompt) > max_prompts:
        raise invalid(f"{name} holds {len(prompt)} prompts; this server takes at most {max_prompts}.", name)
    for i, ids in enumerate(prompt):
        if kind is list:
            _check_all(ids, int, f"{name}[{i}]", "an integer")
    return prompt


def _check_all(values: list[Any], kind: type, path: str, must_be: str) -> None:
    if not values:
        raise invalid(f"{path} is empty.", path)
    if set(map(type, values)) != {kind}:
        i = next(i for i, value in enumerate(values) if type(value) is not kind)
        raise invalid(f"{path}[{i}] must be {must_be}.", f"{path}[{i}]", "invalid_type")
