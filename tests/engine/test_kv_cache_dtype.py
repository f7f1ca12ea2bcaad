"""A quantised KV cache in the engine: rows are quantised one by one as they are written, so in fp32 a request gives the
same text whatever surrounds it, here too. The real Worker, the bundled model."""

import asyncio

import pytest

from tests.engine.bundled_driver import CASES, read, running_driver, start

GREEDY_AND_SEEDED = [case for case in CASES if case[0] in ("greedy", "seeded")]


async def read_together(driver, copies=2):
    """Every case, `copies` times at once."""
    names = [(f"{copy}-{i}", case) for copy in range(copies) for i, case in enumerate(GREEDY_AND_SEEDED)]
    return await asyncio.gather(*(read(start(driver, name, case)) for name, case in names))


async def read_alone(**settings):
    async with running_driver(async_scheduling=False, enable_prefix_caching=False, **settings) as driver:
        return [await read(start(driver, f"c{i}", case)) for i, case in enumerate(GREEDY_AND_SEEDED)]


@pytest.fixture(scope="module")
def alone():
    return asyncio.run(read_alone(kv_cache_dtype="int8"))


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="batch of 16"),
        pytest.param({"async_scheduling": True, "max_num_batched_tokens": 16}, id="overlapped, token budget 16"),
        pytest.param({"num_blocks": 24, "watermark": 0.0}, id="preempted"),
    ],
)
async def test_int8_text_does_not_depend_on_the_batch(alone, settings):
    async with running_driver(kv_cache_dtype="int8", **settings) as driver:
        assert await read_together(driver) == alone * 2
        assert (driver.scheduler.num_preemptions > 0) == ("num_blocks" in settings)


@pytest.mark.parametrize("kv_cache_dtype", ["int8", pytest.param("int4", marks=pytest.mark.slow)])
async def test_prefix_hits_give_the_same_text(kv_cache_dtype):
    expected = await read_alone(kv_cache_dtype=kv_cache_dtype)
    async with running_driver(kv_cache_dtype=kv_cache_dtype) as driver:
        for _ in range(2):
            assert [await read(start(driver, f"c{i}", case)) for i, case in enumerate(GREEDY_AND_SEEDED)] == expected
        assert driver.scheduler.block_manager.num_prefix_hits > 0
        assert driver.model.kv_cache_dtype == kv_cache_dtype and driver.model.dtype == "float32"


@pytest.mark.slow
async def test_the_formats_differ_from_the_plain_cache_and_from_each_other():
    """Else the setting would not reach the kernels."""
    texts = [await read_alone(kv_cache_dtype=name) for name in ("auto", "fp8", "int4")]
    assert texts[0] != texts[1] != texts[2] != texts[0]
