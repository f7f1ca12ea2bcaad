"""Measures the processor time that a token costs the server's process, and the throughput, with many requests at once.

    python -m benchmarks.token_cost [--model .cache/models/llama-tiny] [--requests 256] [--tokens 200]
                                    [--intervals 1 2 4 8] [--top-logprobs 20] [--repeats 3] [--json FILE]

One server per row: answers as a whole, and streams with each `--stream-interval`. The server's process holds the
scheduler, the detokenizer and HTTP; the Worker is a process of its own and does not count. The kernel's work to send a
chunk counts: on the loopback device that is also the receiver's part. A model that computes little shows what the host
takes; the requests come from this process, on the same cores. With --top-logprobs, they are chats that report so many
alternatives to each token. Medians of the repetitions; Linux.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.processes import ServerProcess
from server.commands.bench.report import describe, machine

WHOLE = "as a whole"
READY_SECONDS = 120.0


def cpu_seconds(pid: int) -> float:
    """Processor time of one process, all its threads, to the nanosecond."""
    stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(int(stat.split()[0]) for stat in stats) / 1e9


async def ask(port: int, path: str, body: dict[str, Any]) -> bytes:
    """The raw answer to one request. A client of few instructions: it shares the cores with the server."""
    raw = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-length: {len(raw)}\r\n"
    writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + raw)
    answer = await reader.read()
    writer.close()
    return answer


async def ask_all(port: int, options: argparse.Namespace, stream: bool, repetition: int) -> None:
    """All requests at once. Raises RuntimeError if one is not answered to its last token."""
    settings = {"model": "model", "max_tokens": options.tokens, "ignore_eos": True, "temperature": 0, "stream": stream}
    numbers = [[3 + (7 * i + 13 * j + 31 * repetition) % 1000 for j in range(8)] for i in range(options.requests)]
    if options.top_logprobs is None:
        path, prompts = "/v1/completions", [{"prompt": prompt} for prompt in numbers]
    else:
        path, prompts = "/v1/chat/completions", [{"messages": [{"role": "user", "content": str(n)}]} for n in numbers]
        settings |= {"logprobs": True, "top_logprobs": options.top_logprobs}
    for answer in await asyncio.gather(*(ask(port, path, settings | prompt) for prompt in prompts)):
        if b'"finish_reason":"length"' not in answer:
            raise RuntimeError(f"a request failed: {answer[-500:]!r}")


def measure(options: argparse.Namespace, interval: int | None) -> dict[str, float]:
    """The row of one server; `interval`: of its streams, None: answers as a whole."""
    command = (
        f"{sys.executable} -m server.cli serve --model {options.model} --served-model-name model --port {{port}} "
        f"--dtype bfloat16 --max-num-seqs {options.requests} --max-queued-requests {options.requests} "
        f"--kv-cache-memory 1GiB --stream-interval {interval or 1}"
    )
    num_tokens = options.requests * options.tokens
    costs, rates = [], []
    with tempfile.TemporaryDirectory() as folder:
        server = ServerProcess(command, Path(folder) / "log")
        try:
            wait_ready(server)
            for repetition in range(options.repeats + 1):  # the first warms up
                cpu, started = cpu_seconds(server.pid), time.perf_counter()
                asyncio.run(ask_all(server.port, options, interval is not None, repetition))
                rates.append(num_tokens / (time.perf_counter() - started))
                costs.append((cpu_seconds(server.pid) - cpu) / num_tokens)
        finally:
            server.stop()
    return {"us_per_token": statistics.median(costs[1:]) * 1e6, "tokens_per_s": statistics.median(rates[1:])}


def wait_ready(server: ServerProcess) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        server.check_alive()
        try:
            if httpx.get(f"http://127.0.0.1:{server.port}/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass  # the port is not bound yet
        time.sleep(0.1)
    raise RuntimeError("the server was not ready in time")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.token_cost", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, default=Path(".cache/models/llama-tiny"))
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--intervals", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--top-logprobs", type=int, help="alternatives to each token; default: no logprobs")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    facts = machine()
    print(describe(facts))
    print(f"{'':20}{'us of a token':>16}{'tokens/s':>12}")
    rows = {}
    for interval in (None, *options.intervals):
        name = WHOLE if interval is None else f"stream, interval {interval}"
        row = rows[name] = measure(options, interval)
        print(f"{name:20}{row['us_per_token']:16.1f}{row['tokens_per_s']:12,.0f}", flush=True)
    if options.json:
        settings = {key: str(value) for key, value in vars(options).items() if key != "json"}
        options.json.write_text(json.dumps({"machine": facts, "settings": settings, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
