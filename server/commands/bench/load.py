"""Runs a workload against one server."""

import asyncio
import contextlib
import json
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from server.commands.bench.answers import Answer, BadAnswer, completion_body, read_answer, response
from server.commands.bench.client import Connection, Endpoint, Exchange
from server.commands.bench.figures import Figures, make_figures
from server.commands.bench.workloads import Call, Client


class TargetError(Exception):
    """The server cannot be measured: it does not answer, or it refuses the requests of the load."""


@dataclass(frozen=True)
class Target:
    """A server that answered: its address, its model, the model's context length if the server reports it, and fields
    that every request gets."""

    endpoint: Endpoint
    model: str
    max_model_len: int | None = None
    extra_body: Mapping[str, Any] = field(default_factory=dict)


async def find_target(
    endpoint: Endpoint, model: str | None = None, extra_body: Mapping[str, Any] | None = None, timeout: float = 30.0
) -> Target:
    """Ask GET /models for the served models. TargetError if the server does not answer or does not serve `model`."""
    connection = Connection(endpoint, timeout)
    exchange = await connection.exchange(endpoint.request("GET", "/models"))
    connection.close()
    try:
        status, payload = response(exchange)
        if status == 401:
            raise TargetError(
                f"{endpoint.base_url} requires an API key: give --api-key KEY or the variable OPENAI_API_KEY"
            )
        if status != 200:
            raise BadAnswer(f"status {status}: {payload[:200].decode('utf-8', 'replace')}")
        cards = {card["id"]: card for card in json.loads(payload)["data"]}
    except (BadAnswer, ValueError, KeyError, TypeError) as error:
        raise TargetError(f"{endpoint.base_url}/models gives no valid answer: {error}") from None
    if not cards or (model is not None and model not in cards):
        raise TargetError(f"{endpoint.base_url} serves {', '.join(cards) or 'nothing'}, not {model or 'a model'}")
    chosen = model or next(iter(cards))
    length = cards[chosen].get("max_model_len")
    return Target(endpoint, chosen, length if isinstance(length, int) else None, extra_body or {})


async def warm_up(target: Target, max_token_id: int, timeout: float) -> int:
    """Send a few concurrent requests until all succeed. Returns the largest token id that the load may use.

    A server whose vocabulary is smaller than `max_token_id` answers 400; then the id is halved.
    """
    while True:
        calls = [Call((max_token_id, *range(max_token_id - size, max_token_id)), 8) for size in (31, 63, 95)]
        exchanges = await asyncio.gather(*(_send_once(target, call, timeout) for call in calls))
        try:
            for call, exchange in zip(calls, exchanges, strict=True):
                read_answer(call, exchange)
            return max_token_id
        except BadAnswer as error:
            if not str(error).startswith("status 400") or max_token_id < 256:
                raise TargetError(f"{target.endpoint.base_url} fails a small request: {error}") from None
        max_token_id //= 2


async def run_workload(
    name: str,
    target: Target,
    clients: Sequence[Client],
    timeout: float,
    progress: Callable[[], None] = lambda: None,
    keep: Callable[[Sequence[Answer]], None] = lambda answers: None,
) -> Figures:
    """Send all calls and wait for every answer. `progress` is called once per finished request, successful or not;
    `keep` receives all successful answers."""
    requests = [[_request(target, call) for call in client.calls] for client in clients]
    _allow_open_files(len(clients) + 64)
    cpu, start = time.process_time(), time.perf_counter()
    jobs = (
        _run_client(target, client, bodies, start, timeout, progress)
        for client, bodies in zip(clients, requests, strict=True)
    )
    exchanges = await asyncio.gather(*jobs)
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    answers: list[Answer] = []
    failures: list[str] = []
    for client, replies in zip(clients, exchanges, strict=True):
        for call, exchange in zip(client.calls, replies, strict=True):
            try:
                answers.append(read_answer(call, exchange))
            except BadAnswer as error:
                failures.append(str(error))
    keep(answers)
    return make_figures(name, answers, failures, wall, cpu)


async def _run_client(
    target: Target, client: Client, requests: list[bytes], start: float, timeout: float, progress: Callable[[], None]
) -> list[Exchange]:
    await asyncio.sleep(max(0.0, start + client.start_at - time.perf_counter()))
    connection = Connection(target.endpoint, timeout)
    exchanges = []
    for request in requests:
        exchanges.append(await connection.exchange(request))
        progress()
    connection.close()
    return exchanges


async def _send_once(target: Target, call: Call, timeout: float) -> Exchange:
    connection = Connection(target.endpoint, timeout)
    exchange = await connection.exchange(_request(target, call))
    connection.close()
    return exchange


def _request(target: Target, call: Call) -> bytes:
    return target.endpoint.request("POST", "/completions", completion_body(target.model, call, target.extra_body))


def _allow_open_files(count: int) -> None:
    """Raise the soft limit of open files to `count`, as far as the hard limit allows: each connection is a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
