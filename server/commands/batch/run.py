"""Sends the requests of a batch, a number of them concurrently, and writes each answer when it arrives."""

import asyncio
import contextlib
import dataclasses
import json
import logging
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any, TextIO

import httpx
from tqdm import tqdm

from engine.config import EngineConfig
from server.app import create_app_of
from server.commands.batch.files import BatchRequest, answer, no_answer, succeeded
from server.config import ServerConfig
from server.serve import host_models, load_models

ATTEMPTS = 8  # per request, if the server refuses it for now or the connection breaks
FIRST_DELAY, LONGEST_DELAY = 0.5, 60.0  # seconds between two attempts, if the server sends no Retry-After
RETRIED = frozenset({408, 429, 500, 502, 503, 504})  # unless the server sends x-should-retry: false
TIMEOUT = httpx.Timeout(10.0, read=3600.0, pool=None)  # seconds; a batch may wait long
# Settings for a server with several clients; a shared file or the environment may hold them. A batch is one client.
WITHOUT_LIMITS: dict[str, Any] = {
    "api_key": (),
    "api_key_file": None,
    "requests_per_minute": None,
    "max_concurrent_requests": None,
    "tokens_per_minute": None,
    "max_queued_requests": 1_000_000,
    "max_queued_tokens": None,
}

logger = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def remote(base_url: str, api_key: str | None, concurrency: int) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a running server; `base_url` with or without /v1."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    root = base_url.rstrip("/").removesuffix("/v1")
    async with httpx.AsyncClient(base_url=root, headers=headers, timeout=TIMEOUT, limits=limits) as client:
        yield client


@contextlib.asynccontextmanager
async def local(engine_config: EngineConfig, server_config: ServerConfig) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the models in this process: the server's own routes, without a port, API keys and their limits."""
    config = dataclasses.replace(server_config, **WITHOUT_LIMITS)
    hosted = host_models(engine_config, config)
    try:
        await load_models(hosted)
        transport = httpx.ASGITransport(create_app_of(hosted, config), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://pageserve", timeout=None) as client:
            yield client
    finally:
        await asyncio.gather(*(model.driver.stop() for model in hosted))


class Batch:
    """Concurrent tasks send `requests` and write each answer to `output` as one whole line."""

    def __init__(self, client: httpx.AsyncClient, requests: Iterator[BatchRequest], output: TextIO, bar: "tqdm[Any]"):
        self.num_failed = 0
        self._client, self._requests, self._output, self._bar = client, requests, output, bar
        self._shown: set[str] = set()

    async def run(self, concurrency: int) -> None:
        tasks = [asyncio.create_task(self._work()) for _ in range(concurrency)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self) -> None:
        for request in self._requests:  # all tasks share one iterator: an idle task takes the next line
            line = await self._ask(request)
            self.num_failed += not succeeded(line)
            self._output.write(json.dumps(line, ensure_ascii=False) + "\n")
            self._output.flush()
            self._bar.update()

    async def _ask(self, request: BatchRequest) -> dict[str, Any]:
        """Send a request, with at most ATTEMPTS attempts; returns its line of the output."""
        line: dict[str, Any] = {}
        for attempt in range(ATTEMPTS):
            delay = min(LONGEST_DELAY, FIRST_DELAY * 2**attempt)
            try:
                response = await self._client.post(request.url, json=request.body)
            except httpx.TransportError as error:
                line = no_answer(request, "no_response", f"{type(error).__name__}: {error}")
                self._show_once(f"no answer from the server ({error}): each request is tried {ATTEMPTS} times")
            else:
                line = _line_of(request, response)
                if response.status_code not in RETRIED or response.headers.get("x-should-retry") == "false":
                    return line
                delay = _retry_after(response, delay)
            if attempt < ATTEMPTS - 1:
                logger.info("custom_id %s: attempt %d failed, again in %g s", request.custom_id, attempt + 1, delay)
                await asyncio.sleep(delay)
        return line

    def _show_once(self, message: str) -> None:
        """Print a message above the progress bar, once: it explains why the bar does not move."""
        if message not in self._shown:
            self._shown.add(message)
            self._bar.write(message, file=sys.stderr)


def _line_of(request: BatchRequest, response: httpx.Response) -> dict[str, Any]:
    try:
        body = response.json()
    except ValueError:
        return no_answer(request, "invalid_response", f"status {response.status_code} with a body that is not JSON")
    return answer(request, response.status_code, response.headers.get("x-request-id", ""), body)


def _retry_after(response: httpx.Response, default: float) -> float:
    """The seconds in the Retry-After header, at most LONGEST_DELAY. A date in the header counts as `default`."""
    try:
        return min(LONGEST_DELAY, max(0.0, float(response.headers["retry-after"])))
    except (KeyError, ValueError):
        return default
