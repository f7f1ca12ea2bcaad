"""Errors of a request that was translated into one of another API, in the words of the client."""

import re
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import FailFast, Field
from pydantic_core import PydanticCustomError

from engine.errors import InvalidRequestError
from server.protocol.generation_request import MAX_TIMEOUT, Salt, Seed, ranged_field
from server.protocol.strict import Strict, field_error

Names = tuple[tuple[str, str], ...]  # (regex of the start of a field's path, what stands there in the client's request)


def renamed(error: InvalidRequestError, names: Names) -> InvalidRequestError:
    """The same error about the field that the client sent; the first of `names` that matches counts."""
    if error.param is None:
        return error
    for pattern, ours in names:
        param, count = re.subn(f"^(?:{pattern})", ours, error.param)
        if count:
            return InvalidRequestError(str(error).replace(error.param, param), param, error.code)
    return error


def without(part: str, check: Callable[[Any], Any], value: Any) -> Any:
    """`check(value)`, whose field errors have `part` in their path where the client's request does not."""
    try:
        return check(value)
    except PydanticCustomError as error:
        context = error.context or {}
        path = [name for name in context.get("path", ()) if name != part]
        raise field_error(error.type, str(context.get("text", "")), *path) from None


def below(check: Callable[[Any], Any], value: Any, *path: str | int) -> Any:
    """`check(value)`, whose field errors are those of the field at `path`."""
    try:
        return check(value)
    except PydanticCustomError as error:
        context = error.context or {}
        raise field_error(error.type, str(context.get("text", "")), *path, *context.get("path", ())) from None


class SamplingExtras(Strict):
    """Names and meanings are those of /v1/chat/completions."""

    is_request = True

    seed: Seed = None
    min_p: float = ranged_field(0.0, 0.0, 1.0)
    presence_penalty: float = ranged_field(0.0, -2.0, 2.0)
    frequency_penalty: float = ranged_field(0.0, -2.0, 2.0)
    repetition_penalty: float = ranged_field(1.0, 0.0, 100.0)
    stop_token_ids: Annotated[list[int], FailFast(), Field(max_length=1024)] = Field(default_factory=list)
    ignore_eos: bool = False
    min_tokens: int = ranged_field(0, 0)
    timeout: float | None = Field(None, gt=0.0, le=MAX_TIMEOUT)
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    cache_salt: Salt = ""
    return_timings: bool = False

    def extras(self) -> dict[str, Any]:
        """Those that were given, as fields of a chat request."""
        return {name: getattr(self, name) for name in self.model_fields_set & SamplingExtras.model_fields.keys()}
