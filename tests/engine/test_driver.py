"""The real Driver with a real Worker process whose device is fake."""

import asyncio
import os
import signal

import pytest

from engine.errors import (
    ContextLengthError,
    EngineError,
    InvalidRequestError,
    ModelError,
    QueueFullError,
    UnavailableError,
)
from engine.outputs import FinishReason
from tests.checkpoints import save_fake_checkpoint
from tests.engine.driving import PROMPT, assert_idle, collect, request, running_driver, until
from tests.fake_device import EOS_TOKEN_ID, expected_tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_fake_checkpoint(tmp_path_factory.mktemp("model"))


async def test_tokens_are_those_of_an_unbatched_loop(folder):
    async with running_driver(folder) as driver:
        names = [f"r{i}" for i in range(20)]
        streams = [driver.generate(request(n, [*PROMPT, 97 + i], max_tokens=12)) for i, n in enumerate(names)]
        for i, [sample] in enumerate(await asyncio.gather(*map(collect, streams))):
            expected = tuple(expected_tokens([*PROMPT, 97 + i], 7, 12))
            assert sample == (bytes(expected).decode(), expected, FinishReason.LENGTH, None)
        assert_idle(driver)


async def test_nothing_can_be_seen_before_the_model_is_loaded(folder):
    async with running_driver(folder, "--load-seconds", "1", ready=False) as driver:
        for view in (driver.kv_view, driver.steps_view):
            with pytest.raises(UnavailableError, match="before the model is loaded"):
                view()
        driver.stats_snapshot()
        driver.abort("nobody")
        assert driver.num_live_requests == 0 and driver.request_report("nobody") is None


@pytest.mark.parametrize("async_scheduling", [True, False])
async def test_end_of_sequence(folder, async_scheduling):
    async with running_driver(folder, "--eos-every", "5", async_scheduling=async_scheduling) as driver:
        [(text, ids, reason, _)] = await collect(driver.generate(request("a", max_tokens=100)))
        assert list(ids) == expected_tokens(PROMPT, 7, 100, eos_every=5)
        assert (ids[-1], reason) == (EOS_TOKEN_ID, FinishReason.STOP)
        assert text == bytes(ids[:-1]).decode()
        assert_idle(driver)


async def test_stop_string_and_stop_token(folder):
    ids = expected_tokens(PROMPT, 7, 20)
    text = bytes(ids).decode()
    stop = text[6:9]
    async with running_driver(folder) as driver:
        [found] = await collect(driver.generate(request("a", max_tokens=20, stop=[stop])))
        end = text.index(stop)
        assert found == (text[:end], tuple(ids[: end + 3]), FinishReason.STOP, stop)
        first = ids.index(ids[4])
        [found] = await collect(driver.generate(request("b", max_tokens=20, stop_token_ids=[ids[4]])))
        assert found == (text[:first], tuple(ids[: first + 1]), FinishReason.STOP, ids[4])
        assert_idle(driver)


async def test_samples_of_one_request_differ_by_seed_and_count_the_prompt_once(folder):
    async with running_driver(folder) as driver:
        stream = driver.generate(request("a", PROMPT * 10, n=3, max_tokens=6, logprobs=1))
        outputs = [output async for output in stream]
        assert outputs[-1].num_prompt_tokens == 50
        assert outputs[-1].num_generated_tokens == 18
        ids = [[t for o in outputs for p in o.outputs if p.index == i for t in p.token_ids] for i in range(3)]
        assert ids[0] == expected_tokens(PROMPT * 10, 7, 6)
        assert len({tuple(i) for i in ids}) == 3
        parts = [p for o in outputs for p in o.outputs]
        assert all(len(p.logprobs) == len(p.token_ids) for p in parts)
        assert parts[0].logprobs[0].top[0] == (ids[0][0], -0.25)


@pytest.mark.parametrize(("params", "computed"), [({}, 50 + 3 * 5), ({"temperature": 0.0}, 50 + 5)])
async def test_samples_compute_the_prompt_once_and_greedy_ones_everything(folder, params, computed):
    async with running_driver(folder) as driver:
        found = await collect(driver.generate(request("a", PROMPT * 10, n=3, max_tokens=6, **params)))
        assert [len(ids) for _, ids, *_ in found] == [6, 6, 6]
        assert driver.stats.iteration_tokens.sum == computed
        assert driver.stats.generation_tokens.values[()] == 18
        assert_idle(driver)


async def test_greedy_samples_end_together_at_a_stop_string_and_by_abort(folder):
    ids = expected_tokens(PROMPT, 7, 20)
    stop = bytes(ids[5:8]).decode()
    async with running_driver(folder, "--step-seconds", "0.01") as driver:
        greedy = {"n": 3, "temperature": 0.0, "max_tokens": 20}
        found = await collect(driver.generate(request("a", stop=[stop], **greedy)))
        end = bytes(ids).decode().index(stop)
        assert found == [(bytes(ids).decode()[:end], tuple(ids[: end + 3]), FinishReason.STOP, stop)] * 3
        stream = driver.generate(request("b", **greedy | {"max_tokens": 400}))
        await until(lambda: stream.num_generated_tokens)
        driver.abort("b")
        assert [part[2] for part in await collect(stream)] == [FinishReason.ABORT] * 3
        assert_idle(driver)


async def test_slow_reader_gets_everything_in_few_outputs(folder):
    async with running_driver(folder) as driver:
        stream = driver.generate(request("a", max_tokens=50))
        await driver.drain(10)
        outputs = [output async for output in stream]
        assert len(outputs) == 1
        assert list(outputs[0].outputs[0].token_ids) == expected_tokens(PROMPT, 7, 50)


@pytest.mark.parametrize("steps_before", [0, 1, 5])
async def test_abort_frees_blocks_at_once(folder, steps_before):
    async with running_driver(folder, "--step-seconds", "0.01") as driver:
        stream = driver.generate(request("a", PROMPT * 20, max_tokens=300))
        other = driver.generate(request("b", max_tokens=10))
        for _ in range(steps_before):
            await anext(stream)
        stream.close()
        stream.close()
        assert not any(seq.block_table for seq in stream.sequences())
        [sample] = await collect(other)
        assert list(sample[1]) == expected_tokens(PROMPT, 7, 10)
        assert driver.stats.request_success.values[("abort",)] == 1
        assert_idle(driver)


async def test_preemption_changes_nothing(folder):
    async with running_driver(folder, num_blocks=8, block_size=16, watermark=0.0) as driver:
        streams = [driver.generate(request(f"r{i}", [*PROMPT, 97 + i], max_tokens=60)) for i in range(6)]
        for i, [sample] in enumerate(await asyncio.gather(*map(collect, streams))):
            assert list(sample[1]) == expected_tokens([*PROMPT, 97 + i], 7, 60)
        assert driver.scheduler.num_preemptions > 0
        assert_idle(driver)


@pytest.mark.parametrize(
    "changes, error, param",
    [
        ({"prompt": []}, InvalidRequestError, "prompt"),
        ({"prompt": [260]}, InvalidRequestError, "prompt"),
        ({"prompt": [-1]}, InvalidRequestError, "prompt"),
        ({"prompt": [1] * 128}, ContextLengthError, "prompt"),
        ({"prompt": [1] * 100, "max_tokens": 29}, ContextLengthError, "max_tokens"),
        ({"logit_bias": {260: 1.0}}, InvalidRequestError, "logit_bias"),
        ({"stop_token_ids": [-1]}, InvalidRequestError, "stop_token_ids"),
    ],
)
async def test_requests_that_can_never_run_are_refused(folder, changes, error, param):
    async with running_driver(folder, max_model_len=128) as driver:
        with pytest.raises(error) as caught:
            driver.generate(request("a", **changes))
        assert caught.value.param == param
        assert_idle(driver)


async def test_context_is_limited_by_the_pool(folder):
    async with running_driver(folder, num_blocks=4, block_size=16) as driver:
        assert driver.model.max_model_len == 64
        [sample] = await collect(driver.generate(request("a", [97] * 60, max_tokens=None)))
        assert len(sample[1]) == 4


async def test_queue_is_bounded(folder):
    async with running_driver(folder, "--step-seconds", "0.05", max_num_seqs=1, max_queued_requests=2) as driver:
        streams = [driver.generate(request(f"r{i}", max_tokens=2)) for i in range(2)]
        with pytest.raises(QueueFullError) as caught:
            driver.generate(request("late"))
        assert caught.value.retry_after >= 1
        await asyncio.gather(*map(collect, streams))


async def test_one_request_fails_alone(folder):
    async with running_driver(folder, "--fail-on-token", str(ord("!"))) as driver:
        good = driver.generate(request("good", max_tokens=10))
        bad = driver.generate(request("bad", b"bad!", max_tokens=10))
        with pytest.raises(EngineError, match="not finite"):
            await collect(bad)
        [sample] = await collect(good)
        assert list(sample[1]) == expected_tokens(PROMPT, 7, 10)
        assert driver.health() is None
        assert_idle(driver)


async def test_not_ready_while_loading_then_ready(folder):
    async with running_driver(folder, "--load-seconds", "0.5", ready=False) as driver:
        with pytest.raises(UnavailableError):
            driver.generate(request("a"))
        assert driver.health() is None
        await driver.wait_ready()
        assert driver.phase == "ready"


async def test_load_failure_is_told(folder):
    async with running_driver(folder, "--fail-loading", "tensor x is missing", ready=False) as driver:
        with pytest.raises(ModelError, match="tensor x is missing"):
            await driver.wait_ready()
        assert "tensor x" in driver.health()


async def test_without_a_budget_the_death_of_the_worker_ends_every_stream_with_an_error(folder):
    async with running_driver(folder, "--die-at-step", "4", max_worker_restarts=0) as driver:
        streams = [driver.generate(request(f"r{i}", max_tokens=50)) for i in range(3)]
        for outcome in await asyncio.gather(*map(collect, streams), return_exceptions=True):
            assert isinstance(outcome, EngineError)
        assert "status 3" in str(await driver.wait_failed())
        assert "status 3" in driver.health()
        with pytest.raises(UnavailableError):
            driver.generate(request("late"))


@pytest.mark.parametrize("number, name", [(signal.SIGKILL, "SIGKILL"), (signal.SIGRTMIN + 3, "signal 37")])
async def test_kill_of_the_worker_names_the_signal(folder, number, name):
    async with running_driver(folder, max_worker_restarts=0) as driver:
        os.kill(driver.worker_pid, number)
        assert name in str(await asyncio.wait_for(driver.wait_failed(), 5))


async def test_drain_finishes_what_runs_and_refuses_what_comes(folder):
    async with running_driver(folder, "--step-seconds", "0.01") as driver:
        stream = driver.generate(request("a", max_tokens=20))
        drained = asyncio.create_task(driver.drain(10))
        await asyncio.sleep(0)
        assert driver.phase == "draining"
        with pytest.raises(UnavailableError):
            driver.generate(request("b"))
        [sample] = await collect(stream)
        assert len(sample[1]) == 20
        assert await drained


async def test_drain_gives_up_at_the_deadline(folder):
    async with running_driver(folder, "--step-seconds", "0.05") as driver:
        stream = driver.generate(request("a", max_tokens=400))
        assert not await driver.drain(0.2)
        with pytest.raises(EngineError, match="shut down"):
            await collect(stream)
        assert_idle(driver)


async def test_stop_leaves_no_process(folder):
    async with running_driver(folder) as driver:
        pid = driver.worker_pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    await driver.stop()


async def test_histograms_add_up(folder):
    async with running_driver(folder) as driver:
        await asyncio.gather(*(collect(driver.generate(request(f"r{i}", max_tokens=8))) for i in range(5)))
        driver.stats_snapshot()
        stats = driver.stats
        assert stats.generation_tokens.values[()] == 40
        assert stats.prompt_tokens.values[()] == 25
        assert stats.request_success.values[("length",)] == 5
        for histogram in (stats.time_to_first_token, stats.e2e_latency, stats.queue_time, stats.decode_time):
            assert histogram.total == 5
        assert stats.inter_token_latency.total == 35
        assert stats.num_requests_running.value == stats.kv_cache_usage_perc.value == 0


async def test_a_plan_that_fails_outside_the_loop_ends_the_engine_with_a_cause(folder, monkeypatch):
    """A request that arrives while nothing runs is planned in a callback, which nobody awaits."""
    async with running_driver(folder) as driver:

        def broken():
            raise RuntimeError("broken")

        monkeypatch.setattr(driver.scheduler, "schedule", broken)
        stream = driver.generate(request("a"))
        with pytest.raises(EngineError, match="internal error"):
            await asyncio.wait_for(collect(stream), 5)
        assert "internal error" in str(await asyncio.wait_for(driver.wait_failed(), 5))
        assert "ended" in driver.health()
