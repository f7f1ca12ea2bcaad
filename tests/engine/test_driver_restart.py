"""The journal: streams live through the death of the Worker, whatever it dies of, and get every token once."""

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
import time

import pytest

import engine.executor.executor
import engine.executor.process_state
import engine.executor.recovery
import engine.executor.step_durations
from engine.errors import EngineError, InvalidRequestError, QueueFullError, UnavailableError
from engine.outputs import FinishReason
from engine.request import Request
from engine.sampling_params import BeamSearchParams, SamplingParams
from tests.checkpoints import save_fake_checkpoint
from tests.engine.driving import PROMPT, assert_idle, collect, request, running_driver, until
from tests.fake_device import expected_tokens

POISON = b"drink this!"
POISON_TOKEN = str(ord("!"))
STEP_TIMEOUT = 0.6  # seconds; a fake Worker answers at once, but the machine may be busy


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_fake_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def quick_restarts(monkeypatch):
    monkeypatch.setattr(engine.executor.recovery, "FIRST_BACKOFF", 0.02)


@pytest.fixture
def lives(tmp_path):
    """Counts the lives of the Worker."""
    path = tmp_path / "lives"
    path.touch()
    return path


def start(driver, count, max_tokens=40, **params):
    return [driver.generate(request(f"r{i}", [*PROMPT, 97 + i], max_tokens=max_tokens, **params)) for i in range(count)]


def assert_complete(results, max_tokens=40):
    for i, [(text, ids, reason, _)] in enumerate(results):
        expected = expected_tokens([*PROMPT, 97 + i], 7, max_tokens)
        assert list(ids) == expected, "a token is lost, doubled or different"
        assert text == bytes(expected).decode()
        assert reason is FinishReason.LENGTH


FAULTS = {
    "exit": ["--die-at-step", "6"],
    "not a message": ["--garbage-at-step", "6"],
    "a sequence without its token": ["--uneven-at-step", "6"],
    "another step's result": ["--wrong-step-at-step", "6"],
    "hang": ["--hang-at-step", "12"],
    "hang in a first step": ["--hang-at-step", "3"],
}


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("fault", FAULTS)
async def test_streams_go_on_whatever_the_worker_dies_of(folder, lives, fault, async_scheduling):
    options = [*FAULTS[fault], "--faults-in", "1", "--lives", str(lives)]
    async with running_driver(folder, *options, step_timeout=STEP_TIMEOUT, async_scheduling=async_scheduling) as driver:
        pid = driver.worker_pid
        assert_complete(await asyncio.gather(*map(collect, start(driver, 5))))
        assert lives.stat().st_size == 2
        assert driver.stats.worker_restarts.values[()] == 1
        assert driver.stats.recomputed_sequences.values[()] == 5
        assert driver.stats.recomputed_tokens.values[()] >= 5 * 6
        assert driver.phase == "ready" and driver.health() is None
        assert_idle(driver)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV])
async def test_streams_live_through_signals_again_and_again(folder, number, monkeypatch):
    monkeypatch.setattr(engine.executor.process_state, "LOOK_SECONDS", 0.05)
    async with running_driver(folder, "--step-seconds", "0.01", step_timeout=STEP_TIMEOUT) as driver:
        streams = start(driver, 6, max_tokens=80)
        results = asyncio.gather(*map(collect, streams))
        for _ in range(3):
            seen = streams[0].num_generated_tokens
            await until(lambda seen=seen: streams[0].num_generated_tokens >= seen + 10)
            os.kill(driver.worker_pid, number)
            await until(lambda: driver.phase == "restarting")
            await until(lambda: driver.phase == "ready")
        assert_complete(await results, max_tokens=80)
        assert driver.stats.worker_restarts.values[()] == 3
        assert_idle(driver)


async def test_stop_strings_logprobs_and_samples_go_on_where_they_were(folder, lives):
    ids = expected_tokens(PROMPT, 7, 30)
    stop = bytes(ids[12:15]).decode()
    options = ["--faults-in", "1,2", "--die-at-step", "8", "--lives", str(lives)]
    async with running_driver(folder, *options) as driver:
        stopped = driver.generate(request("stop", max_tokens=30, stop=[stop]))
        several = driver.generate(request("several", PROMPT * 10, n=3, max_tokens=20, logprobs=1))
        [found] = await collect(stopped)
        end = bytes(ids).decode().index(stop)
        assert found == (bytes(ids).decode()[:end], tuple(ids[: end + 3]), FinishReason.STOP, stop)
        parts = [part async for output in several for part in output.outputs]
        samples = [[t for p in parts if p.index == i for t in p.token_ids] for i in range(3)]
        assert samples[0] == expected_tokens(PROMPT * 10, 7, 20)
        assert [len(sample) for sample in samples] == [20, 20, 20]
        assert sum(len(part.logprobs) for part in parts) == 60
        assert lives.stat().st_size == 3
        assert_idle(driver)


async def test_preemptions_and_deaths_together(folder, lives):
    options = ["--faults-in", "1,2", "--die-at-step", "30", "--lives", str(lives)]
    async with running_driver(folder, *options, num_blocks=8, watermark=0.0) as driver:
        assert_complete(await asyncio.gather(*map(collect, start(driver, 6, max_tokens=60))), max_tokens=60)
        assert driver.scheduler.num_preemptions > 0 and lives.stat().st_size == 3
        assert_idle(driver)


async def test_an_idle_worker_that_dies_is_there_again_for_the_next_request(folder):
    async with running_driver(folder) as driver:
        os.kill(driver.worker_pid, signal.SIGKILL)
        await until(lambda: driver.phase == "restarting")
        await until(lambda: driver.phase == "ready")
        assert_complete(await asyncio.gather(*map(collect, start(driver, 1))))


async def test_an_idle_worker_that_was_stopped_is_noticed_by_the_next_request(folder):
    async with running_driver(folder, step_timeout=STEP_TIMEOUT) as driver:
        os.kill(driver.worker_pid, signal.SIGSTOP)
        assert_complete(await asyncio.gather(*map(collect, start(driver, 2))))
        assert driver.stats.worker_restarts.values[()] == 1


async def stop_long_enough(pid, seconds):
    os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(seconds)
    os.kill(pid, signal.SIGCONT)


async def test_a_stopped_worker_is_replaced_long_before_a_step_may_take_so_long(folder):
    """With default settings, amid streams."""
    async with running_driver(folder, "--step-seconds", "0.01") as driver:
        streams = start(driver, 4, max_tokens=80)
        await until(lambda: streams[0].num_generated_tokens > 10)
        os.kill(driver.worker_pid, signal.SIGSTOP)
        started = time.monotonic()
        await until(lambda: driver.phase == "restarting")
        assert 1.9 < time.monotonic() - started < 5
        assert driver.recovery.suspects_nobody
        assert_complete(await asyncio.gather(*map(collect, streams)), max_tokens=80)
        assert driver.stats.worker_restarts.values[()] == 1


async def test_a_hang_is_noticed_by_what_steps_took_before(folder, lives, monkeypatch):
    """The step timeout is a minute here."""
    monkeypatch.setattr(engine.executor.step_durations, "MIN_LIMIT", 1.0)
    monkeypatch.setattr(engine.executor.step_watch.StepWatch, "TICK_SECONDS", 0.1)
    options = ["--hang-at-step", "60", "--faults-in", "1", "--lives", str(lives)]
    async with running_driver(folder, *options) as driver:
        streams = start(driver, 3, max_tokens=100)
        await until(lambda: driver.phase == "restarting", 15)
        assert_complete(await asyncio.gather(*map(collect, streams)), max_tokens=100)
        assert driver.stats.worker_restarts.values[()] == 1


async def test_a_worker_in_a_debugger_may_stand_still_for_as_long_as_a_step_may_take(folder, lives, monkeypatch):
    monkeypatch.setattr(engine.executor.step_durations, "MIN_LIMIT", 0.5)
    monkeypatch.setattr(engine.executor.step_watch.StepWatch, "TICK_SECONDS", 0.1)
    monkeypatch.setattr(engine.executor.executor, "is_traced", lambda pid: True)
    options = ["--hang-at-step", "60", "--faults-in", "1", "--lives", str(lives)]
    async with running_driver(folder, *options, step_timeout=3.0) as driver:
        streams = start(driver, 3, max_tokens=100)
        await until(lambda: driver.supervisor.executor.watch.silence > 2.5)
        assert driver.phase == "ready"
        assert_complete(await asyncio.gather(*map(collect, streams)), max_tokens=100)
        assert driver.recovery.suspects_nobody


async def test_a_worker_that_answers_while_it_writes_its_stacks_stays(folder, monkeypatch):
    monkeypatch.setattr(engine.executor.step_durations, "MIN_LIMIT", 0.5)
    monkeypatch.setattr(engine.executor.step_watch.StepWatch, "TICK_SECONDS", 0.1)
    monkeypatch.setattr(engine.executor.executor, "STACK_DUMP_SECONDS", 2.0)
    async with running_driver(folder, "--step-seconds", "0.01") as driver:
        streams = start(driver, 2, max_tokens=100)
        await until(lambda: streams[0].num_generated_tokens > 30)
        os.kill(driver.worker_pid, signal.SIGSTOP)
        await until(lambda: driver.supervisor.executor._killed is not None)
        os.kill(driver.worker_pid, signal.SIGCONT)
        assert_complete(await asyncio.gather(*map(collect, streams)), max_tokens=100)
        await until(lambda: driver.supervisor.executor._killed is None)
        assert driver.stats.worker_restarts.values[()] == 0
        assert_complete(await asyncio.gather(*map(collect, start(driver, 2, max_tokens=100))), max_tokens=100)


async def test_a_worker_that_is_let_go_on_is_left_alone(folder):
    async with running_driver(folder, "--step-seconds", "0.01") as driver:
        streams = start(driver, 2, max_tokens=60)
        await until(lambda: streams[0].num_generated_tokens > 10)
        await stop_long_enough(driver.worker_pid, 1.2)
        assert_complete(await asyncio.gather(*map(collect, streams)), max_tokens=60)
        assert driver.stats.worker_restarts.values[()] == 0


async def test_looks_at_a_process_that_goes_on_now_and_then_never_find_it_stopped(monkeypatch):
    """A limiter of processor time stops and continues a process many times a second."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "while True: pass")
    try:
        monkeypatch.setattr(engine.executor.process_state, "LOOK_SECONDS", 0.06)
        watch = asyncio.create_task(engine.executor.process_state.wait_until_stopped(process.pid))
        for _ in range(8):
            os.kill(process.pid, signal.SIGSTOP)
            await asyncio.sleep(0.1)
            os.kill(process.pid, signal.SIGCONT)
            await asyncio.sleep(0.03)
        assert not watch.done()
        os.kill(process.pid, signal.SIGSTOP)
        await asyncio.wait_for(watch, 5)
    finally:
        process.kill()
        await process.wait()


async def test_a_worker_that_is_stopped_while_it_loads_is_replaced(folder, lives, monkeypatch):
    monkeypatch.setattr(engine.executor.process_state, "LOOK_SECONDS", 0.05)
    options = ["--hang-loading", "--faults-in", "1,3", "--lives", str(lives)]
    async with running_driver(folder, *options, ready=False) as driver:
        for life in (1, 3):  # at the start of the server, and when it is started again
            await until(lambda life=life: lives.stat().st_size == life)
            os.kill(driver.worker_pid, signal.SIGSTOP)
            await until(lambda life=life: driver.phase == "ready" and lives.stat().st_size == life + 1)
            assert_complete(await asyncio.gather(*map(collect, start(driver, 1))))
            if life == 1:
                os.kill(driver.worker_pid, signal.SIGKILL)
                await until(lambda: driver.phase == "restarting")
        assert driver.stats.worker_restarts.values[()] == 3


async def test_a_slow_step_is_not_a_hang(folder):
    async with running_driver(folder, "--step-seconds", "0.3", step_timeout=1.2) as driver:
        assert_complete(await asyncio.gather(*map(collect, start(driver, 2, max_tokens=12))), max_tokens=12)
        assert driver.stats.worker_restarts.values[()] == 0


async def test_a_loop_that_stood_still_does_not_kill_a_worker_that_works(folder):
    async with running_driver(folder, "--step-seconds", "0.05", step_timeout=1.0) as driver:
        results = asyncio.gather(*map(collect, start(driver, 2, max_tokens=20)))
        await until(lambda: driver.stats.generation_tokens.values[()] > 20)
        time.sleep(2.5)  # noqa: ASYNC251 what is tested
        assert_complete(await results, max_tokens=20)
        assert driver.stats.worker_restarts.values[()] == 0


# During a restart.


async def test_requests_that_come_during_a_restart_wait_and_are_served(folder):
    async with running_driver(folder, "--load-seconds", "1.5", max_queued_requests=4) as driver:
        os.kill(driver.worker_pid, signal.SIGKILL)
        await until(lambda: driver.phase == "restarting")
        streams = start(driver, 4)
        with pytest.raises(QueueFullError):
            driver.generate(request("too many"))
        driver.stats_snapshot()
        assert driver.stats.num_requests_waiting.value == 4
        await asyncio.sleep(0.2)
        assert driver.phase == "restarting" and driver.health() is None
        assert_complete(await asyncio.gather(*map(collect, streams)))


async def test_abort_during_a_restart(folder):
    async with running_driver(folder, "--load-seconds", "0.3", "--step-seconds", "0.01") as driver:
        gone, *streams = [driver.generate(request("gone", max_tokens=300)), *start(driver, 3)]
        await until(lambda: streams[0].num_generated_tokens > 5)
        os.kill(driver.worker_pid, signal.SIGKILL)
        await until(lambda: driver.phase == "restarting")
        gone.close()
        late = driver.generate(request("late"))
        late.close()
        assert_complete(await asyncio.gather(*map(collect, streams)))
        assert driver.stats.request_success.values[("abort",)] == 2
        assert_idle(driver)


async def test_drain_during_a_restart_finishes_what_runs(folder):
    async with running_driver(folder, "--load-seconds", "0.3", "--step-seconds", "0.01") as driver:
        streams = start(driver, 3)
        await until(lambda: streams[0].num_generated_tokens > 5)
        os.kill(driver.worker_pid, signal.SIGKILL)
        await until(lambda: driver.phase == "restarting")
        drained = asyncio.create_task(driver.drain(20))
        await until(lambda: driver.phase == "draining")
        assert_complete(await asyncio.gather(*map(collect, streams)))
        assert await drained and driver.phase == "draining"


async def test_drain_gives_up_during_a_restart(folder):
    async with running_driver(folder, "--load-seconds", "1.0") as driver:
        os.kill(driver.worker_pid, signal.SIGKILL)
        await until(lambda: driver.phase == "restarting")
        [stream] = start(driver, 1)
        assert not await driver.drain(0.1)
        with pytest.raises(UnavailableError, match="before this request began"):
            await collect(stream)


@pytest.mark.parametrize("delay", [0.0, 0.002, 0.05, 0.3])
async def test_stop_at_any_moment_of_a_restart_leaves_no_process(folder, delay):
    async with running_driver(folder, "--load-seconds", "0.2") as driver:
        streams = start(driver, 2, max_tokens=400)
        os.kill(driver.worker_pid, signal.SIGKILL)
        await until(lambda: driver.phase == "restarting")
        await asyncio.sleep(delay)
        await driver.stop()
        for outcome in await asyncio.gather(*map(collect, streams), return_exceptions=True):
            assert isinstance(outcome, EngineError) or len(outcome[0][1]) == 400
        with pytest.raises(ProcessLookupError):
            os.kill(driver.worker_pid, 0)


async def test_stop_in_the_turn_in_which_the_new_worker_is_ready(folder, monkeypatch):
    stops = []

    async def ready_and_stopped(executor, on_progress):
        ready = await wait_ready(executor, on_progress)
        stops.append(asyncio.create_task(driver.stop()))
        await asyncio.sleep(0)  # it has cancelled the loop, which has this result to take in
        return ready

    async with running_driver(folder) as driver:
        wait_ready = engine.executor.executor.Executor.wait_ready
        monkeypatch.setattr(engine.executor.executor.Executor, "wait_ready", ready_and_stopped)
        os.kill(driver.worker_pid, signal.SIGKILL)
        await until(lambda: stops)
        _, hanging = await asyncio.wait(stops, timeout=10)
        assert not hanging
        with pytest.raises(ProcessLookupError):
            os.kill(driver.worker_pid, 0)


@pytest.mark.parametrize("stopped_at_ready", [True, False])
async def test_no_content_of_a_lost_pool_is_written_to_the_disk(folder, tmp_path, monkeypatch, stopped_at_ready):
    """Else the next server reads what the new Worker had in its place, under the digests of the old blocks."""
    flushed, restarts = [], []

    async def flush(*plan):
        flushed.append(plan)

    monkeypatch.setattr(engine.executor.executor.Executor, "flush", flush)

    async def restart_and_stop(*arguments):
        ready = await restart(*arguments)
        restarts.append(asyncio.create_task(driver.stop() if stopped_at_ready else asyncio.sleep(0)))
        await asyncio.sleep(0)
        return ready

    async with running_driver(folder, disk_cache=str(tmp_path), swap_space=1.0) as driver:
        restart = driver.supervisor.restart
        monkeypatch.setattr(driver.supervisor, "restart", restart_and_stop)
        assert_complete([await collect(start(driver, 1)[0])])
        os.kill(driver.worker_pid, signal.SIGKILL)
        await until(lambda: restarts)
        await restarts[0]
    assert bool(flushed) != stopped_at_ready


@pytest.mark.parametrize("fault", ["--fail-loading=no memory", "--hang-loading"])
async def test_a_restart_that_does_not_load_is_one_more_death(folder, lives, fault):
    options = [fault, "--faults-in", "2", "--lives", str(lives), "--step-seconds", "0.01"]
    async with running_driver(folder, *options) as driver:
        driver.supervisor.load_timeout = 3.0
        streams = start(driver, 3)
        await until(lambda: streams[0].num_generated_tokens > 5)
        os.kill(driver.worker_pid, signal.SIGKILL)
        assert_complete(await asyncio.gather(*map(collect, streams)))
        assert lives.stat().st_size == 3
        assert driver.stats.worker_restarts.values[()] == 2


async def test_a_budget_that_is_spent_ends_the_engine_with_the_cause(folder, lives):
    options = ["--die-at-step", "3", "--lives", str(lives)]
    async with running_driver(folder, *options, max_worker_restarts=2) as driver:
        streams = start(driver, 2)
        for outcome in await asyncio.gather(*map(collect, streams), return_exceptions=True):
            assert isinstance(outcome, EngineError)
        error = str(await driver.wait_failed())
        assert "status 3" in error and "max_worker_restarts is 2" in error
        assert "status 3" in driver.health() and driver.phase == "stopped"
        assert lives.stat().st_size == 3


async def test_a_smaller_pool_after_the_restart(folder, lives):
    options = ["--num-blocks-later", "4", "--lives", str(lives), "--step-seconds", "0.005"]
    async with running_driver(folder, *options) as driver:
        short = driver.generate(request("short", max_tokens=40))
        long = driver.generate(request("long", max_tokens=100))
        open_ended = driver.generate(request("open", max_tokens=None))
        await until(lambda: short.num_generated_tokens > 5)
        os.kill(driver.worker_pid, signal.SIGKILL)
        [sample] = await collect(short)
        assert list(sample[1]) == expected_tokens(PROMPT, 7, 40)
        with pytest.raises(EngineError, match="too small"):
            await collect(long)
        [(_, ids, reason, _)] = await collect(open_ended)
        assert list(ids) == expected_tokens(PROMPT, 7, 64 - len(PROMPT)) and reason is FinishReason.LENGTH
        assert driver.model.max_model_len == 64
        assert_idle(driver)


# Requests that kill.


def plans_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("async_scheduling", [True, False])
async def test_a_deadly_request_ends_alone(folder, lives, tmp_path, async_scheduling):
    plans = tmp_path / "plans"
    options = ["--die-on-token", POISON_TOKEN, "--lives", str(lives), "--plans", str(plans), "--step-seconds", "0.005"]
    async with running_driver(folder, *options, async_scheduling=async_scheduling) as driver:
        streams = start(driver, 5, max_tokens=60)
        await until(lambda: streams[0].num_generated_tokens > 3)
        poison = driver.generate(request("poison", POISON))
        later = driver.generate(request("later"))
        with pytest.raises(EngineError, match="dies of this request: the Worker process was ended by SIGABRT"):
            await collect(poison)
        assert_complete(await asyncio.gather(*map(collect, streams)), max_tokens=60)
        [sample] = await collect(later)
        assert list(sample[1]) == expected_tokens(PROMPT, 7, 16)
        assert lives.stat().st_size == 4, "two deaths, one alone, and then all is well"
        assert driver.phase == "ready"
        assert_idle(driver)
    in_life = {life: [ids for number, ids in plans_of(plans) if number == life] for life in (1, 2, 3, 4)}
    assert all(len(ids) == 1 for ids in in_life[3]), "suspects run alone"
    assert in_life[3][-1] == [5] and len(in_life[3]) > 1, "one after the other, and the deadly one died alone"
    assert all(5 not in ids for ids in in_life[4]) and max(map(len, in_life[4])) == 6


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_who_is_hit_from_outside_is_never_guilty(folder, number, monkeypatch):
    """However often, and with no token in between."""
    monkeypatch.setattr(engine.executor.process_state, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(engine.executor.step_watch.StepWatch, "FIRST_STEPS", 0)
    async with running_driver(folder, "--step-seconds", "0.6", step_timeout=1.2) as driver:
        streams = start(driver, 3, max_tokens=4)
        for _ in range(4):
            await until(lambda: driver.phase == "ready" and driver.num_in_flight == 2)
            os.kill(driver.worker_pid, number)
            await until(lambda: driver.phase == "restarting")
            assert driver.recovery.suspect is None
        assert driver.stats.generation_tokens.values[()] == 0
        assert_complete(await asyncio.gather(*map(collect, streams)), max_tokens=4)


async def test_a_crash_is_not_from_outside_and_a_suspect_stays_one(folder):
    async with running_driver(folder, "--step-seconds", "0.5", async_scheduling=False) as driver:
        streams = start(driver, 3, max_tokens=4)
        for number in (signal.SIGSEGV, signal.SIGSEGV, signal.SIGKILL, signal.SIGSEGV):
            await until(lambda: driver.phase == "ready" and driver.num_in_flight)
            os.kill(driver.worker_pid, number)
            await until(lambda: driver.phase == "restarting")
        with pytest.raises(EngineError, match="dies of this request"):
            await collect(streams[0])
        results = await asyncio.gather(*map(collect, streams[1:]))
        for i, [sample] in enumerate(results, start=1):
            assert list(sample[1]) == expected_tokens([*PROMPT, 97 + i], 7, 4)
        assert driver.stats.worker_restarts.values[()] == 4


async def test_lack_of_memory_is_not_from_outside(folder, monkeypatch):
    kills = iter(range(1000))
    monkeypatch.setattr(engine.executor.process_state, "count_oom_kills", lambda: next(kills))
    async with running_driver(folder, "--step-seconds", "0.5") as driver:
        stream = driver.generate(request("greedy for memory", max_tokens=4))
        for _ in range(3):
            await until(lambda: driver.phase == "ready" and driver.num_in_flight)
            os.kill(driver.worker_pid, signal.SIGKILL)
            await until(lambda: driver.phase == "restarting")
        with pytest.raises(EngineError, match="dies of this request"):
            await collect(stream)


def test_process_state():
    assert engine.executor.process_state.count_oom_kills() is not None, "every Linux since 4.13 has it"
    assert engine.executor.process_state.stopped_at(os.getpid()) is None, "it runs"
    assert engine.executor.process_state.stopped_at(2**22 + 1) is None and not engine.executor.process_state.is_traced(
        2**22 + 1
    )
    assert not engine.executor.process_state.is_traced(os.getpid())


def test_a_process_that_a_debugger_holds_is_not_stopped():
    script = "import ctypes, os; ctypes.CDLL(None).ptrace(0, 0, 0, 0); print(flush=True); os.kill(os.getpid(), 19)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert engine.executor.process_state.is_traced(process.pid)
        assert engine.executor.process_state.stopped_at(process.pid) is None
        process.kill()


async def test_samples_of_a_deadly_request_run_alone_together(folder, lives, tmp_path):
    plans = tmp_path / "plans"
    options = ["--die-on-token", POISON_TOKEN, "--lives", str(lives), "--plans", str(plans)]
    async with running_driver(folder, *options) as driver:
        poison = driver.generate(request("poison", POISON, n=2))
        streams = start(driver, 2)
        with pytest.raises(EngineError, match="dies of this request"):
            await collect(poison)
        assert_complete(await asyncio.gather(*map(collect, streams)))
        assert_idle(driver)
    assert [ids for life, ids in plans_of(plans) if life == 3] == [[0, 1]]


async def test_two_deadly_requests(folder, lives):
    options = ["--die-on-token", POISON_TOKEN, "--lives", str(lives)]
    async with running_driver(folder, *options) as driver:
        poisons = [driver.generate(request(f"poison {i}", POISON * (i + 1))) for i in range(2)]
        streams = start(driver, 4)
        for outcome in await asyncio.gather(*map(collect, poisons), return_exceptions=True):
            assert isinstance(outcome, EngineError)
        assert_complete(await asyncio.gather(*map(collect, streams)))
        assert lives.stat().st_size == 5 and driver.phase == "ready"
        assert_idle(driver)


async def test_a_suspect_that_is_aborted_lets_the_others_go_on(folder, lives, tmp_path):
    plans = tmp_path / "plans"
    options = ["--die-on-token", POISON_TOKEN, "--lives", str(lives), "--plans", str(plans), "--step-seconds", "0.1"]
    async with running_driver(folder, *options, max_queued_requests=4) as driver:
        poison = driver.generate(request("poison", POISON, max_tokens=1))  # so a second plan could follow the first
        streams = start(driver, 3, max_tokens=10)
        await until(lambda: plans.exists() and [3, [0]] in plans_of(plans))
        newcomer = driver.generate(request("newcomer", max_tokens=3))
        assert driver.scheduler.num_waiting == 4 and not driver.scheduler.waiting
        with pytest.raises(QueueFullError):
            driver.generate(request("too many"))
        poison.close()  # the plan in flight still kills
        assert_complete(await asyncio.gather(*map(collect, streams)), max_tokens=10)
        [sample] = await collect(newcomer)
        assert list(sample[1]) == expected_tokens(PROMPT, 7, 3)
        assert lives.stat().st_size == 4
        assert_idle(driver)


# Numbers that are not.


async def test_blocks_of_a_failed_request_never_stay_in_the_cache(folder):
    """They are registered when the plan is sent, which is before the failure is known."""
    bad = [*b"a long prompt whose logits are not finite" * 2, ord("!")]
    async with running_driver(folder, "--fail-on-token", POISON_TOKEN, "--step-seconds", "0.05") as driver:
        cached = driver.scheduler.block_manager.cached_blocks
        first = driver.generate(request("first", bad))
        await until(lambda: len(cached) == 5)
        second = driver.generate(request("second", bad))
        good = driver.generate(request("good", bad[:40]))  # has two full blocks in common with them
        for stream in (first, second):
            with pytest.raises(EngineError, match="not finite"):
                await collect(stream)
        [sample] = await collect(good)
        assert list(sample[1]) == expected_tokens(bad[:40], 7, 16)
        third = driver.generate(request("third", bad[:-1], max_tokens=1))
        outputs = [output async for output in third]
        assert outputs[-1].num_cached_tokens in (0, 32), "at most what good computed"
        assert driver.stats.worker_restarts.values[()] == 0 and driver.health() is None
        driver.scheduler.check_invariants()
        assert_idle(driver)


async def test_a_shared_block_of_a_failed_request_leaves_the_cache_while_others_hold_it(folder):
    bad = [*b"a long prompt whose logits are not finite" * 2, ord("!")]
    async with running_driver(folder, "--fail-on-token", POISON_TOKEN, "--step-seconds", "0.05") as driver:
        first = driver.generate(request("first", bad))
        other = driver.generate(request("other", bad[:-1], max_tokens=200))
        with pytest.raises(EngineError, match="not finite"):
            await collect(first)
        other.close()
        assert not driver.scheduler.block_manager.cached_blocks.keys() & set(first.sequences()[0].block_keys)
        assert_idle(driver)


async def test_a_suspect_search_that_no_longer_fits_lets_the_others_go_on(folder, lives):
    """It runs alone and finds that out while a plan is made: then nothing is in flight whose result could wake us."""
    params = BeamSearchParams(beam_width=8, max_tokens=20, ignore_eos=True)
    options = ["--num-blocks-later", "4", "--lives", str(lives), "--step-seconds", "0.02"]
    async with running_driver(folder, *options) as driver:
        search = driver.generate(Request("search", [97] * 40, params.sampling_params(), beam_search=params))
        other = driver.generate(request("other", max_tokens=40))
        await until(lambda: len(driver.scheduler.running) == 9)
        driver.recovery._strikes["search"] = engine.executor.recovery.SUSPECT_AT
        os.kill(driver.worker_pid, signal.SIGKILL)
        with pytest.raises(InvalidRequestError, match="need more KV cache than there is: 4 blocks"):
            await collect(search)
        [sample] = await collect(other)
        assert list(sample[1]) == expected_tokens(PROMPT, 7, 40)
        assert_idle(driver)


async def test_a_lack_of_descriptors_is_no_death_of_a_worker(folder, monkeypatch):
    """With no restart to spare, the next Worker waits for a free descriptor as long as it takes."""
    monkeypatch.setattr("engine.executor.supervisor.NO_ROOM_SECONDS", 0.02)
    real, refused = engine.executor.executor.spawn, []

    def spawn(command):
        if len(refused) < 5:
            refused.append(command)
            raise OSError(errno.EMFILE, "Too many open files")
        return real(command)

    async with running_driver(folder, "--step-seconds", "0.01", max_worker_restarts=1) as driver:
        results = [asyncio.create_task(collect(stream)) for stream in start(driver, 2)]
        await asyncio.sleep(0.1)
        monkeypatch.setattr("engine.executor.executor.spawn", spawn)
        os.kill(driver.worker_pid, signal.SIGKILL)
        assert_complete(await asyncio.gather(*results))
        assert len(refused) == 5 and driver.phase == "ready"


async def test_an_adapter_that_workers_die_of_is_given_up(folder, lives, tmp_path):
    for name in ("fine", "deadly"):
        (tmp_path / name).mkdir()
    options = {"allow_runtime_lora": True, "lora_root": str(tmp_path), "max_worker_restarts": 3}
    async with running_driver(folder, "--step-seconds", "0.005", "--lives", str(lives), **options) as driver:
        await driver.load_adapter("fine", "fine")
        stream = driver.generate(Request("r", PROMPT, SamplingParams(max_tokens=400, seed=7), adapter="fine"))
        reading = asyncio.ensure_future(collect(stream))
        await until(lambda: stream.num_generated_tokens > 2)
        with pytest.raises(EngineError, match=r"The Worker dies while it reads the adapter 'deadly': .*SIGABRT"):
            await driver.load_adapter("deadly", "deadly")
        [(_, ids, *_)] = await reading
        assert list(ids) == expected_tokens(PROMPT, 7, 400)
        assert list(driver.adapters) == ["fine"] and lives.stat().st_size == 3
        (tmp_path / "deadly").rename(tmp_path / "harmless")
        await driver.load_adapter("deadly", "harmless")
        assert_idle(driver)
