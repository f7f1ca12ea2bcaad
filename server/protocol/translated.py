"""Requests that are translated into a chat request: shared fields, and errors that name the client's own fields."""

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import FailFast, Field
from pydantic_core import PydanticCustomError

from engine.errors import InvalidRequestError
from server.protocol.field_checks import field_error
from server.protocol.generation_request import MAX_TIMEOUT, Salt, Seed, ranged_field
from server.protocol.strict import Strict

Names = tuple[tuple[str, str], ...]  # (regex of the start of a chat field's path, start of the client's path)


Path = tuple[str | int, ...]


def renamed(error: InvalidRequestError, names: Names) -> InvalidRequestError:
    """The same error about the field that the client sent. The first entry of `names` that matches counts."""
    if error.param is None:
        return error
    for pattern, ours in names:
        param, count = re.subn(f"^(?:{pattern})", ours, error.param)
        if count:
            return InvalidRequestError(str(error).replace(error.param, param), param, error.code)
    return error


def without(part: str, check: Callable[[Any], Any], value: Any) -> Any:
    """`check(value)`. Field errors lose `part` in their path: the client's request does not have that level."""
    return _check_with_path(check, value, lambda path: tuple(name for name in path if name != part))


def below(check: Callable[[Any], Any], value: Any, *path: str | int) -> Any:
    """`check(value)`. Field errors become errors of fields below `path`."""
    return _check_with_path(check, value, lambda inner: (*path, *inner))


def add_text(message: dict[str, Any], name: str, text: str) -> None:
    """Append a part to the text `name` of a message. Empty parts at the beginning are dropped.

    The parts are a list until `join_texts`: a text that grew with each part would be copied for each part.
    """
    parts = message.setdefault(name, [])
    if text or parts:
        parts.append(text)


def join_texts(messages: list[dict[str, Any]], separators: Mapping[str, str]) -> None:
    """Join the parts of each message's texts. `separators`: name of a text -> what stands between its parts."""
    for message in messages:
        for name, separator in separators.items():
            if isinstance(parts := message.get(name), list):
                message[name] = separator.join(parts)


def _check_with_path(check: Callable[[Any], Any], value: Any, path_of: Callable[[Path], Path]) -> Any:
    try:
        return check(value)
    except PydanticCustomError as error:
        context = error.context or {}
        raise field_error(error.type, str(context.get("text", "")), *path_of(context.get("path", ()))) from None


class SamplingExtras(Strict):
    """Fields with the names and meanings of /v1/chat/completions that other APIs accept too."""

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
        """The given ones of these fields, as fields of a chat request."""
        return {name: getattr(self, name) for name in self.model_fields_set & SamplingExtras.model_fields.keys()}
