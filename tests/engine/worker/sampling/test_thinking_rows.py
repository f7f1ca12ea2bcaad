"""Thinking budgets in a runner: on a CPU, on a queue that is behind, after preemption, with a grammar."""

import pytest

from engine.sampling_params import SamplingParams
from engine.thinking import ThinkingScan, find_tags
from engine.worker.sampling import step_sampler
from tests.engine.worker.lazy_queue import LazyMark, LazyQueue
from tests.engine.worker.mini_driver import PROMPTS, ColumnDriver, MiniDriver, remove_all

EOS, BEGIN, LESS, THINK, MORE, SLASH = 2, 5, 60, 7, 62, 47  # of the model's 96 tokens; others are "."
VOCABULARY = {BEGIN: b"<think>", LESS: b"<", SLASH: b"/", THINK: b"think", MORE: b">"}
TAGS = find_tags(VOCABULARY, [], None)
CLOSING = [LESS, SLASH, THINK, MORE]
NUM_TOKENS = 14


def limited(budget, opened=True, **params):
    settings = {"temperature": 1.0, "thinking_token_budget": budget, "thinking_opened": opened} | params
    return SamplingParams(**settings)


@pytest.fixture
def runner(cpu_runner):
    cpu_runner.handle_message(TAGS, None)
    yield cpu_runner
    remove_all(cpu_runner)


def run(driver, num_steps):
    driver.step({seq_id: len(tokens) for seq_id, tokens in driver.tokens.items()})
    for _ in range(num_steps - 1):
        driver.step(dict.fromkeys(driver.tokens, 1))


def alone(runner, params, num_steps=NUM_TOKENS):
    """The tokens that a sequence with these parameters generates alone."""
    driver = MiniDriver(runner)
    driver.removed = [1]
    driver.add(1, PROMPTS[1], params)
    run(driver, num_steps)
    driver.remove(1)
    return driver.output(1)


# Parameters that change what is thought, and the free text that they give: with LESS, a part of the tag may be there.
CASES = {
    "free": {},
    "greedy": {"temperature": 0.0},
    "a tag may have begun": {"logit_bias": {LESS: 6.0}},
    "the tag is unlikely, and its tokens count": {"logit_bias": {MORE: -100.0}, "presence_penalty": 2.0},
    "ends are kept out": {"min_tokens": 12, "stop_token_ids": (THINK,)},
}


@pytest.mark.parametrize("name", CASES)
def test_the_tag_comes_when_the_budget_is_used_up_and_then_all_is_free(runner, name):
    free = alone(runner, limited(NUM_TOKENS, **CASES[name]))
    for budget in range(NUM_TOKENS - 4):
        output = alone(runner, limited(budget, **CASES[name]))
        scan = ThinkingScan(TAGS, opened=True)
        scan.feed(output)
        begun = 0  # characters of the tag that the model wrote last
        assert output[:budget] == free[:budget] and scan.over and scan.num_tokens <= budget
        if budget and free[budget - 1] == LESS:
            begun = 1
        assert output[budget : budget + 4 - begun] == CLOSING[begun:]
        assert output != free and len(output) == NUM_TOKENS


def test_a_thought_that_ends_by_itself_is_left_alone(runner):
    """The model is made to write the tag: with a large bias, each of its tokens is the most likely in turn."""
    free = alone(runner, limited(NUM_TOKENS))
    closed = [*free[:3], *CLOSING]
    driver = MiniDriver(runner)
    driver.removed = [1]
    driver.add(1, PROMPTS[1], limited(7))
    driver.tokens[1] += closed
    driver.step({1: len(PROMPTS[1]) + len(closed)})
    for _ in range(6):
        driver.step({1: 1})
    again = MiniDriver(runner)
    again.removed = [1]
    again.add(1, PROMPTS[1], SamplingParams(temperature=1.0))
    again.tokens[1] += closed
    again.step({1: len(PROMPTS[1]) + len(closed)})
    for _ in range(6):
        again.step({1: 1})
    assert driver.output(1) == again.output(1)


@pytest.mark.parametrize("first, is_limited", [(BEGIN, True), (50, False)])
def test_only_what_the_model_begins_as_a_thought_is_one(runner, first, is_limited):
    params = limited(2, opened=False, logit_bias={first: 100.0})
    driver = MiniDriver(runner)
    driver.add(1, PROMPTS[1], params)
    run(driver, 8)
    assert (driver.output(1)[3:7] == CLOSING) == is_limited and driver.output(1)[:3] == [first] * 3


@pytest.mark.parametrize("at", range(1, NUM_TOKENS - 1))
def test_a_sequence_that_comes_back_goes_on_where_it_was(runner, at):
    """Its tokens come with it: after preemption, or to another Worker. Within the thought, the tag, the rest."""
    params = limited(4, logit_bias={LESS: 3.0})
    whole = alone(runner, params)
    broken = MiniDriver(runner)
    broken.removed = [1]
    broken.add(1, PROMPTS[1], params)
    run(broken, at)
    broken.remove(1)
    broken.start(1)
    broken.step({1: len(PROMPTS[1]) + at})
    for _ in range(NUM_TOKENS - at - 1):
        broken.step({1: 1})
    assert broken.output(1) == whole


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("greedy", [True, False])
def test_a_queue_that_is_behind_gives_the_same(make_runner, runner, hf_greedy, ahead, greedy):
    """On a GPU the token before is still on its way when a step is launched."""
    temperature = 0.0 if greedy else 1.0
    here = MiniDriver(runner)
    gpu_runner = make_runner(LazyQueue())
    gpu_runner.handle_message(TAGS, None)
    there = ColumnDriver(gpu_runner, ahead=ahead)
    for driver in (here, there):
        driver.add(1, PROMPTS[1], limited(5, temperature=temperature))
        driver.add(2, PROMPTS[2])
        driver.add(3, PROMPTS[3], limited(0, temperature=temperature, logit_bias={LESS: 4.0}))
        driver.add(4, PROMPTS[4], limited(3, opened=False, temperature=temperature, logit_bias={BEGIN: 60.0}))
        run(driver, NUM_TOKENS)
    there.take()
    assert there.output(1)[5:9] == CLOSING and there.output(3)[:4] == CLOSING and there.output(4)[4:8] == CLOSING
    assert there.output(2) == hf_greedy(PROMPTS[2], NUM_TOKENS)
    assert {i: there.output(i) for i in (1, 2, 3, 4)} == {i: here.output(i) for i in (1, 2, 3, 4)}


def test_steps_before_the_budget_is_used_up_wait_for_nothing(make_runner, monkeypatch):
    """Far from the budget a launch waits for no step in flight: its tokens are not needed."""
    wait, waited = LazyMark.wait, []
    monkeypatch.setattr(LazyMark, "wait", lambda mark: waited.append(mark) or wait(mark))
    counts = []
    for budget in (100, 9):
        gpu_runner = make_runner(LazyQueue())
        gpu_runner.handle_message(TAGS, None)
        driver = ColumnDriver(gpu_runner, ahead=1)
        driver.add(1, PROMPTS[1], limited(budget, temperature=0.0))
        run(driver, 9)
        waited.clear()
        gpu_runner.launch(driver.plan({1: 1}))
        counts.append(len(waited))
    assert counts == [2, 3], "for its buffer and a step that is done; near the budget for the step before it, too"


def test_without_tags_the_sequence_fails_alone(make_runner, hf_greedy):
    driver = ColumnDriver(make_runner(LazyQueue()), ahead=0)
    driver.add(1, PROMPTS[1], limited(3))
    driver.add(2, PROMPTS[2])
    result = driver.step({1: len(PROMPTS[1]), 2: len(PROMPTS[2])})
    assert "was not told" in result.failed[1] and [sample.seq_id for sample in result.samples] == [2]


def test_logprobs_are_the_models_own(runner):
    driver = MiniDriver(runner)
    driver.add(1, PROMPTS[1], limited(0, temperature=0.0, logprobs=3))
    result = driver.step({1: len(PROMPTS[1])})
    (token,) = result.detailed
    assert token.token_id == LESS and token.logprob < token.top[0][1]


def test_rows_that_are_sampled_one_by_one_keep_their_tags(runner, monkeypatch):
    """As they are where sampling them together fails."""
    sample = step_sampler.sample

    def one_only(logits, *rest):
        if len(logits) > 1:
            raise RuntimeError("one at a time")
        return sample(logits, *rest)

    monkeypatch.setattr(step_sampler, "sample", one_only)
    driver = MiniDriver(runner)
    driver.add(1, PROMPTS[1], SamplingParams(temperature=1.0))
    driver.add(2, PROMPTS[2], limited(0))
    driver.add(3, PROMPTS[3], limited(1))
    run(driver, 5)
    assert driver.output(2)[:4] == CLOSING and driver.output(3)[1:5] == CLOSING and driver.output(1)[:4] != CLOSING
