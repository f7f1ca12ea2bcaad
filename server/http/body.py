"""From the bytes of a request body to a request: bounded, strict, and off the event loop when large."""

import codecs
import json
import math
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any, TypeVar

import anyio
import msgspec
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.types import Receive, Scope

from engine.text.unicode import is_valid_unicode
from server.errors import ApiError, field_path, invalid
from server.http.body_budget import OverBudgetError
from server.http.json_bounds import JsonBounds, JsonBoundsError, body_bounds
from server.http.resting_thread import RestingThread, rest_for

encode_json = msgspec.json.Encoder().encode

T = TypeVar("T")

# The event loop parses bodies up to this size, in under 2 ms. A thread parses larger ones, one body at a time and
# tenants in turn: a thread that parses holds the GIL, and two threads would leave the loop half as much as one.
PARSE_INLINE_BYTES = 32 << 10
BODY_SECONDS = 60.0  # time limit: a client that sends its body slowly does not hold a connection for ever
DISCARD_SECONDS = 2.0  # time for the client to send the rest of a body that is too large
large = ContextVar("large", default=False)  # whether a thread parsed the body of this task's request
HUGE_INTEGER = 10**30  # stands for a number of thousands of digits: out of the range of every field


async def read_parsed(
    http: HttpRequest,
    parse: Callable[[dict[str, Any]], T],
    max_bytes: int,
    max_model_len: int,
    thread: RestingThread,
) -> T:
    """Read the body, a JSON object, and return `parse` of it. `thread` parses large bodies.

    Raises ApiError (408, 413, 415, 429, 503), InvalidRequestError (400), ClientDisconnect, and what `parse` raises.
    """
    body = await read_body(http.scope, http.receive, max_bytes)
    bounds = body_bounds(max_model_len)
    if len(body) <= PARSE_INLINE_BYTES:
        return parse(parse_json(body, bounds))

    def work() -> T:
        start = time.perf_counter()
        fields = parse_json(body, bounds)
        rest_for(time.perf_counter() - start)
        return parse(fields)

    large.set(True)
    return await thread.run(http.state.caller.tenant, partial(copy_context().run, work))


async def convert(thread: RestingThread, tenant: str, work: Callable[[], T]) -> T:
    """The result of `work` on the request that this task has read: in `thread` where its body was large."""
    return await thread.run(tenant, partial(copy_context().run, work)) if large.get() else work()


async def read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytearray:
    """The whole body. Raises ApiError (408, 413, 415, 429, 503) and ClientDisconnect."""
    try:
        _check_headers(dict(scope["headers"]), max_bytes)
        with anyio.fail_after(BODY_SECONDS):
            return await _read_all(receive, max_bytes)
    except TimeoutError:
        raise ApiError(408, f"The body did not arrive within {BODY_SECONDS:g} s.", headers=_CLOSE) from None
    except OverBudgetError as error:
        await _discard(receive)
        error.headers |= _CLOSE
        raise
    except _TooLargeError:
        if b"expect" not in dict(scope["headers"]):  # a client that sent Expect waits to be asked for the body
            await _discard(receive)
        message = f"The body is larger than this server's limit of {max_bytes} bytes."
        raise ApiError(413, message, code="body_too_large", headers=_CLOSE) from None


_CLOSE = {"connection": "close"}  # the rest of the body is not read


class _TooLargeError(Exception):
    pass


def _check_headers(headers: Mapping[bytes, bytes], max_bytes: int) -> None:
    media_type, *parameters = headers.get(b"content-type", b"").decode("latin-1").lower().split(";")
    charset = next((p.strip()[8:].strip('"') for p in parameters if p.strip().startswith("charset=")), "")
    if media_type.strip() != "application/json" or charset not in ("", "utf-8", "utf8"):
        raise ApiError(415, "Send the body as Content-Type: application/json, in UTF-8.", code="unsupported_media_type")
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise ApiError(
            415, "Compressed bodies are not accepted: leave Content-Encoding out.", code="unsupported_media_type"
        )
    length = headers.get(b"content-length", b"")
    if length.isdigit() and int(length[:20]) > max_bytes:
        raise _TooLargeError


async def _read_all(receive: Receive, max_bytes: int) -> bytearray:
    """Read all chunks into one growing array: joining the chunks of a large body would take the event loop 15 ms."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise _TooLargeError
        if not message.get("more_body", False):
            return body


async def _discard(receive: Receive) -> None:
    """Let a client finish sending, for a while: a client whose connection closes before that never sees the answer."""
    with anyio.move_on_after(DISCARD_SECONDS):
        while (message := await receive())["type"] == "http.request" and message.get("more_body", False):
            pass


def parse_json(body: bytes | bytearray, bounds: JsonBounds) -> dict[str, Any]:
    """Parse strict UTF-8 JSON, an object. InvalidRequestError names duplicate keys, lone surrogates, NaN and Infinity.

    NUL (\\u0000) is a character like any other and passes.
    """
    try:
        bounds.check(body)
    except JsonBoundsError as error:
        raise invalid(f"The body is not accepted: {error}.", None, "invalid_json") from None
    if body.startswith(codecs.BOM_UTF8):
        raise _malformed("it begins with a byte order mark (BOM): leave that out")
    try:
        value, has_constants = _loads(body.decode("utf-8"))
    except UnicodeDecodeError:
        raise _malformed("it is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise _malformed(f"{error.msg} (line {error.lineno}, column {error.colno})") from None
    except RecursionError:
        raise _malformed("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise _malformed("it must be an object")
    # Search for one byte first: a search for several takes five times as long, and every search holds the GIL.
    if has_constants or (b"\\" in body and (b"\\ud" in body or b"\\uD" in body)):
        _refuse_hostile_values(value)
    return value


def _loads(text: str) -> tuple[Any, bool]:
    """The parsed `text`, and whether it holds NaN or Infinity."""
    constants: list[str] = []

    def constant(name: str) -> float:
        constants.append(name)
        return float(name)

    load = partial(json.loads, text, object_pairs_hook=_unique_keys, parse_constant=constant)
    try:
        return load(), bool(constants)
    except json.JSONDecodeError:
        raise
    except ValueError:  # an integer of more than 4300 digits; parse again so that the error can name its field
        return load(parse_int=_bounded_int), bool(constants)


def _bounded_int(digits: str) -> int:
    return int(digits) if len(digits) <= 30 else HUGE_INTEGER


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse equal keys: parsers disagree about which of two counts, and a client could fool a filter in front."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise invalid(f"{field_path((name,))} is given twice.", field_path((name,)), "duplicate_parameter")
            seen.add(name)
    return fields


def _refuse_hostile_values(body: dict[str, Any]) -> None:
    """Refuse lone surrogates, NaN and Infinity, which no field may hold. Only bodies that show a trace are walked."""
    containers: list[tuple[tuple[Any, ...], Any]] = [((), body)]
    while containers:
        path, container = containers.pop()
        for key, child in container.items() if isinstance(container, dict) else enumerate(container):
            if isinstance(key, str) and not is_valid_unicode(key):
                raise _half_character((*path, "a key"))
            if isinstance(child, (dict, list)):
                containers.append(((*path, key), child))
            elif isinstance(child, str) and not is_valid_unicode(child):
                raise _half_character((*path, key))
            elif isinstance(child, float) and not math.isfinite(child):
                name = field_path((*path, key))
                raise invalid(f"{name} must be a finite number.", name)


def _half_character(path: tuple[Any, ...]) -> Exception:
    name = field_path(path)
    return invalid(f"{name} contains half of a surrogate pair, which is not Unicode text.", name)


def _malformed(reason: str) -> ApiError:
    return ApiError(400, f"The body is not valid JSON: {reason}.", code="invalid_json")
