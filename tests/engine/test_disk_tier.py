"""A server that is started again finds on the disk what the one before it computed, and says the same."""

import asyncio
import sys
from contextlib import asynccontextmanager

import pytest

import engine.driver
from engine.config import EngineConfig
from engine.driver import Driver
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.scheduling import prefetch
from tests.engine.driving import until

PROMPT = "Once upon a time there was a fox who lived by the blue sea and had a very long story to tell. " * 4


def disk_config(tmp_path, **settings):
    return EngineConfig(
        device="cpu",
        dtype="float32",
        max_model_len=512,
        num_blocks=64,
        swap_space=0.05,
        swap_policy="always",
        disk_cache=str(tmp_path / "kv"),
        **settings,
    )


async def serve(tmp_path, prompts, **settings):
    """(text, cached tokens) of each prompt, asked one after the other of a server of its own."""
    driver = Driver(disk_config(tmp_path, **settings))
    await driver.start()
    try:
        await driver.wait_ready()
        found = []
        for number, prompt in enumerate(prompts):
            params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
            stream = driver.generate(Request(str(number), driver.tokenizer.encode(prompt), params))
            outputs = [output async for output in stream]
            text = "".join(part.text for output in outputs for part in output.outputs)
            found.append((text, outputs[-1].num_cached_tokens))
        return found
    finally:
        await driver.stop()


async def test_the_next_server_finds_the_prefix(tmp_path):
    [(text, cached)] = await serve(tmp_path, [PROMPT])
    assert cached == 0
    found = await serve(tmp_path, [PROMPT, PROMPT, "Something else. " + PROMPT])
    assert [same for same, _ in found[:2]] == [text, text]
    assert 60 < found[0][1] < found[1][1]  # the last block, which is not read whole, is copied from memory alone
    assert found[2][1] == 0


async def test_another_model_or_block_size_finds_nothing(tmp_path):
    [(text, _)] = await serve(tmp_path, [PROMPT])
    assert await serve(tmp_path, [PROMPT], block_size=8) == [(text, 0)]


async def test_a_damaged_file_is_a_miss(tmp_path):
    [(text, _)] = await serve(tmp_path, [PROMPT])
    [path] = (tmp_path / "kv").iterdir()
    data = bytearray(path.read_bytes())
    data[5000::1000] = bytes(byte ^ 255 for byte in data[5000::1000])
    path.write_bytes(data)
    assert await serve(tmp_path, [PROMPT]) == [(text, 0)]


async def test_what_was_pushed_out_of_host_memory_comes_from_the_disk(tmp_path):
    """By many prompts, in one life of the server; the text is the same."""
    others = [f"Prompt number {i}: " + PROMPT for i in range(12)]
    found = await asyncio.wait_for(serve(tmp_path, [PROMPT, *others, PROMPT]), 60)
    assert found[0][0] == found[-1][0]
    assert found[-1][1] > 60


STUCK_DISK = """
import os
import time
from engine.worker.cache.disk_cache import BlockFile
from engine.worker.worker import main

load = BlockFile.load


def load_at_last(file, digest):
    while not os.path.exists(GATE):
        time.sleep(0.02)
    return load(file, digest)


BlockFile.load = load_at_last
main()
"""


@asynccontextmanager
async def running_with_stuck_disk(tmp_path, monkeypatch, patience):
    """(driver, stream of a request that runs, its first words): the file `gate` lets the disk answer."""
    monkeypatch.setattr(prefetch, "FETCH_SECONDS", 0.1)
    monkeypatch.setattr(engine.driver, "DISK_SECONDS", patience)
    [(text, _)] = await serve(tmp_path, [PROMPT])
    code = STUCK_DISK.replace("GATE", repr(str(tmp_path / "gate")))
    driver = Driver(disk_config(tmp_path), worker_command=(sys.executable, "-c", code))
    await driver.start()
    try:
        await driver.wait_ready()
        params = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
        stream = driver.generate(Request("long", driver.tokenizer.encode(PROMPT), params))
        await until(lambda: stream.num_generated_tokens > 2)
        yield driver, stream, text
    finally:
        await driver.stop()


async def read_words(stream):
    outputs = [output async for output in stream]
    return "".join(part.text for output in outputs for part in output.outputs)


async def ask_another(driver):
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    assert await read_words(driver.generate(Request("new", driver.tokenizer.encode("Else"), params)))


@pytest.mark.parametrize("comes", [False, True])
async def test_a_disk_that_does_not_answer_keeps_the_model_awake(tmp_path, monkeypatch, comes):
    """As of a network mount that is gone: the sleep waited for its reads, and all requests for the sleep, for ever."""
    async with running_with_stuck_disk(tmp_path, monkeypatch, 30.0 if comes else 0.3) as (driver, stream, text):
        asleep = asyncio.create_task(driver.sleep(1))
        await until(lambda: not driver.num_in_flight)
        if comes:  # a request, which wakes the model
            await ask_another(driver)
        await asyncio.wait_for(asleep, 20)
        assert driver.phase == "ready" and driver.sleep_level == 0
        assert (await read_words(stream)).startswith(text)


async def test_a_sleep_waits_for_the_disk_as_long_as_any_other(tmp_path, monkeypatch):
    """A sleep before it, which a request ended, has used up some of the time."""
    async with running_with_stuck_disk(tmp_path, monkeypatch, 4.0) as (driver, stream, text):
        first = asyncio.create_task(driver.sleep(1))
        await asyncio.sleep(2.0)
        await ask_another(driver)
        await first
        second = asyncio.create_task(driver.sleep(1))
        await asyncio.sleep(2.5)
        assert not second.done()
        (tmp_path / "gate").touch()
        await asyncio.wait_for(second, 20)
        assert driver.sleep_level == 1
        await driver.wake()
        assert (await read_words(stream)).startswith(text)


async def test_a_server_that_ends_does_not_wait_for_the_disk(tmp_path, monkeypatch):
    async with running_with_stuck_disk(tmp_path, monkeypatch, 30.0) as (driver, stream, text):
        asleep = asyncio.create_task(driver.sleep(1))
        await until(lambda: not driver.num_in_flight)
        words = asyncio.create_task(read_words(stream))
        assert await driver.drain(20.0)
        assert (await words).startswith(text)
        await asleep
