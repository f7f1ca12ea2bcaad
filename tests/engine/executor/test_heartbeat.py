"""A Worker that has nothing to do and stands still is replaced before the next request comes, which pays nothing."""

import os
import signal

import pytest

import engine.executor.recovery
from engine.config import EngineConfig
from engine.driver import Driver
from engine.request import Request
from engine.sampling_params import SamplingParams
from tests.checkpoints import save_fake_checkpoint
from tests.engine.driving import PROMPT, assert_idle, collect, request, running_driver, until
from tests.fake_device import expected_tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_fake_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def no_first_steps(monkeypatch):
    monkeypatch.setattr(engine.executor.step_watch.StepWatch, "FIRST_STEPS", 0)


def num_heartbeats(path):
    """That a fake Worker has read."""
    return path.stat().st_size if path.exists() else 0


def num_restarts(driver):
    return driver.stats.worker_restarts.values[()]


async def test_an_idle_worker_that_is_stopped_is_replaced_and_no_request_pays():
    """The real Worker, with the model that ships with the code."""
    config = EngineConfig(device="cpu", cpu_threads=1, max_model_len=256, num_blocks=64, step_timeout=2.0)
    driver = Driver(config)
    await driver.start()
    try:
        await driver.wait_ready()
        answers = []
        for name in ("before", "after"):
            params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
            stream = driver.generate(Request(name, driver.tokenizer.encode("Once upon a time"), params))
            [(_, ids, *_)] = await collect(stream)
            answers.append(ids)
            if name == "before":
                assert num_restarts(driver) == 0
                stopped = driver.worker_pid
                os.kill(stopped, signal.SIGSTOP)
                await until(lambda: driver.phase == "restarting", 60)
                await until(lambda: driver.phase == "ready", 120)
        assert answers[0] == answers[1] and len(answers[0]) == 8
        assert num_restarts(driver) == 1, "the request found a Worker that works"
        with pytest.raises(ProcessLookupError):
            os.kill(stopped, 0)
    finally:
        await driver.stop()


async def test_an_idle_worker_that_works_is_left_alone(folder, tmp_path):
    heartbeats = tmp_path / "heartbeats"
    async with running_driver(folder, "--heartbeats", str(heartbeats), step_timeout=2.0) as driver:
        await until(lambda: num_heartbeats(heartbeats) >= 8)
        [(_, ids, *_)] = await collect(driver.generate(request("late")))
        assert list(ids) == expected_tokens(PROMPT, 7, 16)
        assert num_restarts(driver) == 0


async def test_no_heartbeat_is_sent_while_there_is_a_plan_to_wait_for(folder, tmp_path):
    heartbeats = tmp_path / "heartbeats"
    options = ["--heartbeats", str(heartbeats), "--step-seconds", "0.3"]
    async with running_driver(folder, *options, step_timeout=1.0, async_scheduling=True) as driver:
        stream = driver.generate(request("slow", max_tokens=5))
        await until(lambda: driver.num_in_flight == 2)
        seen = num_heartbeats(heartbeats)
        await until(lambda: stream.num_generated_tokens >= 4)
        assert num_heartbeats(heartbeats) <= seen + 1, "one may have been on its way"
        await collect(stream)
        assert num_restarts(driver) == 0


async def test_a_worker_that_hangs_while_idle_is_no_fault_of_a_request_that_comes_then(folder, tmp_path):
    heartbeats = tmp_path / "heartbeats"
    options = ["--hang-at-heartbeat", "2", "--faults-in", "1", "--lives", str(tmp_path / "lives")]
    async with running_driver(folder, *options, "--heartbeats", str(heartbeats), step_timeout=1.0) as driver:
        await until(lambda: num_heartbeats(heartbeats) == 2)
        stream = driver.generate(request("unlucky"))
        await until(lambda: driver.num_in_flight)
        await until(lambda: driver.phase == "restarting")
        assert driver.recovery.suspects_nobody, "the Worker had not come to its plan"
        [(_, ids, *_)] = await collect(stream)
        assert list(ids) == expected_tokens(PROMPT, 7, 16)
        assert num_restarts(driver) == 1
        assert_idle(driver)


async def test_a_worker_that_dies_over_a_heartbeat_is_no_fault_of_a_request_that_comes_then(folder, tmp_path):
    options = ["--hang-at-heartbeat", "1", "--faults-in", "1", "--lives", str(tmp_path / "lives")]
    async with running_driver(folder, *options, step_timeout=10.0) as driver:
        await until(lambda: driver.supervisor.executor.watch.awaits_heartbeat)
        stream = driver.generate(request("unlucky"))
        await until(lambda: driver.num_in_flight)
        os.kill(driver.worker_pid, signal.SIGSEGV)
        await until(lambda: driver.phase == "restarting")
        assert driver.recovery.suspects_nobody
        [(_, ids, *_)] = await collect(stream)
        assert list(ids) == expected_tokens(PROMPT, 7, 16)
