"""Many requests of every kind against a live server, many of them abandoned: nothing is lost, nothing left behind.

SOAK_REQUESTS sets the number (300 in `make test`, 2,000 in `make soak`), SOAK_TOKENS the longest output: with 8 of them
200,000 requests stand for a working day and end within the hour.
"""

import asyncio
import json
import os
import random
from collections import Counter
from itertools import islice
from pathlib import Path

import httpx
import pytest

from tests.server.left_behind import children, gauge, left_behind, memory_mib, metrics, settled
from tests.server.serving import serving_process

NUM_REQUESTS = int(os.environ.get("SOAK_REQUESTS", "300"))
NUM_TOKENS = int(os.environ.get("SOAK_TOKENS", "60"))
PROMPT_LENGTHS = [length for length in (1, 5, 40, 200, 400) if length < 8 * NUM_TOKENS]
CONCURRENCY = 48


@pytest.fixture(scope="module")
def server():
    with serving_process("--num-blocks", "300", "--max-num-seqs", "24", "--max-model-len", "512") as found:
        yield found


def random_body(rng: random.Random) -> dict:
    body = {
        "model": "m",
        "max_tokens": rng.randrange(1, NUM_TOKENS),
        "n": rng.choice([1, 1, 1, 2, 3]),
        "temperature": rng.choice([0.0, 1.0]),
        "ignore_eos": True,
        "stream": rng.random() < 0.6,
        "prompt": [rng.randrange(300, 1000) for _ in range(rng.choice(PROMPT_LENGTHS))],
    }
    if rng.random() < 0.2:
        body["logprobs"] = 2
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    return body


async def one(client: httpx.AsyncClient, rng: random.Random, model: str, outcomes: Counter) -> None:
    body = random_body(rng) | {"model": model}
    leave_after = rng.choice([None, None, 0, 1, 5])  # chunks read before the client leaves
    if leave_after is None:
        if body["stream"]:
            await read_stream(client, body)
        else:
            response = await client.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text
            assert response.json()["usage"]["completion_tokens"] == body["n"] * body["max_tokens"]
        outcomes["complete"] += 1
    else:
        await leave(client, body, leave_after, rng)
        outcomes["left"] += 1


async def read_stream(client: httpx.AsyncClient, body: dict) -> None:
    reasons, usage, last = [], None, ""
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                reasons += [c["finish_reason"] for c in chunk["choices"] if c["finish_reason"]]
                usage = chunk["usage"] or usage
            last = line or last
    assert last == "data: [DONE]"
    assert reasons == ["length"] * body["n"]
    assert usage["completion_tokens"] == body["n"] * body["max_tokens"]


async def leave(client: httpx.AsyncClient, body: dict, after: int, rng: random.Random) -> None:
    async def read():
        async with client.stream("POST", "/v1/completions", json=body) as response:
            count = 0
            async for _ in response.aiter_lines():
                count += 1
                if count > after:
                    return

    try:
        await asyncio.wait_for(read(), rng.choice([0.001, 0.02, 0.2]))
    except asyncio.TimeoutError:
        pass  # left before, or while, the answer came


async def run_all(base_url: str, model: str, pids: list[int]) -> tuple[Counter, list[list[float]]]:
    """(outcomes of the requests, memory of each process after every tenth of them)."""
    outcomes: Counter = Counter()
    memory: list[list[float]] = []
    seeds = iter(range(NUM_REQUESTS))

    async def user(client: httpx.AsyncClient, num_requests: int) -> None:
        for seed in islice(seeds, num_requests):
            await one(client, random.Random(seed), model, outcomes)
            if (seed + 1) * 10 // NUM_REQUESTS > seed * 10 // NUM_REQUESTS:
                memory.append([memory_mib(pid) for pid in pids])

    limits = httpx.Limits(max_connections=CONCURRENCY * 2)
    while outcomes.total() < NUM_REQUESTS:  # httpx loses places of its pool to requests that are cancelled: begin anew
        async with httpx.AsyncClient(base_url=base_url, timeout=120, limits=limits) as client:
            await asyncio.gather(*(user(client, 50) for _ in range(CONCURRENCY)))
    return outcomes, memory


def test_soak(server):
    base_url, process = server
    with httpx.Client(base_url=base_url, timeout=60) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        asyncio.run(read_stream_once(base_url, model))  # threads and caches that stay are there from now on
        baseline = left_behind(client, process)
        outcomes, memory = asyncio.run(run_all(base_url, model, [process.pid, *children(process.pid)]))
        assert outcomes.total() == NUM_REQUESTS and min(outcomes.values()) > NUM_REQUESTS // 5, outcomes
        found = settled(client, process, baseline)
        counts = metrics(client)
        ended = gauge(counts, "vllm:request_success_total")
        errors = sum(v for k, v in counts.items() if k.startswith("vllm:request_success_total") and "error" in k)
    print(f"{dict(outcomes)}, left behind {found}, before {baseline}, ended {ended:.0f}, errors {errors:.0f}")
    print("MiB of Driver and Worker after each tenth:", [[round(mib, 1) for mib in each] for each in memory])
    assert all(found[name] <= baseline[name] for name in found), (found, baseline)
    assert found["running"] == found["waiting"] == found["blocks"] == 0
    assert errors == 0
    if NUM_REQUESTS >= 2000:  # after a fifth every cache and pool has its size
        assert all(late < early + 16 + early / 50 for early, late in zip(memory[1], memory[-1], strict=True)), memory
    assert Path(f"/proc/{process.pid}").exists()


async def read_stream_once(base_url: str, model: str) -> None:
    async with httpx.AsyncClient(base_url=base_url, timeout=60) as client:
        await read_stream(
            client,
            {
                "model": model,
                "prompt": [400],
                "n": 1,
                "max_tokens": 3,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
        )
