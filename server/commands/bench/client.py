"""A cheap HTTP client: on a small machine it shares the cores with the server that it measures.

During a run it only records arrivals: a segment costs one clock reading and one list append, and the client finds the
end of a response by its last bytes. Events, JSON and statistics are read after the run
(server/commands/bench/answers.py).
"""

import asyncio
import ssl
import time
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

from server.commands.bench.decoding import ProtocolError, ResponseDecoder

_LAST_CHUNK = b"0\r\n\r\n"


@dataclass
class Exchange:
    """One request. `segments`: (arrival in seconds of time.perf_counter, bytes). `error`: the reason of a failure."""

    started: float
    segments: list[tuple[float, bytes]] = field(default_factory=list)
    error: str | None = None


@dataclass(frozen=True)
class Endpoint:
    """A server's address, such as "http://127.0.0.1:8000/v1", and its API key, if any."""

    base_url: str
    api_key: str | None = None

    def __post_init__(self) -> None:
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{self.base_url!r} is not a URL such as http://127.0.0.1:8000/v1")

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.base_url)
        return cast(str, parts.hostname), parts.port or (443 if parts.scheme == "https" else 80)

    @property
    def tls(self) -> ssl.SSLContext | None:
        return ssl.create_default_context() if self.base_url.startswith("https:") else None

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The bytes of one request. Callers build them before a run, not during it."""
        parts = urlsplit(self.base_url)
        lines = [f"{method} {parts.path.rstrip('/')}{path} HTTP/1.1", f"Host: {parts.netloc}"]
        if self.api_key:
            lines.append(f"Authorization: Bearer {self.api_key}")
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}", "", ""]
        return "\r\n".join(lines).encode("latin-1") + body


class Connection:
    """One keep-alive connection; opens at the first request, and again after the server closed it."""

    def __init__(self, endpoint: Endpoint, timeout: float) -> None:
        self._endpoint = endpoint
        self._timeout = timeout
        self._protocol: _Protocol | None = None

    async def exchange(self, request: bytes) -> Exchange:
        """Send a request and wait for the whole response. A network error does not raise; it is in the Exchange."""
        exchange = Exchange(time.perf_counter())
        try:
            await asyncio.wait_for(self._exchange(request, exchange), self._timeout)
        except (asyncio.TimeoutError, TimeoutError):
            exchange.error = f"no complete response in {self._timeout:g} s"
            self.close()
        except OSError as error:
            exchange.error = f"cannot connect: {error}"
        return exchange

    def close(self) -> None:
        if self._protocol is not None:
            self._protocol.close()
            self._protocol = None

    async def _exchange(self, request: bytes, exchange: Exchange) -> None:
        if self._protocol is None or self._protocol.closed:
            host, port = self._endpoint.address
            loop = asyncio.get_running_loop()
            _, self._protocol = await loop.create_connection(_Protocol, host, port, ssl=self._endpoint.tls)
        await self._protocol.send(request, exchange)


class _Protocol(asyncio.Protocol):
    def __init__(self) -> None:
        self.closed = False
        self._chunked = False
        self._exchange: Exchange | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def send(self, request: bytes, exchange: Exchange) -> asyncio.Future[None]:
        self._exchange, self._chunked = exchange, False
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._done

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None:
            self.close()  # bytes without a request: the connection is out of step
            return
        exchange.segments.append((time.perf_counter(), data))
        # If the terminator is split over two segments, the last segment is shorter than the terminator.
        if not self._chunked or len(data) < len(_LAST_CHUNK) or data.endswith(_LAST_CHUNK):
            self._look_for_end(exchange)

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        if self._exchange is not None:
            self._look_for_end(self._exchange, closed=True)

    def close(self) -> None:
        self.closed, self._exchange = True, None  # later bytes are ignored
        self._transport.close()

    def _look_for_end(self, exchange: Exchange, closed: bool = False) -> None:
        decoder = ResponseDecoder()
        try:
            for _, data in exchange.segments:
                decoder.feed(data)
        except ProtocolError as error:
            self._finish(exchange, str(error))
            return
        if closed:
            decoder.close()
        self._chunked = decoder.chunked
        if decoder.complete:
            self._finish(exchange, None, decoder.keep_alive)
        elif closed:
            self._finish(exchange, "the server closed the connection before the end of its response")

    def _finish(self, exchange: Exchange, error: str | None, keep_alive: bool = False) -> None:
        exchange.error = error
        self._exchange = None
        if not keep_alive:
            self.close()
        if not self._done.done():
            self._done.set_result(None)
