#!/usr/bin/env python3
"""Measures the effect of the prefix cache: requests per second, with and without it, of prompts that share their start.

    python -m benchmarks.prefix_cache --model DIR [--prompts 16] [--length 1024] [--repeats 3] [--json PATH]

Batches of prompts of which the first 0, 25, 50 or 75 % is the same text, another one in each batch, and 16 tokens of
output; two engines side by side, one with --no-enable-prefix-caching, take turns. Prints medians, the ratio, and the
share of prompt tokens that came from the cache. Expected at best: 1 / (1 - share) for what is not decoding.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from pathlib import Path

from engine.config import EngineConfig
from engine.driver import Driver
from engine.request import Request
from engine.sampling_params import SamplingParams
from server.commands.bench.report import describe, machine

SHARES = (0.0, 0.25, 0.5, 0.75)
OUTPUT_TOKENS = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="default: the bundled model")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = asyncio.run(measure(options.model, options.prompts, options.length, options.repeats))
    facts = machine()
    print(describe(facts))
    print(f"{'shared':>8}{'without req/s':>16}{'with req/s':>12}{'ratio':>8}{'cached':>9}")
    for row in rows:
        print(
            f"{row['shared']:8.0%}{row['without']:16.2f}{row['with']:12.2f}"
            f"{row['with'] / row['without']:8.2f}{row['cached']:9.0%}"
        )
    if options.json:
        model = Path(options.model).name or "bundled"
        options.json.write_text(json.dumps({"machine": facts, "model": model, "rows": rows}, indent=1) + "\n")


async def measure(model: str, num_prompts: int, length: int, repeats: int) -> list[dict[str, float]]:
    drivers = {}
    for name, caching in {"without": False, "with": True}.items():
        drivers[name] = Driver(EngineConfig(model=model, enable_prefix_caching=caching))
        await drivers[name].start()
        await drivers[name].wait_ready()
        await batch(drivers[name], 2, length, 0.0)
    rows = []
    for share in SHARES:
        rates: dict[str, list[float]] = {name: [] for name in drivers}
        cached = 0.0
        for _ in range(repeats):
            for name, driver in drivers.items():
                seconds, cached = await batch(driver, num_prompts, length, share)
                rates[name].append(num_prompts / seconds)
        medians = {name: statistics.median(values) for name, values in rates.items()}
        rows.append({"shared": share, "cached": cached, **medians})
    for driver in drivers.values():
        await driver.stop()
    return rows


async def batch(driver: Driver, num_prompts: int, length: int, share: float) -> tuple[float, float]:
    """(seconds until all are done, share of their tokens that was found in the cache)."""
    shared = random_tokens(driver, int(length * share))
    prompts = [shared + random_tokens(driver, length - len(shared)) for _ in range(num_prompts)]
    started = time.perf_counter()
    cached = await asyncio.gather(*(generate(driver, str(i), prompt) for i, prompt in enumerate(prompts)))
    return time.perf_counter() - started, sum(cached) / (num_prompts * length)


async def generate(driver: Driver, name: str, prompt: list[int]) -> int:
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    num_cached = 0
    async for output in driver.generate(Request(name, prompt, params)):
        num_cached = output.num_cached_tokens
    return num_cached


def random_tokens(driver: Driver, count: int) -> list[int]:
    return [random.randrange(driver.model.vocab_size // 2) for _ in range(count)]


if __name__ == "__main__":
    main()
