"""Server-sent events: streams of ready-made bytes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
from sse_starlette.sse import EventSourceResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from engine.outputs import RequestOutput
from server.config import ServerConfig
from server.errors import ApiError, error_body, to_api_error
from server.http.body import encode_json
from server.http.http_protocol import ABORT, CHUNKS, ChunkWriter
from server.intake.generation import Generation, PromptLogprobsHandler
from server.output.collect import while_connected
from server.output.stream_options import Usage
from server.output.timings import Timings
from server.protocol import GenerationRequest

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
STALL_SECONDS = 60.0  # a client that reads nothing for this time is cut off, or it would hold its KV blocks for ever
HEADERS = {"cache-control": "no-cache"}
# A request with this header gets a comment with the number of tokens so far after the events of each output. A proxy
# that takes the comments out knows how many tokens its client has.
COUNT_TOKENS = b"x-pageserve-count-tokens"


class ChunkTemplate:
    """The bytes around the one choice of a chunk, made once per stream.

    A chunk is `start` + index + fields of the endpoint + `end`. Joining these takes 0.5 us with all decisions; dumping
    a pydantic model takes 5.5 us.
    """

    def __init__(self, head: dict[str, Any], request: GenerationRequest) -> None:
        self._head = head
        self._include_usage, self._return_timings = request.include_usage, request.return_timings
        self.start = b"data: " + encode_json(head)[:-1] + b',"choices":[{"index":'
        self.end = b'}],"usage":null}\n\n' if request.include_usage else b"}]}\n\n"

    def ending(self, usage: Usage, timings: Timings) -> bytes:
        """The bytes after the last output: a chunk without choices, which has the usage and the timings if the client
        asks for them, and the end."""
        fields: dict[str, Any] = {"usage": usage()} if self._include_usage else {}
        if self._return_timings:
            fields["timings"] = timings()
        if not fields:
            return DONE
        return b"data: " + encode_json({**self._head, "choices": [], **fields}) + b"\n\n" + DONE


async def _nothing() -> AsyncIterator[bytes]:
    """For the content of EventSourceResponse, which EventStream sends by itself."""
    return
    yield


def _error_event(error: ApiError) -> bytes:
    return b"data: " + error_body(error) + b"\n\n"


class EventStream(EventSourceResponse):
    """Streams a generation that was admitted already; closes it whatever happens.

    `encode` turns one output of one prompt into the bytes of its chunks (empty: no chunk yet); `ending` returns the
    bytes after the last chunk. An error after the headers becomes an error event, and the stream ends without [DONE].
    `config` has the intervals of chunks and of keep-alive comments. `opening` is sent with the headers. `failure`
    writes the error in APIs with an error event of their own.
    `on_prompt_logprobs` gets the logprobs of a prompt before `encode` gets its first output. `text_frame`: the bytes
    before and after the text, as JSON, of a chunk that `encode` would make of new text alone, after the first chunk;
    None if its chunks have more.

    sse-starlette makes the head of the response. It would send the stream by five tasks in a task group, which takes
    250 us, and by a cancel scope and a debug call for each chunk, which cost more than all other work for a chunk
    (`python -m benchmarks.stream_chunks`). So this class sends by itself. Under our HTTP protocol, most chunks bypass
    the middleware, too: `take` writes them.
    """

    def __init__(
        self,
        generation: Generation,
        encode: Callable[[int, RequestOutput], bytes],
        ending: Callable[[], bytes],
        config: ServerConfig,
        *,
        opening: bytes = b"",
        failure: Callable[[ApiError], bytes] | None = None,
        on_prompt_logprobs: PromptLogprobsHandler | None = None,
        text_frame: tuple[bytes, bytes] | None = None,
    ) -> None:
        super().__init__(_nothing(), headers=HEADERS)
        del self.headers["connection"]  # HTTP/1.1 keeps connections without it; HTTP/1.0 and a draining server do not
        self._generation = generation
        generation.group(config.stream_interval)
        self._encode = encode
        self._ending = ending
        self._keep_alive_interval = config.keep_alive_interval
        self._opening = opening
        self._failure = failure or _error_event
        self._on_prompt_logprobs = on_prompt_logprobs
        self._text_frame = text_frame
        self._num_tokens: int | None = None  # sent so far, where the client asks for it
        self._last = b""  # the chunks of the last output of the only prompt
        self._comment: asyncio.Task[None] | None = None
        self._stalled = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._asgi_send = send
        if any(name == COUNT_TOKENS for name, _ in scope["headers"]):
            self._num_tokens = 0
        self._writer: ChunkWriter | None = scope.get("extensions", {}).get(CHUNKS, {}).get("writer")
        if self._writer is not None:
            self._generation.give_to(self)
        try:
            await while_connected(receive, self._stream)
        except ClientDisconnect:
            pass
        except TimeoutError:  # closing would wait until the client has read the buffered bytes
            scope.get("extensions", {}).get(ABORT, {}).get("function", lambda: None)()
        finally:
            self._generation.close()

    async def _stream(self) -> None:
        """Send the head, all chunks and the end. TimeoutError if the client stops reading."""
        self._streaming = asyncio.current_task()
        await self._asgi_send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._start_timer()
        try:
            if self._opening:
                await self._send(self._opening)
            await self._generation.read(self._send_output, self._on_prompt_logprobs)
            end = self._ending()
        except asyncio.CancelledError:
            if self._stalled:
                raise TimeoutError from None
            raise
        except Exception as error:
            end = self._failure(to_api_error(error))
        finally:
            self._timer.cancel()
            self._streaming = None  # the task refers to this object
            if self._comment is not None:
                self._comment.cancel()
        with anyio.fail_after(STALL_SECONDS):
            await self._asgi_send({"type": "http.response.body", "body": self._last + end, "more_body": False})

    def _start_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._keep_alive_interval, self._keep_alive)

    def _keep_alive(self) -> None:
        """Send a comment for proxies that close silent connections, unless the client has yet to read the last one."""
        if self._comment is None or self._comment.done():
            self._comment = asyncio.ensure_future(self._send_comment())
        self._start_timer()

    async def _send_comment(self) -> None:
        try:
            with anyio.fail_after(STALL_SECONDS):
                await self._send(KEEP_ALIVE)
        except TimeoutError:
            self._stalled = True
            if self._streaming is not None:
                self._streaming.cancel()
        except OSError:
            pass  # the client has left

    @property
    def ready(self) -> bool:
        """See OutputSink."""
        return self._writer is not None and self._writer.ready

    @property
    def takes_text(self) -> bool:
        """See OutputSink."""
        return self._text_frame is not None and self._num_tokens is None

    def take_text(self, text: str) -> None:
        """Write the chunk of new text at once. See OutputSink."""
        assert self._writer is not None and self._text_frame is not None
        if text:
            before, after = self._text_frame
            self._writer.write(before + encode_json(text) + after)

    def take(self, output: RequestOutput) -> None:
        """Write the chunks of an output of the only prompt at once. See OutputSink."""
        assert self._writer is not None
        self._generation.note(0, output)
        if body := self._chunks(0, output):
            self._writer.write(body)

    async def _send_output(self, prompt_index: int, output: RequestOutput) -> None:
        body = self._chunks(prompt_index, output)
        if output.finished and self._generation.num_prompts == 1:
            self._last = body  # goes with the end: one segment, and one wake-up of the client, in place of three
        elif body:
            await self._send(body)

    def _chunks(self, prompt_index: int, output: RequestOutput) -> bytes:
        body = self._encode(prompt_index, output)
        if self._num_tokens is None:
            return body
        self._num_tokens += sum(len(sample.token_ids) for sample in output.outputs)
        return b"%b: tokens %d\n\n" % (body, self._num_tokens) if body else body

    async def _send(self, body: bytes) -> None:
        await self._asgi_send({"type": "http.response.body", "body": body, "more_body": True})
