#!/usr/bin/env python3
"""How much a key that floods delays the first tokens of another key, and how much throughput the flood loses by that.

    python -m benchmarks.fairness [--model DIR] [--flood 200] [--requests 120] [--rounds 3] [--json FILE]

The benchmark starts a server with two API keys. Key B sends one request after the other, with pauses, short and long
prompts in turn. The words of each prompt are random, so that nothing is cached. A round has three parts: key B alone;
key A alone, which keeps --flood requests open from a process of its own (as one ends the next is sent); both together.
The flood's outputs have random lengths, so that its requests do not begin and end together.
TTFT is from the request to the first byte of its stream's first text. The throughput of the flood is counted in events
of its streams: tokens, but for those that end within a character. The first seconds of a flood (--warm-up) do not
count: so long the engine remembers key B (engine/scheduling/fair_share.py, VISIT_SECONDS) and keeps steps short.

Two aims, and exit status 1 where one is missed: the P99 TTFT of key B under the flood is at most 1.5 times that of the
quiet server, or 50 ms more, whichever is larger; the flood keeps at least 70 % of the throughput that it has alone.
Both compare figures of one run, whose parts take turns, so that they see the machine as it is. The output says how
uneven it was.
"""

import argparse
import asyncio
import json
import math
import multiprocessing
import random
import secrets
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.processes import ServerProcess

MAX_RATIO, MAX_DELAY_MS = 1.5, 50.0  # the P99 TTFT may be as many times as high, or so much higher
MIN_KEPT = 0.7  # share of the flood's throughput
KEYS = {"quiet": "sk-" + secrets.token_hex(16), "flood": "sk-" + secrets.token_hex(16)}
Times = dict[str, list[float]]  # by kind of prompt


@dataclass(frozen=True)
class Load:
    """Tokens of a request. Prompts are random words, so no two have a block in common."""

    prompt: int
    output: int

    def body(self, model: "Model", rng: random.Random) -> dict[str, Any]:
        ids = rng.choices(model.words, k=self.prompt)
        return {"model": model.name, "prompt": ids, "max_tokens": self.output, "ignore_eos": True, "stream": True}


@dataclass(frozen=True)
class Model:
    """The served model's name, and ids of tokens of whole letters: no prompt of them ends within a character."""

    name: str
    words: list[int]

    @classmethod
    async def of(cls, client: httpx.AsyncClient) -> "Model":
        headers = {"authorization": f"Bearer {KEYS['quiet']}"}
        name = (await client.get("/v1/models", headers=headers)).json()["data"][0]["id"]
        body = {"model": name, "prompt": __doc__, "return_token_strs": True, "add_special_tokens": False}
        found = (await client.post("/tokenize", json=body, headers=headers)).raise_for_status().json()
        letters = [text.strip("\u0120\u2581") for text in found["token_strs"]]  # without the signs for a space
        words = {id for id, text in zip(found["tokens"], letters, strict=True) if text.isascii() and text.isalpha()}
        return cls(name, sorted(words))


async def events(client: httpx.AsyncClient, body: dict[str, Any], key: str) -> AsyncIterator[int]:
    """How many events of a stream come, each time that some do."""
    headers = {"authorization": f"Bearer {key}"}
    async with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        response.raise_for_status()
        async for piece in response.aiter_raw():
            yield piece.count(b"data: {")


async def ttft(client: httpx.AsyncClient, body: dict[str, Any], key: str) -> float:
    """Seconds to the first event of a stream, which is then read to its end."""
    start, first = time.perf_counter(), 0.0
    async for _ in events(client, body, key):
        first = first or time.perf_counter() - start
    return first


async def quiet_key(client: httpx.AsyncClient, model: Model, options: argparse.Namespace, seed: int) -> Times:
    """One round of the quiet key: seconds to the first token, of the short and of the long prompts."""
    rng = random.Random(seed)
    found: Times = {"short": [], "long": []}
    for number in range(options.requests):
        kind, prompt = (("short", options.short), ("long", options.long))[number % 2]
        await asyncio.sleep(rng.expovariate(1 / options.pause))
        found[kind].append(await ttft(client, Load(prompt, options.output).body(model, rng), KEYS["quiet"]))
    return found


class Flood:
    """Key A in a process of its own, so that its client does not slow the quiet key's, and what it got done."""

    def __init__(self, base_url: str, model: Model, options: argparse.Namespace, seed: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.num_events = context.RawValue("i", 0)  # without a lock, which a killed process might hold
        arguments = base_url, model, KEYS["flood"], options, seed, self.num_events
        self._process = context.Process(target=flood, args=arguments, daemon=True)
        self._process.start()

    def check_alive(self) -> None:
        if not self._process.is_alive():
            raise RuntimeError("the flood ended: see above")

    def stop(self) -> None:
        self._process.kill()
        self._process.join()


def flood(base_url: str, model: Model, key: str, options: argparse.Namespace, seed: int, num_events: Any) -> None:
    """Keep `options.flood` requests open for ever; `num_events`, a shared int, counts what comes."""

    async def one(client: httpx.AsyncClient, number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        while True:
            load = Load(options.flood_prompt, rng.randint(1, 2 * options.flood_output))
            async for number_of_them in events(client, load.body(model, rng), key):
                num_events.value += number_of_them

    async def everyone() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=base_url, timeout=600, limits=limits) as client:
            await asyncio.gather(*(one(client, number) for number in range(options.flood)))

    asyncio.run(everyone())


async def flooded(
    client: httpx.AsyncClient, base_url: str, model: Model, options: argparse.Namespace, seed: int
) -> tuple[Times, float, float]:
    """One round of the quiet key under the flood, and the flood's output tokens per second before it and beside it."""
    crowd = Flood(base_url, model, options, seed)
    try:
        await asyncio.sleep(options.warm_up)
        start = time.perf_counter(), crowd.num_events.value
        await asyncio.sleep(options.alone)
        visit = time.perf_counter(), crowd.num_events.value
        found = await quiet_key(client, model, options, seed)
        end = time.perf_counter(), crowd.num_events.value
        crowd.check_alive()
    finally:
        crowd.stop()
    return found, _rate(start, visit), _rate(visit, end)


def _rate(start: tuple[float, int], end: tuple[float, int]) -> float:
    """Events per second between two (time, count)."""
    return round((end[1] - start[1]) / (end[0] - start[0]), 1)


def figures(rounds: list[Times]) -> dict[str, Any]:
    """In milliseconds, of all requests and of each kind."""
    kinds = {kind: [value for found in rounds for value in found[kind]] for kind in ("short", "long")}
    return {"all": _ranks(kinds["short"] + kinds["long"])} | {kind: _ranks(values) for kind, values in kinds.items()}


def _ranks(seconds: list[float]) -> dict[str, Any]:
    ranked = sorted(1000 * value for value in seconds)
    ranks = {f"p{rank}_ms": round(ranked[math.ceil(rank / 100 * len(ranked)) - 1], 1) for rank in (50, 90, 99)}
    return {"requests": len(ranked), **ranks}


async def run(base_url: str, options: argparse.Namespace) -> dict[str, Any]:
    quiet, under_flood = list[Times](), list[Times]()
    alone, beside = list[float](), list[float]()
    async with httpx.AsyncClient(base_url=base_url, timeout=600) as client:
        model = await Model.of(client)
        for i in range(30):  # warm up: some parts start with the first requests
            prompt = (options.short, options.long)[i % 2]
            await ttft(client, Load(prompt, options.output).body(model, random.Random(-i - 1)), KEYS["quiet"])
        for seed in range(options.seed, options.seed + 2 * options.rounds, 2):
            quiet.append(await quiet_key(client, model, options, seed))
            found, rate_alone, rate_beside = await flooded(client, base_url, model, options, seed + 1)
            under_flood.append(found)
            alone.append(rate_alone)
            beside.append(rate_beside)
            await asyncio.sleep(1.0)
    times = {"quiet": figures(quiet), "flooded": figures(under_flood)}
    rates = {"flood_tokens_per_s_alone": alone, "flood_tokens_per_s_beside": beside}
    return {**times, **rates, "drift": drift(quiet), "aims": aims(times, alone, beside)}


def aims(times: dict[str, Any], alone: list[float], beside: list[float]) -> dict[str, Any]:
    """Both aims: the figure, its limit, and whether it is met."""
    before, after = times["quiet"]["all"]["p99_ms"], times["flooded"]["all"]["p99_ms"]
    limit = round(max(MAX_RATIO * before, before + MAX_DELAY_MS), 1)
    kept = round(sum(beside) / sum(alone), 3)
    return {
        "ttft": {"p99_ms": after, "quiet_p99_ms": before, "limit_ms": limit, "met": after <= limit},
        "throughput": {"kept": kept, "limit": MIN_KEPT, "met": kept >= MIN_KEPT},
    }


def drift(quiet: list[Times]) -> float:
    """How far apart the medians of the quiet rounds are: a prompt that is computed alone tells the machine's speed."""
    medians = [statistics.median(found["long"]) for found in quiet]
    return round(max(medians) / min(medians), 2)


def main() -> int:
    """Exit status 1 where an aim is missed."""
    options = _parser().parse_args()
    with tempfile.TemporaryDirectory(prefix="pageserve-fairness-") as folder:
        keys = Path(folder, "keys")
        keys.write_text("".join(f"{name} {key}\n" for name, key in KEYS.items()), encoding="utf-8")
        model = f"--model {shlex.quote(options.model)} " if options.model else ""
        command = f"{shlex.quote(sys.executable)} -m server.cli serve {model}--api-key-file {keys} --port {{port}}"
        server = ServerProcess(f"{command} {options.server}", Path(folder, "server.log"))
        try:
            result = asyncio.run(_when_ready(server, options))
        finally:
            server.stop()
    _show(result)
    if options.json is not None:
        options.json.write_text(json.dumps({"options": _shown(options), **result}, indent=1) + "\n", encoding="utf-8")
    return 0 if all(aim["met"] for aim in result["aims"].values()) else 1


def _show(result: dict[str, Any]) -> None:
    for name in ("quiet", "flooded"):
        for kind in ("all", "short", "long"):
            values = "  ".join(f"{key} {value}" for key, value in result[name][kind].items())
            print(f"{name:12} {kind:6} {values}")
    print(f"medians of the quiet rounds' long prompts: up to {result['drift']} times apart")
    for name in ("alone", "beside"):
        print(f"tokens/s of the flood, {name}: {result[f'flood_tokens_per_s_{name}']}")
    ttft, throughput = result["aims"]["ttft"], result["aims"]["throughput"]
    print(
        f"{_verdict(ttft)} P99 TTFT under the flood: {ttft['p99_ms']} ms, quiet {ttft['quiet_p99_ms']} ms, "
        f"limit {ttft['limit_ms']} ms (the larger of {MAX_RATIO} times and {MAX_DELAY_MS:.0f} ms more)"
    )
    print(
        f"{_verdict(throughput)} throughput that the flood keeps beside key B: {throughput['kept']:.0%}, "
        f"limit {throughput['limit']:.0%}"
    )


def _verdict(aim: dict[str, Any]) -> str:
    return "pass" if aim["met"] else "MISS"


async def _when_ready(server: ServerProcess, options: argparse.Namespace) -> dict[str, Any]:
    url = server.base_url.removesuffix("/v1")
    async with httpx.AsyncClient(base_url=url) as client:
        for _ in range(600):
            server.check_alive()
            try:
                if (await client.get("/ready")).status_code == 200:
                    return await run(url, options)
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.2)
    raise RuntimeError("the server did not become ready")


def _shown(options: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(options).items() if name not in ("json",)}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="the model to serve (default: the bundled model)")
    parser.add_argument("--server", default="", help="more options of the server, as one text")
    parser.add_argument("--flood", type=int, default=200, help="requests that key A keeps open")
    parser.add_argument("--flood-prompt", type=int, default=1000)
    parser.add_argument("--flood-output", type=int, default=400, help="mean length, drawn from 1 to twice as much")
    parser.add_argument("--short", type=int, default=32, help="tokens of one half of key B's prompts")
    parser.add_argument("--long", type=int, default=1500, help="tokens of the other half")
    parser.add_argument("--output", type=int, default=4)
    parser.add_argument("--requests", type=int, default=200, help="requests of key B per round")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each kind, in turns")
    parser.add_argument("--pause", type=float, default=0.05, help="mean seconds between two of them")
    parser.add_argument("--warm-up", type=float, default=24.0, help="seconds of flood before anything is measured")
    parser.add_argument("--alone", type=float, default=20.0, help="seconds of flood, measured, before key B begins")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="file for the figures")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
