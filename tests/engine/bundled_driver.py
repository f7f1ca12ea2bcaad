"""Requests of several kinds to a real Driver and Worker with the bundled model, and the Driver that answers them."""

from contextlib import asynccontextmanager

from engine.config import EngineConfig
from engine.driver import Driver
from engine.request import Request
from engine.sampling_params import SamplingParams

PROMPTS = [
    "Once upon a time, a small fox",
    "Hello",
    "The old clock on the wall " * 8,
    "A dragon and a mouse wanted to bake bread, but",
]


PARAMS = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "seed": 11},
    "filtered": {"temperature": 1.1, "seed": 5, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    "penalised": {"temperature": 0.8, "seed": 3, "presence_penalty": 0.5, "repetition_penalty": 1.2},
}


CASES = [(name, prompt) for name in PARAMS for prompt in PROMPTS]


NUM_TOKENS = 40


@asynccontextmanager
async def running_driver(**settings):
    driver = Driver(EngineConfig(**{"dtype": "float32", "device": "cpu", "max_model_len": 256} | settings))
    await driver.start()
    try:
        await driver.wait_ready()
        yield driver
    finally:
        await driver.stop()


def start(driver, name, case):
    params, prompt = case
    sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **PARAMS[params])
    return driver.generate(Request(name, driver.tokenizer.encode(prompt), sampling))


async def read(stream):
    ids, text = [], ""
    async for output in stream:
        ids += output.outputs[0].token_ids
        text += output.outputs[0].text
    return ids, text
