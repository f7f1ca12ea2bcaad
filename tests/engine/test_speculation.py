"""Drafts change no text: the real Worker with the bundled model in fp32, and every way in which a sequence may be
interrupted. Drafts come from n-grams and from predictions that are right in part."""

import asyncio
import os
import signal
import sys

import pytest

from engine.checkpoint.locate import BUNDLED_MODEL
from engine.config import EngineConfig
from engine.driver import Driver
from engine.errors import ConfigError
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.scheduling.speculation.drafts import Drafts
from engine.scheduling.speculation.step_costs import PassCosts, StepCosts
from engine.structured_output import StructuredOutput
from tests.checkpoints import save_fake_checkpoint
from tests.engine.bundled_driver import PARAMS, PROMPTS, running_driver

LONG = " ".join(PROMPTS)
LIST = StructuredOutput("regex", '\\{"names": \\[("[A-Z][a-z]{1,6}", ){4,30}"end"\\]\\}')
CASES = [
    *[
        (prompt, {**PARAMS[name], "max_tokens": 45 + i})
        for i, (prompt, name) in enumerate(zip(PROMPTS, PARAMS, strict=True))
    ],
    (LONG, {"temperature": 0.0, "max_tokens": 60, "logprobs": 2}),
    (LONG, {"temperature": 0.8, "seed": 9, "max_tokens": 33, "structured_output": LIST, "frequency_penalty": 0.4}),
    (LONG, {"temperature": 0.0, "max_tokens": 70, "stop": (" the",), "min_tokens": 20}),
    (PROMPTS[2], {"temperature": 0.0, "max_tokens": 64, "bad_words": ((5, 6),), "n": 1}),
]


async def start(driver, name, case, prediction=()):
    prompt, params = case
    if "structured_output" in params:
        await driver.grammars.prepare(params["structured_output"])
    sampling = SamplingParams(ignore_eos=True, **params)
    return driver.generate(Request(name, driver.tokenizer.encode(prompt), sampling, prediction=tuple(prediction)))


async def read(stream):
    """The parts that a client gets: token ids, text, logprobs, and how it ended."""
    ids, text, logprobs, end = [], "", [], None
    async for output in stream:
        sample = output.outputs[0]
        ids += sample.token_ids
        text += sample.text
        logprobs += [token.logprob for token in sample.logprobs or ()]
        end = sample.finish_reason, sample.stop_reason
    return (ids, text, end), logprobs


def partly_right(ids, number):
    """The answer with wrong tokens here and there, without its beginning in every other case."""
    changed = [3 if place % 11 == 7 + number % 3 else token for place, token in enumerate(ids)]
    return changed[5 * (number % 2) :]


async def run_together(driver, alone, kill=False):
    """All cases at once, each with a prediction; returns the accepted tokens."""
    before = driver.scheduler.drafts.num_accepted_tokens
    streams = [await start(driver, f"c{i}", case, partly_right(alone[i][0][0], i)) for i, case in enumerate(CASES)]
    tasks = [asyncio.create_task(read(stream)) for stream in streams]
    if kill:
        while driver.scheduler.drafts.num_accepted_tokens < before + 5:
            assert not all(task.done() for task in tasks), "no draft was right"
            await asyncio.sleep(0.001)
        os.kill(driver.worker_pid, signal.SIGKILL)
    for (prompt, _), (expected, logprobs), found in zip(CASES, alone, await asyncio.gather(*tasks), strict=True):
        assert found[0] == expected, prompt
        assert found[1] == pytest.approx(logprobs, abs=1e-4)
    driver.check_invariants()
    return driver.scheduler.drafts.num_accepted_tokens - before


@pytest.mark.parametrize(
    "speculative",
    [
        pytest.param("ngram:6", id="n-grams"),
        pytest.param(f"{BUNDLED_MODEL}:4", id="draft model", marks=pytest.mark.slow),
    ],
)
async def test_the_text_is_the_same_with_preemption_cached_prefixes_and_a_worker_that_is_killed(
    speculative, monkeypatch
):
    for costs in (StepCosts, PassCosts):
        monkeypatch.setattr(costs, "needed", lambda self, rows, num_tokens: 0.1)  # every draft pays
    settings = {"num_blocks": 20, "watermark": 0.0, "max_num_batched_tokens": 64, "async_scheduling": True}
    async with running_driver(speculative=speculative, **settings) as driver:
        drafts, driver.scheduler.drafts = driver.scheduler.drafts, Drafts()
        alone = [await read(await start(driver, f"c{i}", case)) for i, case in enumerate(CASES)]
        driver.scheduler.drafts = drafts
        accepted = await run_together(driver, alone)
        assert driver.scheduler.num_preemptions > 0
        kill = speculative != "ngram:6"
        again = await run_together(driver, alone, kill=kill)
        assert min(accepted, again) > 20, (accepted, again)
        assert driver.stats.worker_restarts.values[()] == kill
        assert driver.scheduler.block_manager.usage == 0.0


async def test_a_draft_model_with_other_tokens_is_refused(tmp_path):
    folder = save_fake_checkpoint(tmp_path / "model")
    config = EngineConfig(model=str(folder), load_format="dummy", speculative=f"{BUNDLED_MODEL}:4")
    driver = Driver(config, worker_command=(sys.executable, "-m", "tests.fake_worker"))
    with pytest.raises(ConfigError, match=r"^speculative: the tokenizer of .* has other tokens than the model's"):
        await driver.start()
    await driver.stop()


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens"])
def test_drafts_need_rows_beside_that_of_the_sequence(name):
    with pytest.raises(ConfigError, match=rf"^speculative: .* set {name} to 9 or more"):
        EngineConfig(model="", speculative="ngram:8", **{name: 1})
    assert EngineConfig(model="", speculative="ngram:8", **{name: 2}).max_draft_tokens == 8
