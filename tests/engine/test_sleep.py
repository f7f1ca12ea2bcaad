"""Sleep: the Worker leaves its device in order, the Driver keeps the journal, and streams go on after the wake."""

import asyncio
import os
import signal

import pytest

import engine.executor.process_state
from engine.errors import DeadlineError, QueueFullError
from engine.request import Request
from engine.sampling_params import SamplingParams
from tests.checkpoints import save_fake_checkpoint
from tests.engine.driving import PROMPT, assert_idle, collect, request, running_driver, until
from tests.fake_device import expected_tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_fake_checkpoint(tmp_path_factory.mktemp("model"))


def start(driver, count, max_tokens=60, first=0):
    return [
        driver.generate(request(f"r{first + i}", [*PROMPT, 97 + first + i], max_tokens=max_tokens))
        for i in range(count)
    ]


def assert_complete(results, max_tokens=60, first=0):
    for i, [(_, ids, *_)] in enumerate(results):
        assert list(ids) == expected_tokens([*PROMPT, 97 + first + i], 7, max_tokens), "a token is lost or different"


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("level", [1, 2])
async def test_live_streams_pause_and_go_on(folder, level, async_scheduling):
    async with running_driver(folder, "--step-seconds", "0.002", async_scheduling=async_scheduling) as driver:
        streams = start(driver, 5)
        results = asyncio.gather(*map(collect, streams))
        for round in range(3):
            await until(lambda round=round: streams[0].num_generated_tokens > 10 * (round + 1))
            pid = driver.worker_pid
            await driver.sleep(level)
            seen = [stream.num_generated_tokens for stream in streams]
            assert driver.phase == "sleeping" and driver.sleep_level == level and driver.health() is None
            if level == 2:
                with pytest.raises(ProcessLookupError):
                    os.kill(pid, 0)
            await asyncio.sleep(0.02)
            assert [stream.num_generated_tokens for stream in streams] == seen and driver.num_live_requests == 5
            await driver.wake()
            assert driver.phase == "ready" and driver.sleep_level == 0
            assert (driver.worker_pid == pid) == (level == 1)
        assert_complete(await results)
        assert driver.stats.worker_restarts.values[()] == 0 and driver.recovery.suspects_nobody
        assert_idle(driver)


async def test_a_request_wakes_the_model_and_the_paused_streams_go_on(folder):
    async with running_driver(folder, "--step-seconds", "0.002") as driver:
        paused = start(driver, 2)
        await until(lambda: paused[0].num_generated_tokens > 5)
        await driver.sleep()
        new = start(driver, 3, first=2)
        assert_complete(await asyncio.gather(*map(collect, [*paused, *new])))
        assert driver.phase == "ready"
        assert_idle(driver)


async def test_limits_hold_while_the_model_sleeps_and_wakes(folder):
    async with running_driver(folder, "--load-seconds", "0.4", max_queued_requests=2) as driver:
        await driver.sleep()
        late = driver.generate(Request("late", PROMPT, SamplingParams(), timeout=0.05))
        [waits] = start(driver, 1)
        with pytest.raises(QueueFullError):
            start(driver, 1, first=1)
        with pytest.raises(DeadlineError):
            await collect(late)
        assert driver.phase in ("sleeping", "waking")
        assert_complete([await collect(waits)])


async def test_requests_that_end_in_their_sleep_leave_nothing(folder):
    async with running_driver(folder, "--step-seconds", "0.002") as driver:
        streams = start(driver, 3, max_tokens=300)
        await until(lambda: streams[0].num_generated_tokens > 5)
        await driver.sleep(1)
        for stream in streams:
            driver.abort(stream.request.request_id)
        await driver.wake()
        assert_idle(driver)
        assert_complete([await collect(start(driver, 1)[0])])


async def test_sleep_deepens_and_repeats(folder):
    async with running_driver(folder) as driver:
        await driver.wake()  # is awake
        await driver.sleep(1)
        pid = driver.worker_pid
        await driver.sleep(2)
        assert driver.sleep_level == 2
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        await driver.sleep(1)
        assert driver.sleep_level == 2
        assert_complete([await collect(start(driver, 1)[0])])


async def test_a_worker_that_dies_in_its_sleep_is_replaced_at_the_wake(folder):
    async with running_driver(folder, "--step-seconds", "0.002") as driver:
        streams = start(driver, 2)
        await until(lambda: streams[0].num_generated_tokens > 5)
        await driver.sleep(1)
        os.kill(driver.worker_pid, signal.SIGKILL)
        await driver.wake()
        assert_complete(await asyncio.gather(*map(collect, streams)))
        assert driver.stats.worker_restarts.values[()] == 1 and driver.recovery.suspects_nobody


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
async def test_no_rank_waits_for_one_that_is_lost_in_its_sleep(folder, fault, monkeypatch):
    """The first rank would wait for the other's part of a sum for as long as a Worker may load."""
    monkeypatch.setattr(engine.executor.process_state, "LOOK_SECONDS", 0.02)
    async with running_driver(folder, "--wake-seconds", "60", tensor_parallel_size=2) as driver:
        await driver.sleep(1)
        os.kill(driver.supervisor.executor.pids[1], fault)
        await asyncio.sleep(0.5)
        [stream] = start(driver, 1)
        assert_complete([await asyncio.wait_for(collect(stream), 30)])
        assert driver.stats.worker_restarts.values[()] == 1 and driver.recovery.suspects_nobody


@pytest.mark.parametrize("level", [1, 2])
async def test_the_way_to_sleep_may_take_longer_than_a_step(folder, level):
    """The weights of a large model move to host memory, or a pool to a slow disk."""
    async with running_driver(folder, "--sleep-seconds", "1.2", step_timeout=0.1) as driver:
        assert_complete([await collect(start(driver, 1)[0])])
        await driver.sleep(level)
        assert driver.phase == "sleeping"
        await driver.wake()
        assert driver.stats.worker_restarts.values[()] == 0


async def test_a_wake_during_the_way_to_sleep_is_not_lost(folder):
    async with running_driver(folder, "--step-seconds", "0.02") as driver:
        for first in range(0, 6, 2):
            [stream] = start(driver, 1, max_tokens=20, first=first)
            await until(lambda stream=stream: stream.num_generated_tokens > 2)
            asleep = asyncio.create_task(driver.sleep(1 + first % 4 // 2))
            await asyncio.sleep(0.01 * first)
            [new] = start(driver, 1, max_tokens=20, first=first + 1)
            results = await asyncio.wait_for(asyncio.gather(collect(stream), collect(new)), 20)
            assert_complete(results, 20, first=first)
            await asyncio.wait_for(asleep, 5)


async def test_sleep_after_idle_seconds(folder):
    async with running_driver(folder, sleep_after=0.15) as driver:
        for name in range(2):
            assert_complete([await collect(start(driver, 1, first=name)[0])], first=name)
            assert driver.phase == "ready"
            await until(lambda: driver.phase == "sleeping", 5)
            assert driver.sleep_level == 2


async def test_drain_finishes_the_streams_of_a_sleeping_model(folder):
    async with running_driver(folder, "--step-seconds", "0.002") as driver:
        streams = start(driver, 2)
        await until(lambda: streams[0].num_generated_tokens > 5)
        await driver.sleep()
        assert await driver.drain(20)
        assert_complete(await asyncio.gather(*map(collect, streams)))


async def test_a_server_ends_while_its_model_sleeps(folder):
    for level in (1, 2):
        async with running_driver(folder) as driver:
            await driver.sleep(level)
            pid = driver.worker_pid
            assert await driver.drain(1)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_cycles_of_sleep_and_wake_leak_nothing(folder):
    """`make sleep-cycles` does it with a real Worker, a hundred times."""
    async with running_driver(folder) as driver:
        await driver.sleep(2)
        await driver.wake()
        before = len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())
        for cycle in range(4):
            await driver.sleep(1 + cycle % 2)
            await driver.wake()
        assert (len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())) == before
        assert_complete([await collect(start(driver, 1)[0])])
