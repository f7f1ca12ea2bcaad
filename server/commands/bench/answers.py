"""Reads streamed completions after the run: arrival times, and whether each answer is complete."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from server.commands.bench.client import Exchange
from server.commands.bench.decoding import EventDecoder, ResponseDecoder
from server.commands.bench.workloads import Call


class BadAnswer(Exception):
    """A response is not the complete answer to its call; the message names the fault."""


@dataclass(frozen=True)
class Answer:
    """Times are in seconds of time.perf_counter. `arrivals[i]`: arrival times of the chunks of sample i that hold text,
    token ids or its end (a first chunk without text and token ids does not count as a first token)."""

    call: Call
    started: float
    arrivals: tuple[tuple[float, ...], ...]
    prompt_tokens: int
    output_tokens: int

    @property
    def first(self) -> float:
        return min(times[0] for times in self.arrivals)

    @property
    def last(self) -> float:
        return max(times[-1] for times in self.arrivals)


LOAD_FIELDS = ("model", "prompt", "max_tokens", "n", "ignore_eos", "stream", "stream_options", "return_token_ids")


def completion_body(model: str, call: Call, extra: Mapping[str, Any] = MappingProxyType({})) -> bytes:
    """The JSON body of one streamed request for exactly max_tokens tokens, with usage in the last chunk. extra: more
    fields, none of LOAD_FIELDS."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": call.prompt,
        "max_tokens": call.max_tokens,
        "n": call.n,
        "temperature": call.temperature,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if call.return_token_ids:
        body["return_token_ids"] = True
    return json.dumps(body | dict(extra), separators=(",", ":")).encode()


def response(exchange: Exchange) -> tuple[int, bytes]:
    """(status, payload) of an exchange without a network error. Raises BadAnswer."""
    if exchange.error is not None:
        raise BadAnswer(exchange.error)
    decoder = ResponseDecoder()
    payload = b"".join(decoder.feed(data) for _, data in exchange.segments)
    return decoder.status, payload


def read_answer(call: Call, exchange: Exchange) -> Answer:
    """Read an exchange. BadAnswer unless every sample ended by length with all its tokens, and the stream by [DONE]."""
    status, payload = response(exchange)
    if status != 200:
        raise BadAnswer(f"status {status}: {payload[:200].decode('utf-8', 'replace')}")
    arrivals: list[list[float]] = [[] for _ in range(call.n)]
    reasons: list[str | None] = [None] * call.n
    usage: dict[str, Any] = {}
    for arrived, chunk in _chunks(exchange):
        usage = chunk.get("usage") or usage
        for choice in chunk.get("choices", []):
            index = choice.get("index", 0)
            if index not in range(call.n):
                raise BadAnswer(f"a chunk of sample {index} of {call.n}")
            reasons[index] = choice.get("finish_reason") or reasons[index]
            if choice.get("text") or choice.get("token_ids") or choice.get("finish_reason"):
                arrivals[index].append(arrived)
    _check(call, reasons, usage)
    times = tuple(tuple(sample) for sample in arrivals)
    return Answer(call, exchange.started, times, usage.get("prompt_tokens", 0), usage["completion_tokens"])


def _chunks(exchange: Exchange) -> Iterator[tuple[float, dict[str, Any]]]:
    http, events = ResponseDecoder(), EventDecoder()
    done = False
    for arrived, data in exchange.segments:
        for event in events.feed(http.feed(data)):
            done = done or event == b"[DONE]"
            if not done:
                yield arrived, _json_object(event)
    if not done:
        raise BadAnswer("the stream ended without [DONE]")


def _json_object(event: bytes) -> dict[str, Any]:
    try:
        chunk = json.loads(event)
    except ValueError:
        raise BadAnswer(f"an event that is not JSON: {event[:80]!r}") from None
    if not isinstance(chunk, dict):
        raise BadAnswer(f"an event that is no object: {event[:80]!r}")
    if chunk.get("error"):
        raise BadAnswer(f"an error in the stream: {event[:200].decode('utf-8', 'replace')}")
    return chunk


def _check(call: Call, reasons: list[str | None], usage: dict[str, Any]) -> None:
    for index, reason in enumerate(reasons):
        if reason != "length":
            raise BadAnswer(f"sample {index} has finish_reason {reason!r}, not 'length'")
    expected = call.n * call.max_tokens
    if usage.get("completion_tokens") != expected:
        raise BadAnswer(f"usage reports {usage.get('completion_tokens')} output tokens, not {expected} as requested")
