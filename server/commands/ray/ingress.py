"""Ingress: the ASGI app in front of the replicas. It passes requests to the replica that Ray's router chooses.

Ray Serve chooses the replica and counts the request; the bytes pass over HTTP between ingress and replica, because
Ray's own streams cost more per chunk than the whole server. A request whose replica dies is sent again to another one
unless the client has a token of it. A stream of which tokens were passed on ends with an error event that counts them.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from engine.errors import UnavailableError
from server.commands.ray.counted_stream import CountedStream
from server.commands.ray.prefixes import prefix_hashes
from server.errors import ApiError, error_response
from server.output.collect import while_connected
from server.output.sse import COUNT_TOKENS

logger = logging.getLogger(__name__)

TARGETS = "/metrics/targets"
WAIT_SECONDS = 60.0  # how long a request waits for a replica that accepts it
PROBE_SECONDS = 5.0  # the same for other requests than POST, such as probes
KEEP_ALIVE_SECONDS = 60.0  # shorter than the server's
HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"proxy-connection"}
)
FROM_SERVE = frozenset({b"date", b"server", b"x-request-id"})  # headers that Ray Serve adds to every answer
OURS = HOP_BY_HOP | {b"host", b"content-length", b"expect"}


class _Lost(Exception):
    """The replica ended, or refused the request, before it was done. `answer`: its refusal."""

    def __init__(self, answer: list[Message] | None = None) -> None:
        super().__init__()
        self.answer = answer


class Ingress:
    """`replicas` is the DeploymentHandle of the replicas."""

    def __init__(self, replicas: Any, max_body_bytes: int) -> None:
        self._replicas, self._max_body_bytes = replicas, max_body_bytes
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        started = False

        async def send_once_started(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            body = await _read(receive, self._max_body_bytes)
            if body is None:
                return
            work = self._targets if scope["path"] == TARGETS else self._answer
            await while_connected(receive, lambda: work(scope, body, send_once_started))
        except ClientDisconnect:
            pass
        except Exception as error:
            if started:
                raise
            await error_response(error, scope)(scope, receive, send)

    async def _answer(self, scope: Scope, body: bytes, send: Send) -> None:
        _refuse_one_replicas_own(scope["path"])
        hashes = prefix_hashes(body, _header(scope, b"authorization")) if scope["method"] == "POST" else []
        exchange = _Exchange(scope, body, send)
        failed: list[str] = []
        refusal: list[Message] | None = None
        deadline = time.monotonic() + (WAIT_SECONDS if scope["method"] == "POST" else PROBE_SECONDS)
        while True:
            try:
                async with self._chosen(hashes, tuple(failed), deadline) as chosen:
                    failed.append(chosen.replica_metadata["address"])
                    return await exchange.run(self._client(), failed[-1], chosen.replica_id)
            except asyncio.TimeoutError:
                if refusal is not None:
                    return await exchange.relay(refusal)
                if exchange.headers_sent:
                    return await exchange.fail()
                raise UnavailableError("No replica is ready. Try again shortly.") from None
            except _Lost as lost:
                if exchange.stream.num_tokens:
                    return await exchange.fail()
                exchange.stream.restart()
                logger.warning("%s is sent again: %s did not answer it", scope["path"], failed[-1])
                if lost.answer is not None:  # a refusal, 503: if no other replica accepts the request, this is final
                    refusal, deadline = lost.answer, min(deadline, time.monotonic() + PROBE_SECONDS)

    @contextlib.asynccontextmanager
    async def _chosen(self, hashes: list[int], failed: tuple[str, ...], deadline: float) -> AsyncIterator[Any]:
        """The replica that Ray's router chooses; Ray counts the request until the context ends."""
        choice = self._replicas.choose_replica(hashes=hashes, failed=failed)
        selection = await asyncio.wait_for(choice.__aenter__(), max(0.0, deadline - time.monotonic()))
        try:
            yield selection
        finally:
            await choice.__aexit__(None, None, None)

    async def _targets(self, scope: Scope, body: bytes, send: Send) -> None:
        """Every replica's address, as Prometheus' http_sd reads it, for clients whom a replica lets read /metrics."""
        addresses = await self._replicas.broadcast("address").results_async()
        for address in addresses[:1]:
            headers = {"authorization": _header(scope, b"authorization")}
            async with self._client().get(f"http://{address}/metrics", headers=headers) as response:
                if response.status != 200:
                    raise ApiError(response.status, "GET /metrics is not allowed with this key.", code="unauthorized")
        content = json.dumps([{"targets": sorted(addresses), "labels": {"job": "pageserve"}}]).encode()
        head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": content})

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS),
                timeout=aiohttp.ClientTimeout(total=None),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=("user-agent", "accept", "accept-encoding", "content-type"),
            )
        return self._session


class _Exchange:
    """One request and its answer, on one replica after the other."""

    def __init__(self, scope: Scope, body: bytes, send: Send) -> None:
        query = b"?" + scope["query_string"] if scope["query_string"] else b""
        self._target = (scope.get("raw_path") or scope["path"].encode()).partition(b"?")[0] + query
        headers = [(name, value) for name, value in scope["headers"] if name.lower() not in OURS]
        headers.append((COUNT_TOKENS, b"1"))
        self._headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
        self._method, self._path, self._body, self._send = scope["method"], scope["path"], body, send
        self.stream = CountedStream()
        self.headers_sent = False

    async def run(self, client: aiohttp.ClientSession, address: str, replica: str) -> None:
        """Pass the request on and the answer back. Raises _Lost if the answer ends early, or is a 503."""
        url = f"http://{address}{self._target.decode('latin-1')}"
        try:
            async with client.request(
                self._method, _raw(url), headers=self._headers, data=self._body or None, allow_redirects=False
            ) as response:
                try:
                    await self._pass_back(response, replica)
                finally:
                    if not response.content.at_eof():
                        response.close()  # not back to the pool: the server sees that its client has left
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise _Lost from error

    async def _pass_back(self, response: aiohttp.ClientResponse, replica: str) -> None:
        given = [(name.lower(), value) for name, value in response.raw_headers]
        raw = [(name, value) for name, value in given if name not in HOP_BY_HOP | FROM_SERVE]
        raw.append((b"x-pageserve-replica", replica.encode()))
        start = {"type": "http.response.start", "status": response.status, "headers": raw}
        if response.content_type == "text/event-stream":
            return await self._pass_events(start, response.content)
        content = await response.read()
        answer: list[Message] = [start, {"type": "http.response.body", "body": content}]
        if response.status == 503 and self._method == "POST":  # not accepted: another replica may
            raise _Lost(answer)
        await self.relay(answer)

    async def _pass_events(self, start: Message, content: aiohttp.StreamReader) -> None:
        if not self.headers_sent:
            self.headers_sent = True
            await self._send(start)
        stream, send = self.stream, self._send
        async for data in content.iter_any():
            if passed := stream.feed(data):
                await send({"type": "http.response.body", "body": passed, "more_body": True})
        await send({"type": "http.response.body", "body": stream.end()})

    async def relay(self, answer: list[Message]) -> None:
        """Send a whole answer. After the headers of a stream, its body becomes the last event."""
        if self.headers_sent:
            answer = [{"type": "http.response.body", "body": b"data: " + answer[1]["body"] + b"\n\n"}]
        for message in answer:
            await self._send(message)

    async def fail(self) -> None:
        """End a stream whose replica has died."""
        await self._send({"type": "http.response.body", "body": self.stream.failure(self._path)})


# Ends of the paths of routes that change the state of one server.
CHANGING = ("/sleep", "/wake", "/wake_up", "/load_lora_adapter", "/unload_lora_adapter")


def _refuse_one_replicas_own(path: str) -> None:
    """Raises ApiError 404 for routes that would show or change one replica of many."""
    if path == "/metrics":
        text = f"Each replica has its own /metrics: GET {TARGETS} lists their addresses for Prometheus (http_sd)."
    elif path.endswith(CHANGING):
        text = "This route changes one replica, and this address has several: change the settings of `pageserve ray`."
    else:
        return
    raise ApiError(404, text, code="not_found")


def _raw(url: str) -> Any:
    """The URL as it is: aiohttp would normalise the path."""
    from yarl import URL

    return URL(url, encoded=True)


def _header(scope: Scope, name: bytes) -> str:
    value: bytes = next((value for key, value in scope["headers"] if key == name), b"")
    return value.decode("latin-1")


async def _read(receive: Receive, most: int) -> bytes | None:
    """The whole body; None if the client leaves. ApiError 413 for a larger body than `most` bytes."""
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > most:
            raise ApiError(413, f"The body is larger than {most} bytes (--max-body-bytes).", code="request_too_large")
        if not message.get("more_body", False):
            return b"".join(parts)
