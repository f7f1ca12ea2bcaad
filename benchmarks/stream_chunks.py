"""Measures the time of a streamed chunk between the engine's output and uvicorn, and of a stream with few chunks.

    python -m benchmarks.stream_chunks [--json FILE]

Three ways to send the same ready-made bytes: the server's EventStream; sse-starlette's EventSourceResponse that is
given each chunk to send; and a bare loop over the ASGI `send`, which is what no server can do without. All three take
turns, several rounds of each; the table has medians.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from sse_starlette.sse import EventSourceResponse

from engine.outputs import CompletionOutput, RequestOutput
from server.commands.bench.report import machine
from server.config import ServerConfig
from server.output.sse import HEADERS, KEEP_ALIVE, EventStream

CHUNK = b'data: {"id":"chatcmpl-0123456789","choices":[{"index":0,"delta":{"content":" fox"}}]}\n\n'
END = b"data: [DONE]\n\n"
KEEP_ALIVE_SECONDS = 15.0
OUTPUT = RequestOutput("r", [CompletionOutput(0, " fox", (1,))], False, 1)

Form = Callable[[int, Any], Awaitable[None]]


class Tokens:
    """A generation of `count` outputs that are there already: their reader never waits."""

    def __init__(self, count: int) -> None:
        self._count = count

    async def read(self, on_output: Callable[[int, RequestOutput], Awaitable[None]], on_prompt_logprobs: None) -> None:
        for _ in range(self._count):
            await on_output(0, OUTPUT)

    def group(self, num_tokens: int) -> None:
        pass

    def close(self) -> None:
        pass


async def never() -> Any:
    """`receive` of a client that stays."""
    await asyncio.Event().wait()


async def event_stream(count: int, send: Any) -> None:
    stream = EventStream(Tokens(count), lambda index, output: CHUNK, lambda: END, ServerConfig())  # type: ignore[arg-type]
    await stream({"type": "http", "method": "POST", "headers": []}, never, send)


async def event_source_response(count: int, send: Any) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(count):
            yield CHUNK
        yield END

    options: dict[str, Any] = {"ping_message_factory": lambda: KEEP_ALIVE, "send_timeout": 60.0}
    response = EventSourceResponse(chunks(), headers=HEADERS, ping=KEEP_ALIVE_SECONDS, **options)
    await response({"type": "http", "method": "POST", "headers": []}, never, send)


async def bare_send(count: int, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(count):
        await send({"type": "http.response.body", "body": CHUNK, "more_body": True})
    await send({"type": "http.response.body", "body": END, "more_body": False})


FORMS: dict[str, Form] = {
    "EventStream": event_stream,
    "EventSourceResponse, given chunks": event_source_response,
    "bare send": bare_send,
}


async def seconds(form: Form, count: int, streams: int) -> float:
    sent = 0

    async def send(message: Any) -> None:
        nonlocal sent
        sent += len(message.get("body", b""))

    start = time.perf_counter()
    for _ in range(streams):
        await form(count, send)
    elapsed = time.perf_counter() - start
    assert sent == streams * (count * len(CHUNK) + len(END)), "each form sends the same bytes"
    return elapsed


async def measure(chunks: int, streams: int, rounds: int) -> dict[str, dict[str, float]]:
    """Median seconds of a chunk and of a stream without chunks, by form."""
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in FORMS}
    for _, (name, form) in itertools.product(range(rounds), FORMS.items()):
        of_chunk, of_stream = times[name]
        empty = await seconds(form, 0, streams) / streams
        of_stream.append(empty)
        of_chunk.append((await seconds(form, chunks, 1) - empty) / chunks)
    return {
        name: {"chunk_us": 1e6 * statistics.median(of_chunk), "stream_us": 1e6 * statistics.median(of_stream)}
        for name, (of_chunk, of_stream) in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--chunks", type=int, default=20_000, help="chunks of the long stream (default: 20000)")
    parser.add_argument("--streams", type=int, default=300, help="streams without chunks (default: 300)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of each form, in turns (default: 9)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    found = asyncio.run(measure(args.chunks, args.streams, args.rounds))
    print(f"{'form':36}{'us a chunk':>12}{'us a stream':>13}")
    for name, figures in found.items():
        print(f"{name:36}{figures['chunk_us']:12.2f}{figures['stream_us']:13.1f}")
    if args.json is not None:
        args.json.write_text(
            json.dumps({"machine": machine(), **vars(args) | {"json": None}, "forms": found}, indent=1)
        )


if __name__ == "__main__":
    main()
