"""A server that is started again finds on the disk what the one before it computed, and says the same."""

import asyncio

from engine.config import EngineConfig
from engine.driver import Driver
from engine.request import Request
from engine.sampling_params import SamplingParams

PROMPT = "Once upon a time there was a fox who lived by the blue sea and had a very long story to tell. " * 4


async def serve(tmp_path, prompts, **settings):
    """(text, cached tokens) of each prompt, asked one after the other of a server of its own."""
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        max_model_len=512,
        num_blocks=64,
        swap_space=0.05,
        swap_policy="always",
        disk_cache=str(tmp_path / "kv"),
        **settings,
    )
    driver = Driver(config)
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
