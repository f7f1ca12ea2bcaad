"""uvicorn's HTTP/1.1 protocol with the limits that uvicorn lacks.

The limits are a deadline, a size and a number for the headers, a number of connections, and a time for clients that do
not read. Without them, a client that never finishes its headers or never reads an answer would hold a connection and
the unsent bytes for ever, and one header of many megabytes, or a hundred thousand small ones, would be accepted.
"""

import asyncio
import fcntl
import sys
import termios
from collections import deque
from functools import partial
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from server.errors import ApiError, error_body, new_id
from server.http.connections import Connections

HEAD_SECONDS = 10.0  # from the start of the connection or the first byte of a head to the end of the headers
MAX_HEAD_BYTES = 64 << 10
MAX_HEADERS = 128
MAX_PIPELINED = 16  # requests of a connection; with more, reading pauses until some are answered

STALL_SECONDS = 60.0  # time in which a client must read a quarter of the unsent bytes, or STALL_BYTES
STALL_BYTES = 64 << 10

RECOGNISE = "pageserve.recognise"  # in scope["extensions"]: the client has shown a valid key
CHUNKS = "pageserve.chunks"  # in scope["extensions"]: the ChunkWriter of the response
ABORT = "pageserve.abort"  # in scope["extensions"]: cuts the connection without waiting for the client to read


_UPGRADE_HEADERS = (b"upgrade", b"http2-settings")


class _Refused(Exception):
    """Becomes an HttpParserError in the parser, for which uvicorn calls send_400_response."""


def _fault_of_head(version: str, headers: list[tuple[bytes, bytes]]) -> ApiError | None:
    """The error of a head that parses but that a server must refuse: RFC 9112, sections 3.2 (Host) and 6.1."""
    num_hosts = sum(name == b"host" for name, _ in headers)
    if num_hosts > 1 or (not num_hosts and version == "1.1"):
        return ApiError(400, "A request must have one Host header.", code="invalid_http")
    values = [value for name, value in headers if name == b"transfer-encoding"]
    codings = [coding.strip().lower() for value in values for coding in value.split(b",")]
    if any(coding != b"chunked" for coding in codings):
        message = "This server decodes no Transfer-Encoding but chunked: send the body without compression."
        return ApiError(501, message, code="unsupported_transfer_encoding")
    if codings and version == "1.0":
        return ApiError(400, "HTTP/1.0 has no Transfer-Encoding: send a Content-Length.", code="invalid_http")
    return None


def _head_too_large() -> ApiError:
    message = f"The URL and the headers may hold at most {MAX_HEADERS} fields and {MAX_HEAD_BYTES} bytes."
    return ApiError(431, message, code="headers_too_large")


def _held_by_the_kernel(transport: Any) -> int:
    """Bytes written to the socket that the client has not acknowledged; 0 if the system cannot tell."""
    try:
        answer = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
    except (OSError, AttributeError):
        return 0
    return int.from_bytes(answer, sys.byteorder)


def _end_with_the_connection(cycle: RequestResponseCycle) -> None:
    """Makes a response without a length end with the connection. HTTP/1.0 has no chunks (RFC 9112, section 6.1), but
    uvicorn would send chunks."""
    send = cycle.send
    has_length = False

    async def send_plain(message: Any) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
            cycle.chunked_encoding = None if has_length else False
        elif not has_length:
            cycle.expected_content_length = len(message.get("body", b""))  # uvicorn checks it against the body sent
        await send(message)

    cycle.send = send_plain  # type: ignore[method-assign]


def _without_upgrade(start: bytes, headers: list[tuple[bytes, bytes]]) -> bytes:
    """The head of a request with the first line `start` and without the headers that ask for another protocol."""
    lines = [start]
    for name, value in headers:
        if name == b"connection":
            options = [option for option in value.split(b",") if option.strip().lower() not in _UPGRADE_HEADERS]
            value = b",".join(options)
        if name not in _UPGRADE_HEADERS and (value or name != b"connection"):
            lines.append(b"%b: %b" % (name, value))
    return b"\r\n".join(lines) + b"\r\n\r\n"


class ChunkWriter:
    """Writes parts of a response that has begun, without waiting: what uvicorn's `send` does with them, without the
    coroutine of each middleware before it."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def ready(self) -> bool:
        """False if only `send` can write: the client has to read first, or has left, or the response has no chunks."""
        cycle = self._cycle
        return (
            cycle.response_started
            and cycle.chunked_encoding is True
            and not (cycle.flow.write_paused or cycle.disconnected or cycle.response_complete)
        )

    def write(self, body: bytes) -> None:
        """Write one chunk, not empty. Only while `ready`."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))


class LimitedHttpProtocol(HttpToolsProtocol):
    """One connection. It answers what it refuses with an error in OpenAI's envelope, then closes."""

    _deadline: asyncio.TimerHandle | None = None
    _in_head = False
    _fault: ApiError | None = None  # why a head that parses is refused
    _declines_upgrade = False
    _head_bytes = 0  # bytes received since the head began
    _header_bytes = 0  # bytes of complete headers; one read may bring a whole head over the limit

    def __init__(self, *arguments: Any, connections_held: Connections, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._held = connections_held
        self._unsent, self._unsent_since = 0, 0.0  # unsent bytes at the last progress, and its time

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._cycles: deque[RequestResponseCycle] = deque()  # requests without a complete response
        if self._held.open(self):
            return self._start_deadline()
        message = "This server has too many connections open. Try again in 1 s."
        error = ApiError(503, message, type="server_error", code="service_unavailable", headers={"retry-after": "1"})
        self._refuse(error)

    @property
    def address(self) -> str:
        return self.client[0] if self.client else ""

    @property
    def is_idle(self) -> bool:
        return all(cycle.response_complete for cycle in self._cycles)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unsent = 0  # the bytes that follow belong to another answer, or are new

    def cut(self) -> None:
        self.transport.abort()

    def cut_if_stalled(self) -> None:
        """Cuts the connection if the client has read almost nothing for STALL_SECONDS.

        While a response is running and writing is not paused, new bytes may have been added, so progress cannot be
        measured and the check starts anew.
        """
        unsent, now = self.transport.get_write_buffer_size(), self.loop.time()
        waits = unsent and (self.flow.write_paused or self.is_idle)
        unsent += _held_by_the_kernel(self.transport)  # up to megabytes, which a slow client reads first
        if not waits or unsent <= self._unsent - min(STALL_BYTES, self._unsent // 4) or not self._unsent:
            self._unsent, self._unsent_since = unsent if waits else 0, now
        elif now - self._unsent_since > STALL_SECONDS:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tells every unfinished request that the client left. uvicorn tells only the last request, which with
        pipelining is not the running one."""
        self._stop_deadline()
        self._held.close(self)
        super().connection_lost(exc)
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
            self._unlink(cycle)
        self._cycles.clear()
        self.cycle = None  # type: ignore[assignment]
        self.scope = {}  # type: ignore[typeddict-item]

    def on_response_complete(self) -> None:
        for cycle in self._cycles:
            if cycle.response_complete:
                self._unlink(cycle)
        super().on_response_complete()

    @staticmethod
    def _unlink(cycle: RequestResponseCycle) -> None:
        """Drop what refers back to the request and the connection, so that they are freed without the garbage
        collector."""
        cycle.scope["extensions"].clear()

    def data_received(self, data: bytes) -> None:
        try:
            self._unset_keepalive_if_required()
            self._parse(data)
        except httptools.HttpParserError:
            self.send_400_response("")
        self._head_bytes += len(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(_head_too_large())

    def _parse(self, data: bytes) -> None:
        """Feeds the parser and ignores Upgrade, as RFC 9110 (section 7.8) allows.

        After a head with Upgrade the parser expects another protocol, so a new parser gets the head without Upgrade.
        Java's own client sends Upgrade: h2c with every request.
        """
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._declines_upgrade:
                version = self.parser.get_http_version().encode()
                start = b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)
                head = _without_upgrade(start, self.headers)
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
                self._declines_upgrade = False
                self._parse(head + data[upgrade.args[0] :])

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._held.begin(self)
        self.scope["extensions"] = {
            ABORT: {"function": self.transport.abort},
            RECOGNISE: {"function": partial(self._held.recognise, self)},
        }
        self._in_head, self._head_bytes, self._header_bytes = True, 0, 0
        if self._deadline is None:
            self._start_deadline()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) >= MAX_HEAD_BYTES:  # also more than the URL parser accepts
            self._fault = _head_too_large()
            raise _Refused

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._header_bytes += len(name) + len(value)
        if len(self.headers) > MAX_HEADERS or len(self.url) + self._header_bytes > MAX_HEAD_BYTES:
            self._fault = _head_too_large()
            raise _Refused

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_deadline()
        self._fault = _fault_of_head(self.parser.get_http_version(), self.headers)
        if self._fault is not None:
            raise _Refused
        self._declines_upgrade = any(name == b"upgrade" for name, _ in self.headers) and self.parser.should_upgrade()
        if self._declines_upgrade:
            return
        before = self.cycle
        super().on_headers_complete()
        while self._cycles and self._cycles[0].response_complete:
            self._cycles.popleft()
        if self.cycle is not None and self.cycle is not before:
            self._cycles.append(self.cycle)
            self.cycle.scope["extensions"][CHUNKS] = {"writer": ChunkWriter(self.cycle)}
            if self.parser.get_http_version() == "1.0":
                _end_with_the_connection(self.cycle)
        if 1 < len(self._cycles) <= MAX_PIPELINED:
            self.flow.resume_reading()  # uvicorn paused it; a paused connection does not notice that the client left

    def on_message_complete(self) -> None:
        if not self._declines_upgrade:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._fault or ApiError(400, "This is not valid HTTP/1.1.", code="invalid_http"))

    def _refuse(self, error: ApiError) -> None:
        if any(cycle.response_started and not cycle.response_complete for cycle in self._cycles):
            return self.transport.abort()  # an error would become part of the running response
        body = error_body(error)
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n" % len(body)
        more = "".join(f"{name}: {value}\r\n" for name, value in error.headers.items()).encode()
        request_id = b"x-request-id: %b\r\n\r\n" % new_id("req-").encode()
        self.transport.write(STATUS_LINE[error.status] + head + more + request_id + body)
        self.transport.close()

    def _start_deadline(self) -> None:
        self._deadline = self.loop.call_later(HEAD_SECONDS, self._on_deadline)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_deadline(self) -> None:
        self._deadline = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._start_deadline()  # the head of a pipelined request: the response before it goes first
        elif not self.transport.is_closing():
            self._refuse(ApiError(408, f"The headers did not arrive within {HEAD_SECONDS:g} s.", code="timeout"))
