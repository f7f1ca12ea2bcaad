"""One table: exception -> HTTP status and OpenAI error body. Only this module decides a status.

Every body is `{"error": {"message", "type", "param", "code"}}` with all four keys. A 500 never carries internals: the
log has the details under the request id that the client got.
"""

import json
import logging
import math
import random
from collections.abc import Collection
from http import HTTPStatus
from typing import Any

from starlette.responses import Response
from starlette.types import Scope

from engine.errors import DeadlineError, EngineError, InvalidRequestError, QueueFullError, UnavailableError

logger = logging.getLogger(__name__)

MAX_NAME_LENGTH = 64  # characters of a client's field name that an error repeats


class ApiError(Exception):
    """An error of the HTTP layer itself, with its status; the engine's own errors are in TABLE."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        type: str = "invalid_request_error",
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.type = status, param, code, type
        self.headers = headers or {}
        self.reason = ""  # why the request was refused, for the metrics; "" for other errors

    @classmethod
    def retry(cls, status: int, message: str, seconds: float, reason: str) -> "ApiError":
        """A temporary refusal. The message and Retry-After say after how many seconds to try again."""
        seconds = max(1, math.ceil(seconds))
        message = f"{message} Try again in {seconds} s."
        headers = {"retry-after": str(seconds)}
        error = cls(status, message, type="rate_limit_error", code="rate_limit_exceeded", headers=headers)
        error.reason = reason
        return error


# First match wins. 429 and 503 mean that no work was started, so clients may retry; they must not retry a 500 by
# themselves.
TABLE: tuple[tuple[type[Exception], int, str, str | None], ...] = (
    (InvalidRequestError, 400, "invalid_request_error", None),
    (QueueFullError, 429, "rate_limit_error", "rate_limit_exceeded"),
    (DeadlineError, 408, "invalid_request_error", "deadline_exceeded"),
    (UnavailableError, 503, "server_error", "service_unavailable"),
    (EngineError, 500, "server_error", "engine_error"),
    (Exception, 500, "server_error", "internal_error"),
)
INTERNAL_MESSAGE = "The server failed to finish this request. Its log has the details under the x-request-id."


def to_api_error(error: Exception) -> ApiError:
    """Any exception as an ApiError. Unexpected ones are logged with a traceback; the client gets a general text."""
    if isinstance(error, ApiError):
        return error
    status, type_, code = next(row[1:] for row in TABLE if isinstance(error, row[0]))
    headers: dict[str, str] = {}
    message, param = str(error), None
    if isinstance(error, InvalidRequestError):
        param, code = error.param, error.code
    elif isinstance(error, DeadlineError):
        param, headers["x-should-retry"] = error.param, "false"  # the client's deadline has passed
    elif isinstance(error, UnavailableError):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
    else:
        expected = isinstance(error, EngineError)
        logger.error("a request failed: %s", error if expected else repr(error), exc_info=None if expected else error)
        message, headers["x-should-retry"] = INTERNAL_MESSAGE, "false"
    return ApiError(status, message, param=param, code=code, type=type_, headers=headers)


def refusal_reason(error: Exception) -> str:
    """Label, from a small set, of why a valid request was refused; "" for every other error."""
    if isinstance(error, QueueFullError):
        return "queue_" + error.limit
    return getattr(error, "reason", "") if isinstance(error, ApiError) else ""


def from_http_status(status: int, headers: dict[str, str] | None = None, nearest: str | None = None) -> ApiError:
    """A refusal of the router (unknown route, wrong method) as an ApiError. `nearest`: the route probably meant."""
    unknown = f"Unknown route; did you mean {nearest}?" if nearest else "Unknown route; see /openapi.json."
    messages = {404: unknown, 405: f"This route takes {(headers or {}).get('Allow', 'other methods')} only."}
    codes = {404: "not_found", 405: "method_not_allowed"}
    message = messages.get(status, HTTPStatus(status).phrase + ".")
    return ApiError(status, message, code=codes.get(status), headers=headers)


def nearest_route(path: str, known: Collection[str]) -> str | None:
    """The route of a client whose base URL lacks /v1, has /v1 twice, or has a slash too many. None if there is none."""
    bare = "/" + "/".join(part for part in path.split("/") if part)
    return next((route for route in (bare, "/v1" + bare, bare.removeprefix("/v1")) if route in known), None)


def error_object(error: ApiError) -> dict[str, Any]:
    return {"message": str(error), "type": error.type, "param": error.param, "code": error.code}


def error_body(error: ApiError) -> bytes:
    """The body in OpenAI's envelope. ASCII, so that a lone surrogate in a client's field name cannot break it."""
    return json.dumps({"error": error_object(error)}, separators=(",", ":")).encode("ascii")


def error_response(error: Exception, scope: Scope) -> Response:
    """The answer to a request. Its `scope` decides between OpenAI's and Anthropic's envelope."""
    api_error = to_api_error(error)
    body = error_body(api_error)
    if speaks_anthropic(scope):
        body = json.dumps({"type": "error", "error": anthropic_error(api_error)}, separators=(",", ":")).encode("ascii")
    return Response(body, api_error.status, api_error.headers, "application/json")


# Beginnings of the paths of OpenAI's API alone.
OPENAIS = ("/v1/chat/", "/v1/completions", "/v1/embeddings", "/v1/responses")


def speaks_anthropic(scope: Scope) -> bool:
    """True for a client of Anthropic's API: known by the route or, on routes of both APIs and on unknown ones, by the
    header anthropic-version."""
    path = scope["path"]
    if path.startswith(OPENAIS):
        return False
    return is_anthropics(path) or any(name == b"anthropic-version" for name, _ in scope["headers"])


def is_anthropics(path: str) -> bool:
    return path == "/v1/messages" or path.startswith("/v1/messages/")


# https://docs.anthropic.com/en/api/errors: status -> type. Anthropic's status for overload is 529, but proxies send a
# request to another server after a 503 only; Anthropic's clients repeat it after both.
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


# Code of the refusal of a request that asks the server to store its conversation. The tool runner of Anthropic's client
# sends such requests by itself, and continues without storage if the error has these details.
NO_THREADS = "thread_unsupported_request"


def anthropic_error(error: ApiError) -> dict[str, Any]:
    kind = ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    details = {"details": {"error_code": NO_THREADS, "unsupported": ["thread"]}} if error.code == NO_THREADS else {}
    return {"type": kind, "message": str(error), **details}


def invalid(message: str, param: str | None, code: str = "invalid_value") -> InvalidRequestError:
    return InvalidRequestError(message, param, code)


def new_id(prefix: str) -> str:
    """A unique id, not secret. Takes a twentieth of the time of uuid4, which calls the kernel."""
    return f"{prefix}{random.getrandbits(128):032x}"


def field_path(parts: tuple[Any, ...]) -> str:
    """("messages", 0, "content") -> "messages[0].content"; long names are cut."""
    path = ""
    for part in parts:
        path += f"[{part}]" if isinstance(part, int) else f".{str(part)[:MAX_NAME_LENGTH]}"
    return path.lstrip(".") or "body"
