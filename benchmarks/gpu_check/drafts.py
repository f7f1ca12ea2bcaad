"""A draft model on the device: how many of its guesses are right, and what a pass costs.

A model that is its own draft guesses right but for the last bits of bf16, and never gains time. So every draft is made,
whether it pays or not.
"""

import asyncio
import random
import statistics
from dataclasses import replace
from unittest import mock

from benchmarks.gpu_check.names import QWEN
from benchmarks.gpu_check.parts import Setting
from benchmarks.gpu_check.record import Recorder, at_least
from benchmarks.gpu_check.serving import running_engine, serving_config
from benchmarks.gpu_check.shapes import write_model
from benchmarks.gpu_check.timing import pick_device
from engine.config import EngineConfig
from engine.driver import Driver
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.scheduling.speculation.step_costs import PassCosts
from server.process import event_loop

DRAFT_TOKENS = 4
STREAMS, PROMPT, OUTPUT = (1, 4), 64, 128
TINY_OUTPUT = 24
RIGHT = 75  # % of the guesses; random weights leave logits that nearly tie


def run(recorder: Recorder, setting: Setting) -> None:
    """The start of the engine belongs to the case."""
    device = pick_device(setting.tiny).type
    folder = write_model(QWEN, setting.folder, setting.tiny)
    config = replace(serving_config(folder, device, setting.tiny), speculative=f"{folder}:{DRAFT_TOKENS}")
    recorder.case("draft model", lambda: event_loop.run(_measure(recorder, setting, config)), seconds=90)


async def _measure(recorder: Recorder, setting: Setting, config: EngineConfig) -> None:
    passes: list[float] = []  # seconds of each

    def note(costs: PassCosts, number: int, seconds: float) -> None:
        passes.append(seconds / number)

    always = mock.patch.multiple(PassCosts, needed=lambda costs, rows, num_tokens: 0.0, add_passes=note)
    with always:
        async with running_engine(config, setting.folder / "watched-drafts.json") as driver:
            for streams in STREAMS:
                await _answers(driver, setting, streams, 0)  # warms up
                drafts = driver.scheduler.drafts
                passes.clear()
                before = drafts.num_draft_tokens, drafts.num_accepted_tokens
                await _answers(driver, setting, streams, 1)
                guesses, right = drafts.num_draft_tokens - before[0], drafts.num_accepted_tokens - before[1]
                name = f"{QWEN} as its own draft, {streams} stream{'s' if streams > 1 else ''}"
                recorder.figure(f"{name}: right guesses", 100 * right / max(1, guesses), "%", goal=at_least(RIGHT),
                                guesses=guesses)  # fmt: skip
                recorder.figure(f"{name}: a pass", statistics.median(passes) * 1e3, "ms", drafts=len(passes))


async def _answers(driver: Driver, setting: Setting, streams: int, seed: int) -> None:
    """Greedy answers to random prompts."""
    rng, output = random.Random(seed), TINY_OUTPUT if setting.tiny else OUTPUT
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)

    async def answer(number: int) -> None:
        prompt = [rng.randrange(256) for _ in range(8 if setting.tiny else PROMPT)]
        async for _ in driver.generate(Request(f"drafts-{streams}-{seed}-{number}", prompt, params)):
            pass

    await asyncio.gather(*map(answer, range(streams)))
