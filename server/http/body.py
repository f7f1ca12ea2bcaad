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
from server.context import Served, rest_for
from server.errors import ApiError, field_path, invalid
from server.http.api_keys import tenant_of
from server.http.body_budget import OverBudgetError
from server.http.json_bounds import JsonBounds, JsonBoundsError, body_bounds
from server.protocol.strict import AnyModel, parse_request

encode_json = msgspec.json.Encoder().encode

T = TypeVar("T")

# Bodies up to this size are parsed on the event loop, in under 2 ms. Larger ones go to a thread, one body at a time and
# tenants in turn: a thread that parses holds the GIL, and two of them would leave the loop half as much as one.
PARSE_INLINE_BYTES = 32 << 10
BODY_SECONDS = 60.0  # a client that trickles its body does not hold a connection for ever
DISCARD_SECONDS = 2.0  # for what is left of a body that is too large
large = ContextVar("large", default=False)  # whether the body of this task's request was parsed in a thread
HUGE_INTEGER = 10**30  # stands for a number of thousands of digits: out of the range of every field


async def read_request(http: HttpRequest, served: Served, kind: type[AnyModel]) -> AnyModel:
    """The body as such a request. Raises what `read_parsed` does."""
    return await read_parsed(http, served, partial(parse_request, kind))


async def read_parsed(http: HttpRequest, served: Served, parse: Callable[[dict[str, Any]], T]) -> T:
    """Read the body, a JSON object, and return `parse` of it. A thread parses large bodies.

    Raises ApiError (408, 413, 415, 429, 503), InvalidRequestError (400), ClientDisconnect, and what `parse` raises.
    """
    body = await read_body(http.scope, http.receive, served.config.max_body_bytes)
    bounds = body_bounds(served.driver.model.max_model_len)
    if len(body) <= PARSE_INLINE_BYTES:
        return parse(parse_json(body, bounds))

    def work() -> T:
        start = time.perf_counter()
        fields = parse_json(body, bounds)
        rest_for(time.perf_counter() - start)
        return parse(fields)

    large.set(True)
    return await served.parsing.run(tenant_of(http.scope), partial(copy_context().run, work))


async def convert(served: Served, tenant: str, work: Callable[[], T]) -> T:
    """The result of `work` on the request that this task has read: in the same thread where its body was large."""
    return await served.parsing.run(tenant, partial(copy_context().run, work)) if large.get() else work()


async def read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytearray:
    """Raises ApiError and ClientDisconnect."""
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
        if b"expect" not in dict(scope["headers"]):  # else it waits to be asked for the body
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
            415, "Compressed bodies are not taken: leave Content-Encoding out.", code="unsupported_media_type"
        )
    length = headers.get(b"content-length", b"")
    if length.isdigit() and int(length[:20]) > max_bytes:
        raise _TooLargeError


async def _read_all(receive: Receive, max_bytes: int) -> bytearray:
    """Chunks go into one growing array: joining those of a large body would take the event loop 15 ms."""
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
    """Let a client finish sending, for a while: one whose connection closes before that never sees the answer."""
    with anyio.move_on_after(DISCARD_SECONDS):
        while (message := await receive())["type"] == "http.request" and message.get("more_body", False):
            pass


def parse_json(body: bytes | bytearray, bounds: JsonBounds) -> dict[str, Any]:
    """Strict UTF-8 JSON; an object. Duplicate keys, lone surrogates, NaN and Infinity are refused by name.

    NUL (\\u0000) is a character like any other and passes.
    """
    try:
        bounds.check(body)
    except JsonBoundsError as error:
        raise invalid(f"The body cannot be taken: {error}.", None, "invalid_json") from None
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
    # Look for one byte first: searching for several takes five times as long, and every search holds the GIL.
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
    """Parsers disagree about which of two equal keys counts, which is how a filter in front gets fooled."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise invalid(f"{field_path((name,))} is given twice.", field_path((name,)), "duplicate_parameter")
            seen.add(name)
    return fields


def _refuse_hostile_values(body: dict[str, Any]) -> None:
    """Find what JSON text can spell but no field may hold. Only bodies that show a trace of it are walked."""
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
