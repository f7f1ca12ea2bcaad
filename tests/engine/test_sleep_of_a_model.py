"""Sleep with a real Worker and the bundled model: the same bytes through it, prefixes that survive it, and no leak."""

import asyncio
import os
import weakref

import pytest
import torch

from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.worker.device.offload import Offloaded, tensors_on
from tests.engine.bundled_driver import CASES, read, running_driver, start
from tests.engine.driving import until

NUM_STREAMS = 64
CYCLES = int(os.environ.get("SLEEP_CYCLES", "0"))
PREFIX = "Once upon a time there was a fox who lived by the blue sea and had a very long story to tell. " * 4


async def test_64_streams_through_a_sleep_are_byte_equal():
    """At level 2, then at level 1, in fp32."""
    async with running_driver() as driver:
        cases = [CASES[number % len(CASES)] for number in range(NUM_STREAMS)]
        expected = await asyncio.gather(*[read(start(driver, f"e{number}", case)) for number, case in enumerate(CASES)])
        streams = [start(driver, str(number), case) for number, case in enumerate(cases)]
        results = asyncio.gather(*map(read, streams))
        for level in (2, 1):
            seen = streams[0].num_generated_tokens
            await until(lambda seen=seen: streams[0].num_generated_tokens > seen + 5)
            await driver.sleep(level)
            assert driver.num_live_requests == NUM_STREAMS
            await driver.wake()
        assert await results == [expected[number % len(CASES)] for number in range(NUM_STREAMS)]
        assert driver.stats.worker_restarts.values[()] == 0


async def ask(driver, name):
    """(text, cached tokens)"""
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    stream = driver.generate(Request(name, driver.tokenizer.encode(PREFIX), params))
    outputs = [output async for output in stream]
    return "".join(part.text for output in outputs for part in output.outputs), outputs[-1].num_cached_tokens


async def test_prefixes_survive_in_the_tiers(tmp_path):
    """In host memory at level 1, on the disk at level 2; those of a stream that pauses, too."""
    async with running_driver(
        max_model_len=512, num_blocks=64, swap_space=0.05, swap_policy="always", disk_cache=str(tmp_path / "kv")
    ) as driver:
        text, cached = await ask(driver, "first")
        assert cached == 0
        for level in (1, 2):
            params = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
            paused = driver.generate(Request(f"paused{level}", driver.tokenizer.encode("Now " + PREFIX), params))
            await until(lambda paused=paused: paused.num_generated_tokens > 20)
            await driver.sleep(level)
            again, cached = await ask(driver, f"again{level}")
            assert again == text and cached > 60
            assert driver.scheduler.block_manager.host_tier.num_loads * 16 > level * 2 * 60, "the paused stream's, too"
            paused.close()


def rss_of(pid):
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def children():
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return file.read().split()


async def fill_cache(driver, name):
    """Compute eight prompts that share no prefix, 15,200 tokens in all."""
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    prompts = [[3 + (number + place * 7) % 3000 for place in range(1900)] for number in range(8)]
    streams = [driver.generate(Request(f"{name}{number}", ids, params)) for number, ids in enumerate(prompts)]
    await asyncio.gather(*map(read, streams))


async def test_sleep_at_level_1_returns_the_memory_of_the_kv_cache():
    """Twice: the cache of a wake must not lie beside the one before. 15,200 tokens take 59 MiB in fp32."""
    async with running_driver(max_model_len=2048, kv_cache_memory="64MiB") as driver:
        awake = []
        for cycle in range(2):
            await fill_cache(driver, cycle)
            awake.append(rss_of(driver.worker_pid))
            await driver.sleep(1)
            assert rss_of(driver.worker_pid) < awake[-1] - (50 << 20)
            await driver.wake()
        assert awake[1] < awake[0] + (45 << 20)


@pytest.mark.skipif(not CYCLES, reason="`make sleep-cycles` sets the number of cycles")
async def test_cycles_leak_nothing(cycles=CYCLES):
    """Descriptors, processes and memory, of the server and, at level 1, of the Worker."""
    async with running_driver(num_blocks=512) as driver:
        sizes = []
        for cycle in range(cycles):
            await driver.sleep(1)
            resting = rss_of(driver.worker_pid)
            await read(start(driver, f"one{cycle}", CASES[0]))
            awake = rss_of(driver.worker_pid)
            sizes.append((resting, awake, rss_of("self"), len(os.listdir("/proc/self/fd")), len(children())))
        first, last = sizes[min(2, cycles - 2)], sizes[-1]
        assert last[3:] == first[3:]
        assert all(after < before + (8 << 20) for before, after in zip(first[:3], last[:3], strict=True)), sizes
        for cycle in range(cycles):
            await driver.sleep(2)
            assert len(children()) < last[4]
            await read(start(driver, f"two{cycle}", CASES[0]))
            assert (len(os.listdir("/proc/self/fd")), len(children())) == last[3:]
            assert rss_of("self") < last[2] + (8 << 20)


def test_tensors_are_found_beside_a_weak_proxy_whose_object_is_gone():
    gone = [weakref.proxy(found) for found in [torch.nn.Identity()]]
    weight = torch.randn(3)
    assert any(found is weight for found in tensors_on(torch.device("cpu")))
    assert len(gone) == 1


def test_offloaded_tensors_come_back_with_their_views():
    weight = torch.randn(6, 8)
    view, alone, expected = weight[2:4].t(), torch.arange(5), weight.clone()
    offloaded = Offloaded([weight, view, alone, torch.empty(0)])
    assert offloaded.num_bytes == 6 * 8 * 4 + 5 * 8
    assert weight.untyped_storage().nbytes() == alone.untyped_storage().nbytes() == 0
    offloaded.restore()
    assert torch.equal(weight, expected) and torch.equal(view, expected[2:4].t()) and alone.tolist() == list(range(5))


def test_memory_that_torch_does_not_own_stays_where_it_is():
    """On GPUs it is the symmetric memory of a tensor-parallel group: torch refuses to resize it."""
    weight, shared = torch.ones(4), torch.frombuffer(bytearray(range(8)), dtype=torch.uint8)
    offloaded, address = Offloaded([shared[2:], weight]), shared.data_ptr()
    assert offloaded.num_bytes == 4 * 4 and shared.tolist() == list(range(8))
    offloaded.restore()
    assert shared.data_ptr() == address and weight.tolist() == [1.0] * 4
