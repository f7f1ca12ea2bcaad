"""`--batch-invariant` through the whole engine: the bundled model on a CPU, tokens and logprobs bit for bit."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from engine.config import EngineConfig
from engine.driver import Driver
from engine.request import Request
from engine.sampling_params import SamplingParams

NUM_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3)
SHARED = "The old clock on the wall had a secret that nobody in the house knew about. "
# Of many lengths; half of them begin alike.
PROMPTS = [
    *("Once upon a time, a small fox " * n + "found" for n in (1, 2, 3, 5)),
    *(SHARED * (1 + n % 3) + f"On day {n}, a mouse" for n in range(8)),
    *("Hello", "A", "A dragon wanted to bake bread, but", "Tim and Lily " * 12),
]


@asynccontextmanager
async def running_driver(**settings):
    """Two threads and a batch-invariant bf16 model, unless the settings say otherwise."""
    given = {"dtype": "bfloat16", "device": "cpu", "max_model_len": 256, "cpu_threads": 2, "batch_invariant": True}
    driver = Driver(EngineConfig(**given | settings))
    await driver.start()
    try:
        await driver.wait_ready()
        yield driver
    finally:
        await driver.stop()


async def read(driver, number):
    """(token ids, logprobs as the Worker reports them) of one prompt."""
    ids, logprobs = [], []
    request = Request(f"p{number}", driver.tokenizer.encode(PROMPTS[number]), GREEDY)
    async for output in driver.generate(request):
        ids += output.outputs[0].token_ids
        logprobs += output.outputs[0].logprobs
    assert len(ids) == len(logprobs) == NUM_TOKENS
    return ids, logprobs


async def read_all(driver):
    return await asyncio.gather(*(read(driver, i) for i in range(len(PROMPTS))))


def alone(**settings):
    """Each prompt by itself, one after the other, whole and without the prefix cache."""

    async def run():
        async with running_driver(async_scheduling=False, enable_prefix_caching=False, **settings) as driver:
            return [await read(driver, i) for i in range(len(PROMPTS))]

    return asyncio.run(run())


@pytest.fixture(scope="module")
def bf16_alone():
    return alone()


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"enable_prefix_caching": False}, id="batch of 16"),
        pytest.param({"max_num_batched_tokens": 19}, id="odd chunks"),
        pytest.param({"num_blocks": 24, "watermark": 0.0}, id="preempted"),
        pytest.param(
            {"num_blocks": 24, "watermark": 0.0, "swap_space": 0.05, "swap_policy": "always"}, id="preempted, swapped"
        ),
    ],
)
async def test_bits_do_not_depend_on_the_batch(bf16_alone, settings):
    async with running_driver(**settings) as driver:
        found = await read_all(driver)
        assert (driver.scheduler.num_preemptions > 0) == ("num_blocks" in settings)
    for prompt, expected, got in zip(PROMPTS, bf16_alone, found, strict=True):
        assert got == expected, prompt


async def test_bits_do_not_depend_on_prefix_hits(bf16_alone):
    async with running_driver() as driver:
        for _ in range(2):
            assert await read_all(driver) == bf16_alone
        hits = [(await read_usage(driver, i)).num_cached_tokens for i in range(len(PROMPTS))]
    assert sum(hits) > 300


async def read_usage(driver, number):
    """The last output of one prompt."""
    request = Request(f"u{number}", driver.tokenizer.encode(PROMPTS[number]), GREEDY)
    return [output async for output in driver.generate(request)][-1]


@pytest.mark.slow
async def test_fp32_in_a_batch_of_16_with_odd_chunks():
    expected = await asyncio.to_thread(alone, dtype="float32")
    async with running_driver(dtype="float32", max_num_batched_tokens=19) as driver:
        assert await read_all(driver) == expected
