"""Logprobs of prompts through the Driver: every position once, whatever happens on the way. The device is exact."""

import asyncio
from array import array

import pytest

import engine.executor.recovery
from engine.errors import ContextLengthError
from engine.outputs import FinishReason, PromptLogprobs, PromptScores
from tests.checkpoints import save_fake_checkpoint
from tests.engine.driving import PROMPT, assert_idle, request, running_driver, until
from tests.fake_device import expected_score, expected_tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_fake_checkpoint(tmp_path_factory.mktemp("model"))


async def read(stream):
    """(token ids of each sample, prompt logprobs, number of cached tokens); they come once, with the first output."""
    outputs = [output async for output in stream]
    assert all(output.prompt_logprobs is None for output in outputs[1:])
    ids = [[] for _ in range(stream.request.params.n)]
    for part in (part for output in outputs for part in output.outputs):
        ids[part.index] += part.token_ids
    assert outputs[-1].num_generated_tokens == sum(map(len, ids))
    return ids, outputs[0].prompt_logprobs, outputs[-1].num_cached_tokens


def assert_scored(prompt, logprobs, k=0):
    assert len(logprobs) == len(prompt) and logprobs[0] is None
    for position, token in enumerate(logprobs[1:], start=1):
        assert token.token_id == prompt[position]
        assert (token.logprob, token.rank) == expected_score(prompt[: position + 1])
        assert token.top == tuple((97 + i, -1.0 - i) for i in range(k))


def prompt_of(length, name=0):
    return [97 + (i * i + name) % 26 for i in range(length)]


@pytest.mark.parametrize("budget", [1, 2, 7, 256])
@pytest.mark.parametrize("async_scheduling", [False, True])
async def test_every_position_is_scored_across_chunks(folder, budget, async_scheduling):
    settings = {"max_num_batched_tokens": budget, "block_size": 8, "async_scheduling": async_scheduling}
    async with running_driver(folder, **settings) as driver:
        prompts = [prompt_of(n, n) for n in (1, 2, 4, 29)]
        streams = [
            driver.generate(request(f"r{i}", prompt, max_tokens=3, prompt_logprobs=i))
            for i, prompt in enumerate(prompts)
        ]
        other = driver.generate(request("plain", prompt_of(9), max_tokens=3))
        for i, ([ids], logprobs, _) in enumerate(await asyncio.gather(*map(read, streams))):
            assert ids == expected_tokens(prompts[i], 7, 3)
            assert_scored(prompts[i], logprobs, i)
        assert (await read(other))[1] is None
        assert_idle(driver)


async def test_nothing_is_read_from_the_prefix_cache_but_others_read_what_was_scored(folder):
    prompt = prompt_of(40)
    async with running_driver(folder, block_size=8) as driver:
        for name in "ab":
            ids, logprobs, cached = await read(driver.generate(request(name, prompt, prompt_logprobs=0)))
            assert_scored(prompt, logprobs)
            assert cached == 0
        found, _, cached = await read(driver.generate(request("c", prompt)))
        assert found == ids and cached == 39


async def test_preemption_scores_every_position_once(folder):
    settings = {"num_blocks": 7, "block_size": 8, "watermark": 0.0, "max_num_batched_tokens": 8}
    async with running_driver(folder, **settings) as driver:
        prompts = [prompt_of(20, i) for i in range(5)]
        streams = [
            driver.generate(request(f"r{i}", prompt, max_tokens=24, prompt_logprobs=1, n=1 + i % 2))
            for i, prompt in enumerate(prompts)
        ]
        for i, (ids, logprobs, _) in enumerate(await asyncio.gather(*map(read, streams))):
            assert ids[0] == expected_tokens(prompts[i], 7, 24)
            assert_scored(prompts[i], logprobs, 1)
        assert driver.scheduler.num_preemptions > 0
        assert_idle(driver)


async def test_urgent_requests_preempt_in_the_middle_of_a_prompt(folder):
    settings = {"num_blocks": 8, "block_size": 8, "watermark": 0.0, "max_num_batched_tokens": 4}
    async with running_driver(folder, "--step-seconds", "0.002", **settings) as driver:
        slow = driver.generate(request("slow", prompt_of(56), max_tokens=4, prompt_logprobs=2))
        preempted = 0
        for i in range(4):
            await until(lambda i=i: slow._scores.num_scored > 8 * (i + 1))
            live = slow.sequences()[0]
            driver.scheduler.isolate([])  # all give up their blocks, as for a suspect
            preempted += live.num_preemptions > preempted
            driver.scheduler.isolate(None)
            driver._schedule_pump()
        [ids], logprobs, _ = await read(slow)
        assert preempted and ids == expected_tokens(prompt_of(56), 7, 4)
        assert_scored(prompt_of(56), logprobs, 2)
        assert_idle(driver)


@pytest.mark.parametrize("step", [2, 4, 7])
async def test_the_death_of_the_worker_loses_and_doubles_nothing(folder, monkeypatch, tmp_path, step):
    monkeypatch.setattr(engine.executor.recovery, "FIRST_BACKOFF", 0.02)
    (lives := tmp_path / "lives").touch()
    faults = ["--die-at-step", str(step), "--faults-in", "1", "--lives", str(lives)]
    async with running_driver(folder, *faults, max_num_batched_tokens=16, block_size=8) as driver:
        prompts = [prompt_of(30, i) for i in range(3)]
        streams = [
            driver.generate(request(f"r{i}", prompt, max_tokens=5, prompt_logprobs=1, n=2))
            for i, prompt in enumerate(prompts)
        ]
        for i, (ids, logprobs, _) in enumerate(await asyncio.gather(*map(read, streams))):
            assert ids[0] == expected_tokens(prompts[i], 7, 5)
            assert_scored(prompts[i], logprobs, 1)
        assert lives.stat().st_size == 2
        assert_idle(driver)


@pytest.mark.parametrize("params", [{}, {"n": 3}, {"n": 3, "temperature": 0.0}, {"n": 2, "prompt_logprobs": 1}])
async def test_max_tokens_0_computes_the_prompt_once_and_generates_nothing(folder, params):
    async with running_driver(folder, block_size=8) as driver:
        stream = driver.generate(request("a", prompt_of(30), max_tokens=0, **params))
        outputs = [output async for output in stream]
        parts = [part for output in outputs for part in output.outputs]
        assert [part.index for part in parts] == list(range(params.get("n", 1)))
        assert {(part.text, part.token_ids, part.finish_reason) for part in parts} == {("", (), FinishReason.LENGTH)}
        assert outputs[-1].num_generated_tokens == 0 and driver.stats.iteration_tokens.sum == 30
        if "prompt_logprobs" in params:
            assert_scored(prompt_of(30), outputs[0].prompt_logprobs, 1)
        assert driver.stats.prompt_tokens.values[()] == 30 and driver.stats.generation_tokens.values[()] == 0
        assert (await read(driver.generate(request("b", prompt_of(30)))))[2] == 29, "the prompt is in the cache"
        assert_idle(driver)


async def test_a_prompt_as_long_as_the_context_can_be_scored(folder, monkeypatch, tmp_path):
    monkeypatch.setattr(engine.executor.recovery, "FIRST_BACKOFF", 0.02)
    (lives := tmp_path / "lives").touch()
    faults = ["--die-at-step", "2", "--faults-in", "1", "--lives", str(lives)]
    async with running_driver(folder, *faults, max_model_len=64, max_num_batched_tokens=16) as driver:
        _, logprobs, _ = await read(driver.generate(request("a", prompt_of(64), max_tokens=0, prompt_logprobs=0)))
        assert_scored(prompt_of(64), logprobs)
        for length, max_tokens in ((64, 1), (65, 0)):
            with pytest.raises(ContextLengthError):
                driver.generate(request("b", prompt_of(length), max_tokens=max_tokens))


def test_what_is_known_is_not_added_twice():
    def scores(start, *logprobs):
        n = len(logprobs)
        return PromptScores(
            1, start, 1, array("f", [x for p in logprobs for x in (p, p + 1)]).tobytes(),
            array("i", range(start, start + n)).tobytes(), array("i", range(start, start + n)).tobytes(),
        )  # fmt: skip

    found = PromptLogprobs([*PROMPT])
    found.add(scores(1, -1.0, -2.0))
    assert not found.complete
    with pytest.raises(ValueError, match="position 4"):
        found.add(scores(4, -4.0))
    found.add(scores(1, -9.0))
    found.add(scores(2, -9.0, -3.0, -4.0))
    assert found.complete
    assert [token and token.logprob for token in found] == [None, -1.0, -2.0, -3.0, -4.0]
    assert found[-1] == found[4] and found[4].top == ((4, -3.0),) and found[4].rank == 4
    with pytest.raises(IndexError):
        found[5]
