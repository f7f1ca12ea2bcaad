"""Errors of a request that was translated into one of another API, in the words of the client."""

import re
from collections.abc import Callable
from typing import Any

from pydantic_core import PydanticCustomError

from engine.errors import InvalidRequestError
from server.protocol.strict import field_error

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
