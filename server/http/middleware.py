"""Pure ASGI middleware: the request id, the error envelope, API keys. A streamed chunk costs one call here."""

import asyncio
import logging
import re
import time
from collections import Counter, deque
from collections.abc import Sequence

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.errors import STOPPED, UnavailableError
from engine.replicas.engine import Engine
from server.errors import ApiError, error_response, new_id, refusal_reason, speaks_anthropic
from server.http.api_keys import Account, ApiKeys
from server.http.body_budget import BodyBudget, CountedBody
from server.http.caller import Caller
from server.http.http_protocol import RECOGNISE
from server.playground import PAGE_PATHS

logger = logging.getLogger(__name__)

REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
OPENAI_VERSION = "2020-10-01"  # the only version of the HTTP API that OpenAI's answers name
LEAVING_PHASES = ("draining", "stopped")
CLIENT_LEFT = 499  # nginx's number; it appears in metrics only

# These paths need no key. Probes carry no secrets; the page at / is the same files for all, and users type their key
# into it.
PUBLIC_PATHS = frozenset({"/health", "/ready", *PAGE_PATHS})
# Paths that end in a name, as metrics label them: (start, label of the name).
NAMED = (("/v1/models/", "model"), ("/debug/requests/", "id"), ("/v1/responses/", "response_id"))

# 401s per second for all clients together: a 401 costs the event loop 0.3 ms, and key guessers send thousands.
REFUSALS_PER_SECOND, REFUSALS_AT_ONCE = 200, 100
MAX_REFUSAL_SECONDS = 1.0  # the longest delay of a 401


class Pace:
    """Delays refusals to REFUSALS_PER_SECOND, after a burst (generic cell rate algorithm: ITU-T I.371)."""

    def __init__(self) -> None:
        self._due = 0.0  # time of the next refusal, by time.monotonic()

    async def turn(self) -> None:
        """Wait until this refusal is due."""
        now, step = time.monotonic(), 1 / REFUSALS_PER_SECOND
        self._due = min(max(self._due + step, now - REFUSALS_AT_ONCE * step), now + MAX_REFUSAL_SECONDS)
        if self._due > now:
            await asyncio.sleep(self._due - now)


class Turns:
    """Lets one request begin in each turn of the event loop, in the order of arrival. Reading and admitting a request
    takes the loop about a millisecond, so tokens of live streams would wait a second for a thousand that come at
    once."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._taken = False  # in this turn of the event loop

    async def wait(self) -> None:
        """Return when this request may begin: at once if it is alone."""
        loop = asyncio.get_running_loop()
        if self._taken:
            turn = loop.create_future()
            self._waiting.append(turn)
            await turn
        else:
            self._taken = True
            loop.call_soon(self._next)

    def _next(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # a client that left has cancelled it
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._next)
                return
        self._taken = False


class RequestContext:
    """The outermost middleware: x-request-id on every response, a JSON error for uncaught exceptions, a count by route
    and status.

    Responses of OpenAI's routes also have OpenAI's headers: openai-processing-ms is the time in milliseconds until the
    response, or its stream, began. A client's own x-request-id is only echoed: the engine's ids are made here, so two
    clients never share an id. While the server drains, every response asks the client to close the connection.
    """

    def __init__(
        self, app: ASGIApp, drivers: Sequence[Engine], counts: Counter[tuple[str, int]], known_paths: frozenset[str]
    ) -> None:
        """`drivers`: those of all models, which drain together."""
        self._app, self._drivers, self._counts, self._known_paths = app, drivers, counts, known_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        request_id = given if REQUEST_ID.fullmatch(given) else new_id("req-").encode()
        anthropic = speaks_anthropic(scope)
        started, received = False, time.perf_counter()

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if not started:
                started = True
                self._start(scope["path"], message, request_id, anthropic, time.perf_counter() - received)
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except asyncio.CancelledError:  # the server ends
            if started:
                raise
            # uvicorn would answer 500, after which no proxy asks another server.
            await error_response(UnavailableError(STOPPED), scope)(scope, receive, send_with_id)
        except Exception as error:
            if started:  # the status is sent: uvicorn can only cut the connection
                raise
            logger.error("request %s failed", request_id.decode())
            await error_response(error, scope)(scope, receive, send_with_id)

    def _start(self, path: str, message: Message, request_id: bytes, anthropic: bool, seconds: float) -> None:
        self._counts[_route(path, self._known_paths), message["status"]] += 1
        headers = MutableHeaders(raw=message["headers"])
        headers["x-request-id"] = request_id.decode()
        if anthropic:
            headers["request-id"] = request_id.decode()  # Anthropic's clients read this header
        elif path.startswith("/v1/"):
            headers["openai-processing-ms"] = str(round(seconds * 1000))
            headers["openai-version"] = OPENAI_VERSION
        if all(driver.phase in LEAVING_PHASES for driver in self._drivers):
            headers["connection"] = "close"


def _route(path: str, known: frozenset[str]) -> str:
    """The metrics label of a path. Paths that clients make up share one label."""
    if path in PAGE_PATHS:
        return "/"
    if path in known:
        return path
    return next((f"{start}{{{name}}}" for start, name in NAMED if path.startswith(start)), "other")


class Authentication:
    """Finds the Caller of a request by its bearer key and holds it to the key's limits.

    Without a valid key all paths but the public ones answer 401, unknown paths too. Keys are compared by their SHA-256
    digests, all of them, in constant time. The path is the router's, never rebuilt from a header. POST requests count
    against the limits of the key; without keys, all callers share one account. Handlers read `http.state.caller`.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys,
        public_paths: frozenset[str],
        refused: Counter[str],
        budget: BodyBudget,
        traced: bool,
    ) -> None:
        self._app, self._keys, self._public_paths, self._refused = app, keys, public_paths, refused
        self._budget, self._traced = budget, traced
        self._pace = Pace()
        self._turns = Turns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._public_paths:
            return await self._app(scope, receive, send)
        account = self._find(scope) if self._keys else self._keys.anyone
        if account is None:
            self._refused["unauthorized"] += 1
            await self._pace.turn()
            return await error_response(_unauthorized(scope), scope)(scope, receive, send)
        caller = account.caller(trace_parent_of(scope) if self._traced else "")
        scope.setdefault("state", {})["caller"] = caller
        scope.get("extensions", {}).get(RECOGNISE, {}).get("function", lambda: None)()
        if scope["method"] == "POST":
            await self._limited(caller, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _limited(self, caller: Caller, scope: Scope, receive: Receive, send: Send) -> None:
        await self._turns.wait()
        limiter = caller.limiter

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *limiter.headers()]
            await send(message)

        try:
            begun, shown = limiter.begin(), limiter.shown
        except ApiError as error:
            self._refused[refusal_reason(error)] += 1
            return await error_response(error, scope)(scope, receive, send_with_limits)
        body = CountedBody(self._budget, caller.tenant, receive)
        try:
            await self._app(scope, body, send_with_limits if shown else send)
        finally:
            body.give_back()
            limiter.end(begun)

    def _find(self, scope: Scope) -> Account | None:
        headers = dict(reversed(scope["headers"]))  # the first of two equal headers counts
        header = headers.get(b"authorization", b"")
        if not header and speaks_anthropic(scope):
            header = b"bearer " + headers.get(b"x-api-key", b"")  # the header of Anthropic's clients
        scheme, _, key = header.partition(b" ")
        found = self._keys.find(key.strip())
        return found if scheme.lower() == b"bearer" else None


def trace_parent_of(scope: Scope) -> str:
    """The client's `traceparent` header (W3C Trace Context), empty without one."""
    header: bytes = next((value for name, value in scope["headers"] if name == b"traceparent"), b"")
    return header.decode("latin-1")


def _unauthorized(scope: Scope) -> ApiError:
    """A 401. The first words are OpenAI's: by them litellm tells a wrong key from other mistakes."""
    has_any = any(name in (b"authorization", b"x-api-key") for name, _ in scope["headers"])
    what = "send a valid one" if has_any else "the request has none. Send one"
    header = "x-api-key: KEY" if speaks_anthropic(scope) else "Authorization: Bearer KEY"
    return ApiError(
        401,
        f"Incorrect API key provided: {what} as {header}.",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )
