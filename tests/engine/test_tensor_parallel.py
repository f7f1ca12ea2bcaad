"""`--tensor-parallel-size` with real processes on a CPU: the text of one rank, also when a rank is killed."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from engine.errors import ConfigError
from tests.engine.bundled_driver import CASES, read, running_driver, start
from tests.engine.driving import until

SETTINGS = {"num_blocks": 512, "cpu_threads": 1}
NUM_STREAMS = 32
RANKS = int(os.environ.get("RANKS", "2"))  # `make ranks` also runs with 4
FAULT = signal.Signals[os.environ.get("RANK_FAULT", "SIGKILL")]  # `make ranks` also stops a rank


def alive(pids):
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


async def read_streams(driver, fault=None):
    """The texts of 32 streams; `fault(pids)` strikes once all of them run."""
    streams = [start(driver, f"r{i}", CASES[i % len(CASES)]) for i in range(NUM_STREAMS)]
    tasks = [asyncio.create_task(read(stream)) for stream in streams]
    if fault is not None:
        await until(lambda: all(stream.num_generated_tokens > 3 for stream in streams))
        fault(driver.supervisor.executor.pids)
    return await asyncio.gather(*tasks)


@pytest.fixture(scope="module")
def alone():
    async def run():
        async with running_driver(**SETTINGS) as driver:
            return await read_streams(driver)

    return asyncio.run(run())


async def test_ranks_write_what_one_writes_and_the_end_of_one_costs_no_stream(alone):
    async with running_driver(**SETTINGS, tensor_parallel_size=RANKS) as driver:
        pids = driver.supervisor.executor.pids
        assert len(pids) == RANKS
        assert await read_streams(driver) == alone
        assert await read_streams(driver, lambda pids: os.kill(pids[1], FAULT)) == alone
        assert driver.stats.worker_restarts.values[()] == 1
        assert driver.recovery.suspects_nobody, "the end came from outside"
        pids += driver.supervisor.executor.pids
    assert not alive(pids)


@pytest.mark.skipif("RANKS" not in os.environ, reason="`make ranks` runs it: it starts three groups of processes")
async def test_streams_of_ranks_go_on_after_each_level_of_sleep(alone):
    async with running_driver(**SETTINGS, tensor_parallel_size=RANKS) as driver:
        for level in (1, 2):
            streams = [start(driver, f"level{level}-{i}", CASES[i % len(CASES)]) for i in range(8)]
            texts = asyncio.gather(*map(read, streams))
            await until(lambda streams=streams: all(stream.num_generated_tokens > 3 for stream in streams))
            pids = driver.supervisor.executor.pids
            await driver.sleep(level)
            assert driver.sleep_level == level and driver.num_live_requests > 0
            if level == 2:
                assert not alive(pids), "level 2 keeps no rank"
            await driver.wake()
            assert (driver.supervisor.executor.pids == pids) == (level == 1)
            assert await texts == alone[:8]
        assert driver.stats.worker_restarts.values[()] == 0 and driver.recovery.suspects_nobody


async def test_batch_invariance_is_refused():
    with pytest.raises(ConfigError, match="batch_invariant is not served with tensor_parallel_size"):
        async with running_driver(**SETTINGS, tensor_parallel_size=2, batch_invariant=True):
            pass
