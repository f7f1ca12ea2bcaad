#!/usr/bin/env python3
"""Swapping against recomputation: how soon a context that the pool gave up can go on.

    python -m benchmarks.swap [--model DIR] [--lengths 32,64,...] [--block-size 16] [--repeats 25] [--json PATH]

For each length a prompt is computed, pushed out of the pool by another one, and sent again: the time to its first token
then is that of recomputing all of it, of loading it from host memory (--swap-policy always), or of what the Worker
expects to be faster (auto). One engine serves all three in turns, in an order drawn anew each time: two Workers of the
same settings differ by some tenths of a millisecond, which on the short side is as much as is to be seen. Prints
medians in milliseconds, where the first two cross, what auto chose and how far it is from the better one.
"""

import argparse
import asyncio
import json
import math
import random
import statistics
import time
from itertools import pairwise
from pathlib import Path

from engine.config import EngineConfig
from engine.driver import Driver
from engine.executor.step import CacheCosts
from engine.request import Request
from engine.sampling_params import SamplingParams
from server.commands.bench.report import describe, machine

MEASURED_TOKENS = 512  # engine/worker/cache_costs.py
MODES = "recompute", "swap", "auto"
LOADING_NEVER_PAYS = CacheCosts(0.0, 0.0, math.inf, 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="default: the bundled model")
    parser.add_argument("--lengths", default="17,33,65,129,257,513,1025")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    lengths = [int(length) for length in options.lengths.split(",")]
    rows, costs = asyncio.run(measure(options.model, options.block_size, lengths, options.repeats))
    facts = machine()
    print(describe(facts))
    print(f"costs measured by the Worker: {costs}")
    print(f"{'tokens':>8}" + "".join(f"{mode + ' ms':>14}" for mode in MODES) + f"{'auto / better':>16}  auto chose")
    for length, row in zip(lengths, rows, strict=True):
        better = min(row["recompute"], row["swap"])
        chosen = "swap" if row["loads"] else "recompute"
        print(
            f"{length:8}" + "".join(f"{row[mode]:14.2f}" for mode in MODES) + f"{row['auto'] / better:16.2f}  {chosen}"
        )
    crossings = [b for (a, x), (b, y) in pairwise(zip(lengths, rows, strict=True)) if wins(x) != wins(y)]
    print(f"the faster one changes at: {crossings or 'none of these lengths'}")
    if options.json:
        results = [{"tokens": length, **row} for length, row in zip(lengths, rows, strict=True)]
        facts = {"machine": facts, "model": Path(options.model).name or "bundled", "block_size": options.block_size}
        options.json.write_text(json.dumps({**facts, "ms": results}, indent=1) + "\n")


def wins(row: dict[str, float]) -> bool:
    return row["swap"] < row["recompute"]


async def measure(
    model: str, block_size: int, lengths: list[int], repeats: int
) -> tuple[list[dict[str, float]], CacheCosts]:
    """Per length, the medians and the blocks that `auto` loaded; the Worker's measurements at its last start."""
    rows = []
    for length in lengths:
        driver = await start(model, block_size, length)
        tier = driver.scheduler.block_manager.host_tier
        measured = tier.costs
        costs = {"recompute": LOADING_NEVER_PAYS, "swap": None, "auto": measured}
        times: dict[str, list[float]] = {mode: [] for mode in MODES}
        loads: dict[str, int] = {}
        for _ in range(repeats):
            for mode in random.sample(MODES, len(MODES)):
                tier.costs, before = costs[mode], tier.num_loads
                times[mode].append(await resume(driver, length))
                loads[mode] = tier.num_loads - before
        medians = {mode: statistics.median(values) * 1e3 for mode, values in times.items()}
        rows.append({**medians, "loads": loads["auto"]})
        print(f"{length} tokens: {rows[-1]}", flush=True)
        await driver.stop()
    return rows, measured


async def start(model: str, block_size: int, length: int) -> Driver:
    """A pool of two contexts, so that one pushes out the other; not less than the Worker measures its costs with."""
    driver = Driver(
        EngineConfig(
            model=model,
            num_blocks=max(2 * MEASURED_TOKENS, 2 * length) // block_size + 4,
            block_size=block_size,
            max_model_len=max(MEASURED_TOKENS, length) + block_size,
            swap_space=1.0,
        )
    )
    await driver.start()
    await driver.wait_ready()
    return driver


async def resume(driver: Driver, length: int) -> float:
    """Seconds to the first token of a context that the pool held and gave up."""
    context = random_prompt(driver, length)
    await first_token(driver, context)
    room = driver.model.max_model_len - 2
    for _ in range(-(-driver.model.num_blocks * driver.config.block_size // room) + 1):
        await first_token(driver, random_prompt(driver, room))
    return await first_token(driver, context)


def random_prompt(driver: Driver, length: int) -> list[int]:
    return [random.randrange(driver.model.vocab_size // 2) for _ in range(length)]


async def first_token(driver: Driver, prompt: list[int]) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    started = time.perf_counter()
    async for _ in driver.generate(Request(str(started), prompt, params)):
        pass
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
