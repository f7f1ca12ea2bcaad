"""Driving a real Driver over a Worker process whose device is fake."""

import asyncio
import sys
import time
from contextlib import asynccontextmanager

from engine.config import EngineConfig
from engine.driver import Driver
from engine.request import Request
from engine.sampling_params import SamplingParams

PROMPT = list(b"hello")


@asynccontextmanager
async def running_driver(folder, *worker_options, ready=True, max_queued_requests=64, **settings):
    config = EngineConfig(model=str(folder), load_format="dummy", **settings)
    command = (sys.executable, "-m", "tests.fake_worker", *worker_options)
    driver = Driver(config, worker_command=command, max_queued_requests=max_queued_requests)
    await driver.start()
    try:
        if ready:
            await asyncio.wait_for(driver.wait_ready(), 20)
        yield driver
    finally:
        await driver.stop()


async def until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        await asyncio.sleep(0.005)


def request(name, prompt=PROMPT, **params):
    return Request(name, list(prompt), SamplingParams(**({"seed": 7} | params)))


async def collect(stream):
    """Per sample: (text, token_ids, finish_reason, stop_reason); checks that outputs add up."""
    samples = {}
    async for output in stream:
        for part in output.outputs:
            text, ids, *_ = samples.get(part.index, ("", (), None, None))
            samples[part.index] = text + part.text, ids + part.token_ids, part.finish_reason, part.stop_reason
    assert output.finished
    assert output.num_generated_tokens == sum(len(ids) for _, ids, *_ in samples.values())
    return [samples[i] for i in sorted(samples)]


def assert_idle(driver):
    blocks = driver.scheduler.block_manager
    assert len(blocks.free_blocks) == blocks.num_blocks
    driver.check_invariants()
    assert not driver.num_live_requests and not driver.scheduler.has_work
