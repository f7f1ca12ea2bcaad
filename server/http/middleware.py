"""Pure ASGI middleware: a request id, the error envelope, API keys. Their cost per streamed chunk is one call."""

import asyncio
import logging
import re
import time
from collections import Counter

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.driver import Driver
from server.errors import ApiError, error_response, new_id, refusal_reason, speaks_anthropic
from server.http.api_keys import Account, ApiKeys
from server.http.body_budget import BodyBudget, CountedBody
from server.http.limits import RECOGNISE
from server.playground import PAGE_PATHS

logger = logging.getLogger(__name__)

REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
OPENAI_VERSION = "2020-10-01"  # of the HTTP API, as OpenAI's own answers name it; there is no other
CLIENT_LEFT = 499  # nginx's number; only metrics ever see it

# Open without a key: probes carry no secrets. So is the page at /: the same files for everybody, known by name, without
# which nobody could type a key into it.
PUBLIC_PATHS = frozenset({"/health", "/ready", *PAGE_PATHS})
# Paths that end in a name, as metrics label them: (start, what the name is).
NAMED = (("/v1/models/", "model"), ("/debug/requests/", "id"), ("/v1/responses/", "response_id"))


# 401s per second for all clients together: each costs the event loop 0.3 ms, and key guessers send thousands.
REFUSALS_PER_SECOND, REFUSALS_AT_ONCE = 200, 100
MAX_REFUSAL_SECONDS = 1.0  # the longest delay of a 401


class Pace:
    """Delays refusals to REFUSALS_PER_SECOND, after a burst (generic cell rate algorithm: ITU-T I.371)."""

    def __init__(self) -> None:
        self._due = 0.0  # when the next refusal is due, by time.monotonic()

    async def turn(self) -> None:
        """Wait until this refusal is due."""
        now, step = time.monotonic(), 1 / REFUSALS_PER_SECOND
        self._due = min(max(self._due + step, now - REFUSALS_AT_ONCE * step), now + MAX_REFUSAL_SECONDS)
        if self._due > now:
            await asyncio.sleep(self._due - now)


class RequestContext:
    """Outermost: x-request-id on every response, JSON for what nothing else caught, a count by route and status.

    What OpenAI answers has its other headers, too: the time until the answer, or its stream, began, in milliseconds.

    A client's own x-request-id is only echoed: the engine's ids are made here, so that two clients never share one.
    While the server drains, every response asks for the connection to be closed.
    """

    def __init__(
        self, app: ASGIApp, driver: Driver, counts: Counter[tuple[str, int]], known_paths: frozenset[str]
    ) -> None:
        self._app, self._driver, self._counts, self._known_paths = app, driver, counts, known_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        request_id = given if REQUEST_ID.fullmatch(given) else new_id("req-").encode()
        started, received = False, time.perf_counter()

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if not started:
                started = True
                self._start(scope, message, request_id, time.perf_counter() - received)
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            if started:  # the status is out: all that is left is to cut the connection, which uvicorn does
                raise
            logger.error("request %s failed", request_id.decode())
            await error_response(error, scope)(scope, receive, send_with_id)

    def _start(self, scope: Scope, message: Message, request_id: bytes, seconds: float) -> None:
        self._counts[_route(scope["path"], self._known_paths), message["status"]] += 1
        headers = MutableHeaders(raw=message["headers"])
        headers["x-request-id"] = request_id.decode()
        if speaks_anthropic(scope):
            headers["request-id"] = request_id.decode()  # where Anthropic's clients look for it
        elif scope["path"].startswith("/v1/"):
            headers["openai-processing-ms"] = str(round(seconds * 1000))
            headers["openai-version"] = OPENAI_VERSION
        if self._driver.phase in ("draining", "stopped"):
            headers["connection"] = "close"


def _route(path: str, known: frozenset[str]) -> str:
    """A label of few values, whatever paths clients make up."""
    if path in PAGE_PATHS:
        return "/"
    if path in known:
        return path
    return next((f"{start}{{{name}}}" for start, name in NAMED if path.startswith(start)), "other")


class Authentication:
    """Bearer keys, and their limits. Without a valid key every path but the public ones is a 401, unknown ones, too.

    Keys are compared by their SHA-256 digests, all of them, in constant time. The path is the one that the router will
    see, never rebuilt from a header. What is asked for with POST counts against the limits of the key; where there are
    no keys, all callers share one account.
    """

    def __init__(
        self, app: ASGIApp, keys: ApiKeys, public_paths: frozenset[str], refused: Counter[str], budget: BodyBudget
    ) -> None:
        self._app, self._keys, self._public_paths, self._refused = app, keys, public_paths, refused
        self._budget = budget
        self._pace = Pace()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._public_paths:
            return await self._app(scope, receive, send)
        account = self._find(scope) if self._keys else self._keys.anyone
        if account is None:
            self._refused["unauthorized"] += 1
            await self._pace.turn()
            return await error_response(_unauthorized(scope), scope)(scope, receive, send)
        scope.get("extensions", {}).get(RECOGNISE, {}).get("function", lambda: None)()
        state = scope.setdefault("state", {})
        state["account"] = account
        if self._keys:
            state["tenant"] = account.tenant
        if scope["method"] == "POST":
            await self._limited(account, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _limited(self, account: Account, scope: Scope, receive: Receive, send: Send) -> None:
        limiter = account.limiter

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *limiter.headers()]
            await send(message)

        try:
            begun = limiter.begin()
        except ApiError as error:
            self._refused[refusal_reason(error)] += 1
            return await error_response(error, scope)(scope, receive, send_with_limits)
        body = CountedBody(self._budget, account.tenant, receive)
        try:
            await self._app(scope, body, send_with_limits if limiter.shown else send)
        finally:
            body.give_back()
            limiter.end(begun)

    def _find(self, scope: Scope) -> Account | None:
        headers = dict(reversed(scope["headers"]))  # of those sent twice the first counts
        header = headers.get(b"authorization", b"")
        if not header and speaks_anthropic(scope):
            header = b"bearer " + headers.get(b"x-api-key", b"")  # Anthropic's clients know no other
        scheme, _, key = header.partition(b" ")
        found = self._keys.find(key.strip())
        return found if scheme.lower() == b"bearer" else None


def _unauthorized(scope: Scope) -> ApiError:
    """Its first words are OpenAI's: litellm tells a wrong key from other mistakes by them."""
    has_any = any(name in (b"authorization", b"x-api-key") for name, _ in scope["headers"])
    what = "send a valid one" if has_any else "there is none. Send one"
    return ApiError(
        401,
        f"Incorrect API key provided: {what} as Authorization: Bearer KEY.",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )
