"""Server-sent events: sse-starlette's EventSourceResponse, fed with ready-made bytes."""

from collections.abc import AsyncIterator, Callable
from typing import Any

from sse_starlette.sse import AppStatus, EventSourceResponse, SendTimeoutError
from starlette.types import Receive, Scope, Send

from engine.outputs import RequestOutput
from server.errors import ApiError, error_body, to_api_error
from server.http.body import encode_json
from server.http.limits import ABORT
from server.intake.generation import Generation

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
STALL_SECONDS = 60.0  # a client that reads nothing for so long is let go, or it would hold its KV blocks for ever
HEADERS = {"cache-control": "no-cache"}

# A signal must not cancel streams: the drain lets them finish, and whoever ends the server ends them.
AppStatus.enable_automatic_graceful_drain = False


class ChunkTemplate:
    """The bytes around the one choice of a chunk, made once per stream.

    A chunk is `start` + index + what the endpoint writes + `end`; with everything that decides it, that takes 0.5 us,
    where dumping a pydantic model takes 5.5.
    """

    def __init__(self, head: dict[str, Any], include_usage: bool) -> None:
        self._head = head
        self.start = b"data: " + encode_json(head)[:-1] + b',"choices":[{"index":'
        self.end = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"

    def last(self, **fields: Any) -> bytes:
        """A chunk without choices, for what is known when all of them have ended; nothing where all `fields` are None.

        `usage` comes so when stream_options.include_usage is set.
        """
        known = {name: value for name, value in fields.items() if value is not None}
        return b"data: " + encode_json({**self._head, "choices": [], **known}) + b"\n\n" if known else b""


def _error_event(error: ApiError) -> bytes:
    return b"data: " + error_body(error) + b"\n\n"


class EventStream(EventSourceResponse):
    """Streams a generation that was admitted already; closes it whatever happens.

    `encode` turns one output of one prompt into the bytes of its chunks (empty: nothing to say yet); `ending` gives
    the bytes after the last one. An error after the headers is an error event, and then the end without [DONE].
    `opening` is sent with the headers; `failure` writes the error of APIs that have an event of their own for it.

    sse-starlette sends the comments, notices a client that leaves and ends streams at a forced shutdown. Chunks do not
    pass it: its cancel scope and debug call around every send cost more than everything else that a chunk needs
    (`python -m benchmarks.stream_chunks`). So the iterator that it reads sends them itself and yields the end alone.
    """

    def __init__(
        self,
        generation: Generation,
        encode: Callable[[int, RequestOutput], bytes],
        ending: Callable[[], bytes],
        keep_alive_interval: float,
        *,
        opening: bytes = b"",
        failure: Callable[[ApiError], bytes] | None = None,
    ) -> None:
        super().__init__(
            self._stream(),
            headers=HEADERS,
            ping=keep_alive_interval,
            ping_message_factory=lambda: KEEP_ALIVE,  # type: ignore[arg-type, return-value]  # bytes go as they are
            send_timeout=STALL_SECONDS,
        )
        del self.headers["connection"]  # HTTP/1.1 keeps it anyway, HTTP/1.0 and a server that drains do not
        self._generation = generation
        self._encode = encode
        self._ending = ending
        self._opening = opening
        self._failure = failure or _error_event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._asgi_send = send
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:  # closing would wait until the client has read what is buffered
            scope.get("extensions", {}).get(ABORT, {}).get("function", lambda: None)()
        finally:
            self._generation.close()

    async def _stream(self) -> AsyncIterator[bytes]:
        """Send all chunks; yields the bytes that end the stream."""
        try:
            if self._opening:
                await self._send(self._opening)
            await self._generation.read(self._send_output)
        except Exception as error:
            yield self._failure(to_api_error(error))
        else:
            yield self._ending()

    async def _send_output(self, prompt_index: int, output: RequestOutput) -> None:
        if body := self._encode(prompt_index, output):
            await self._send(body)

    async def _send(self, body: bytes) -> None:
        await self._asgi_send({"type": "http.response.body", "body": body, "more_body": True})
