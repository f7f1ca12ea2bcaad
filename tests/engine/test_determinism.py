"""In fp32 a request gives the same text whatever surrounds it: the real Worker, the bundled model."""

import asyncio

import pytest

from engine.request import Request
from engine.sampling_params import SamplingParams
from tests.engine.bundled_driver import CASES, NUM_TOKENS, PROMPTS, read, running_driver, start


def num_loads(driver):
    tier = driver.scheduler.block_manager.host_tier
    return 0 if tier is None else tier.num_loads


async def read_all(driver):
    """Every case, with as many unrelated neighbours as make it a batch of 32."""
    neighbours = [start(driver, f"n{i}", ("seeded", f"Neighbour {i} says " * (i + 1))) for i in range(32 - len(CASES))]
    found = await asyncio.gather(*(read(start(driver, f"c{i}", case)) for i, case in enumerate(CASES)))
    await asyncio.gather(*map(read, neighbours))
    return found


@pytest.fixture(scope="module")
def alone():
    """Each case by itself, one after the other, without overlap, prefix cache or company."""

    async def run():
        async with running_driver(async_scheduling=False, enable_prefix_caching=False) as driver:
            return [await read(start(driver, f"c{i}", case)) for i, case in enumerate(CASES)]

    return asyncio.run(run())


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="batch of 32"),
        pytest.param({"async_scheduling": True}, id="overlapped", marks=pytest.mark.slow),
        pytest.param({"max_num_batched_tokens": 16}, id="token budget 16"),
        pytest.param({"num_blocks": 24, "watermark": 0.0}, id="preempted"),
        pytest.param(
            {"num_blocks": 24, "watermark": 0.0, "swap_space": 0.05, "swap_policy": "always"}, id="preempted, swapped"
        ),
        pytest.param(
            {"num_blocks": 36, "block_size": 8, "enable_prefix_caching": False},
            id="preempted, no cache",
            marks=pytest.mark.slow,
        ),
    ],
)
async def test_text_does_not_depend_on_the_batch(alone, settings):
    async with running_driver(**settings) as driver:
        found = await read_all(driver)
        if "num_blocks" in settings:
            assert driver.scheduler.num_preemptions > 0
            assert ("swap_space" in settings) == bool(num_loads(driver))
        else:
            assert driver.scheduler.num_preemptions == 0
    for case, expected, got in zip(CASES, alone, found, strict=True):
        assert got == expected, case


async def test_slow_reader_gets_the_same_text(alone):
    async with running_driver() as driver:
        streams = [start(driver, f"c{i}", case) for i, case in enumerate(CASES)]
        await driver.drain(60)
        assert [await read(stream) for stream in streams] == alone


def test_seeds_matter_and_greedy_ignores_them(alone):
    texts = dict(zip(CASES, (text for _, text in alone), strict=True))
    assert texts[("seeded", PROMPTS[0])] != texts[("greedy", PROMPTS[0])]
    assert all(len(ids) == NUM_TOKENS for ids, _ in alone)


async def read_samples(driver):
    """Four samples of each of six requests at once: token ids by request and sample."""

    async def read_request(number):
        sampling = SamplingParams(n=4, max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.9, seed=number)
        ids = [[] for _ in range(4)]
        async for output in driver.generate(Request(f"s{number}", driver.tokenizer.encode(PROMPTS[0]), sampling)):
            for sample in output.outputs:
                ids[sample.index] += sample.token_ids
        return ids

    return await asyncio.gather(*map(read_request, range(6)))


@pytest.fixture(scope="module")
def samples_undisturbed():
    async def run():
        async with running_driver(async_scheduling=False, enable_prefix_caching=False) as driver:
            found = await read_samples(driver)
            assert driver.scheduler.num_preemptions == 0
            return found

    return asyncio.run(run())


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="prefix cache"),
        pytest.param({"async_scheduling": True, "enable_prefix_caching": False}, id="overlapped, no cache"),
        pytest.param({"swap_space": 0.05, "swap_policy": "always"}, id="swapped"),
        pytest.param(
            {"num_blocks": 9, "max_model_len": 64, "enable_prefix_caching": False}, id="one group is too large"
        ),
    ],
)
async def test_samples_do_not_depend_on_preemption(samples_undisturbed, settings):
    async with running_driver(**{"num_blocks": 24, "watermark": 0.0, "max_model_len": 128} | settings) as driver:
        assert await read_samples(driver) == samples_undisturbed
        assert driver.scheduler.num_preemptions > 0
        assert ("swap_space" in settings) == bool(num_loads(driver))
