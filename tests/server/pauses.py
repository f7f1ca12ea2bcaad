"""How long streams stand still when a process of the server is killed or stopped, with default settings.

python -m tests.server.pauses [--streams 32] [--limit 10]     (`make pauses`)

The bundled model in fp32, the server as a user starts it. Each child process (the Worker, those that compile grammars,
whatever else there is by then) is hit by SIGKILL and by SIGSTOP amid live streams. A quarter of these come right after
the blow, as chats with a schema that is new each time, so that every child has something to do. A stream's pause is the
longest time without a chunk, the wait for the first one included. Each stream must be complete and have the very bytes
of an undisturbed run. Exit status 1 where one is not, or where a pause is longer than the limit.
"""

import argparse
import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable

import httpx

from tests.server.serving import serving_process
from tests.server.streams import WORKER, Stream, body, children_of, wait_for

TOKENS = 160
FAULTS = (signal.SIGKILL, signal.SIGSTOP)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}, "fox": {"type": "boolean"}},
    "required": ["name", "age", "fox"],
    "additionalProperties": False,
}


def chat_with_schema(i: int, run: int, model: str) -> dict:
    """The title changes nothing but makes the schema one that nobody has seen."""
    schema = {**SCHEMA, "title": f"{run}-{i}"}
    return {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [{"role": "user", "content": f"Tell me of fox number {i}."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "fox", "schema": schema}},
        "max_tokens": TOKENS,
        "temperature": 0.8,
        "seed": i,
    }


async def run_streams(
    url: str, model: str, num_streams: int, run: int, blow: Callable[[], None] | None = None
) -> list[Stream]:
    """Plain completions; once all of them flow, the blow, and at once the chats with schemas."""
    num_chats = num_streams // 4
    plain = [Stream({**body(i, model), "max_tokens": TOKENS, "min_tokens": 0}) for i in range(num_streams - num_chats)]
    chats = [Stream(chat_with_schema(i, run, model)) for i in range(num_chats)]
    limits = httpx.Limits(max_connections=num_streams)

    async def all_flow() -> bool:
        return all(stream.num_chunks > 3 for stream in plain)

    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        tasks = [asyncio.create_task(stream.read(client)) for stream in plain]
        await wait_for(all_flow)
        if blow is not None:
            blow()
        tasks += [asyncio.create_task(stream.read(client)) for stream in chats]
        await asyncio.gather(*tasks)
    return plain + chats


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.server.pauses", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--limit", type=float, default=10.0, help="seconds that the longest pause may take")
    options = parser.parse_args()
    with serving_process("--device", "cpu", "--dtype", "float32") as (url, process):
        return measure(url, process, options.streams, options.limit)


def measure(url: str, process: "subprocess.Popen[bytes]", num_streams: int, limit: float) -> int:
    model = httpx.get(f"{url}/v1/models", timeout=60).json()["data"][0]["id"]
    asyncio.run(run_streams(url, model, num_streams, 0))  # every kind of step has been seen, every process is there
    calm = asyncio.run(run_streams(url, model, num_streams, 1))
    print(f"{num_streams} streams; the longest pause of an undisturbed run: {longest(calm):.1f} s\n")
    print(f"{'process':32} {'fault':8} {'longest pause':>13} {'complete':>9} {'bytes equal':>12}")
    failed, run = False, 1
    for name in sorted(children_of(process), key=lambda name: name != WORKER):
        for fault in FAULTS:
            run += 1
            pid = children_of(process)[name]
            hit = asyncio.run(
                run_streams(url, model, num_streams, run, lambda pid=pid, fault=fault: os.kill(pid, fault))
            )
            complete = sum(stream.done for stream in hit)
            equal = sum(stream.outcome() == other.outcome() for stream, other in zip(hit, calm, strict=True))
            failed |= complete < num_streams or equal < num_streams or longest(hit) > limit
            print(f"{name:32} {fault.name:8} {longest(hit):11.1f} s {complete:9} {equal:12}", flush=True)
            if pid in children_of(process).values():
                print(f"  process {pid} is still there")
                failed = True
    return int(failed)


def longest(streams: list[Stream]) -> float:
    return max(stream.longest_pause for stream in streams)


if __name__ == "__main__":
    sys.exit(main())
