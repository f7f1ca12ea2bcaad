"""`--data-parallel-size`: the choice of a replica, and two replicas with real processes on a CPU."""

import asyncio
import os
import re
import signal
import sys
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError, DeadlineError, EngineError, InvalidRequestError, QueueFullError
from engine.memory.sequence import Sequence
from engine.replicas.replicas import make_engine
from engine.replicas.router import CHUNK_TOKENS, LIVE_COST, PrefixRouter, prefix_keys
from engine.request import Request
from engine.requests.live_request import SEED_STEP
from engine.requests.model_info import cut_to_context, fits_still
from engine.sampling_params import SamplingParams
from engine.structured_output import StructuredOutput
from tests.checkpoints import save_fake_checkpoint
from tests.engine.bundled_driver import CASES, read, running_driver, start
from tests.engine.driving import until
from tests.fake_device import expected_tokens

SETTINGS = {"num_blocks": 512, "cpu_threads": 1}
ROOM = 1 << 16


FAKE_WORKER = {"worker_command": (sys.executable, "-m", "tests.fake_worker")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_fake_checkpoint(tmp_path_factory.mktemp("model"))


def test_a_replica_that_is_only_asked_leaves_the_limit_of_a_sequence():
    """The next replica that is asked may have a longer context."""
    smaller = SimpleNamespace(max_model_len=64)
    seq = Sequence(0, [5] * 9, SamplingParams(max_tokens=None), seed=0, max_num_tokens=128)
    assert fits_still(seq, smaller) and seq.max_num_tokens == 128
    cut_to_context(seq, smaller)
    assert seq.max_num_tokens == 64
    asked_for = Sequence(1, [5] * 9, SamplingParams(max_tokens=80), seed=0, max_num_tokens=89)
    assert not fits_still(asked_for, smaller)


@asynccontextmanager
async def running_replicas(options=None, **settings):
    engine = make_engine(EngineConfig(data_parallel_size=2, **settings), **(options or {}))
    await engine.start()
    try:
        await engine.wait_ready()
        yield engine
    finally:
        await engine.stop()


def live_requests(engine):
    return [replica.num_live_requests for replica in engine.replicas]


def test_keys_are_those_of_whole_chunks_and_of_one_salt():
    tokens = list(range(3 * CHUNK_TOKENS + 5))
    keys = prefix_keys(tokens, "")
    assert len(keys) == 3 and prefix_keys(tokens[: 2 * CHUNK_TOKENS], "") == keys[:2]
    assert not set(keys) & set(prefix_keys(tokens, "other"))
    assert not set(keys) & set(prefix_keys([9, *tokens[1:]], ""))


def test_the_longest_prefix_wins_until_its_holder_is_busier_than_the_prefix_is_long():
    router, tokens = PrefixRouter(3), list(range(10 * CHUNK_TOKENS))
    keys = prefix_keys(tokens, "")
    router.sent(1, keys[:4], ROOM)
    router.sent(2, keys[:8], ROOM)

    def order(*work):
        return router.order(keys, len(tokens), list(enumerate(work)))

    assert order(0, 0, 0) == [2, 1, 0]
    assert order(0, 0, 8 * CHUNK_TOKENS - 1)[0] == 1
    assert order(0, 4 * CHUNK_TOKENS + 1, 8 * CHUNK_TOKENS + 1) == [0, 1, 2]
    assert router.order(keys, len(tokens), [(0, 0), (1, 0)]) == [1, 0], "the second does not serve now"
    router.forget(2)
    assert order(0, 0, 0)[0] == 1


def test_a_replica_is_believed_to_hold_no_more_than_its_cache():
    router = PrefixRouter(2)
    old, new = (prefix_keys([first] * 4 * CHUNK_TOKENS, "") for first in (1, 2))
    router.sent(0, old, 5 * CHUNK_TOKENS)
    router.sent(0, new, 5 * CHUNK_TOKENS)
    assert router.order(new, 4 * CHUNK_TOKENS, [(0, CHUNK_TOKENS), (1, 0)])[0] == 0
    assert router.order(old, 4 * CHUNK_TOKENS, [(0, LIVE_COST), (1, 0)])[0] == 1


async def test_replicas_share_the_work_and_the_death_of_one_worker_costs_no_stream():
    async with running_driver(**SETTINGS) as alone:
        expected = await asyncio.gather(*(read(start(alone, f"r{i}", case)) for i, case in enumerate(CASES)))
    async with running_replicas(dtype="float32", device="cpu", max_model_len=256, **SETTINGS) as engine:
        first, second = engine.replicas
        assert first.tokenizer is second.tokenizer and first.worker_pid != second.worker_pid
        streams = [start(engine, f"r{i}", case) for i, case in enumerate(CASES)]
        assert min(live_requests(engine)) > 3
        with pytest.raises(InvalidRequestError, match="is running already"):
            start(engine, f"r{len(CASES) - 1}", CASES[0])
        tasks = [asyncio.create_task(read(stream)) for stream in streams]
        await until(lambda: all(stream.num_generated_tokens > 3 for stream in streams))
        os.kill(first.worker_pid, signal.SIGKILL)
        assert await asyncio.gather(*tasks) == expected
        assert [replica.stats.worker_restarts.values[()] for replica in engine.replicas] == [1, 0]
        assert engine.phase == "ready" and engine.health() is None
        output = StructuredOutput("regex", "(yes|no){3}")
        await engine.grammars.prepare(output)
        params = SamplingParams(max_tokens=20, seed=1, structured_output=output)
        answers = [engine.generate(Request(f"g{i}", [5 + i], params)) for i in range(4)]
        assert live_requests(engine) == [2, 2]
        for _, text in await asyncio.gather(*map(read, answers)):
            assert re.fullmatch("(yes|no){3}", text)


async def test_prompts_follow_their_prefix_and_sleep_loses_it(folder):
    prompt = list(range(5, 5 + 3 * CHUNK_TOKENS))
    params = SamplingParams(temperature=0.0, max_tokens=2)
    async with running_replicas(FAKE_WORKER, model=str(folder), load_format="dummy") as engine:

        async def send(name, tokens):
            stream = engine.generate(Request(name, tokens, params))
            held = live_requests(engine).index(1)
            await read(stream)
            return held

        holders = {await send(f"a{i}", [*prompt, i]) for i in range(3)}
        assert holders == {0}
        assert await send("b", [7] * len(prompt)) == 1, "the one that was sent less"
        assert await send("c", [*prompt, 9]) == 0
        hits = [replica.scheduler.block_manager.num_prefix_hits for replica in engine.replicas]
        assert hits[0] >= 3 * (len(prompt) - 16) and hits[1] == 0
        await engine.sleep(2)
        assert engine.sleep_level == 2 and engine.phase == "sleeping"
        assert await send("d", prompt) in (0, 1)
        assert engine.sleep_level == 0 and engine.phase == "ready"
        assert sorted(replica.phase for replica in engine.replicas) == ["ready", "sleeping"]
        await engine.wake()
        assert {replica.phase for replica in engine.replicas} == {"ready"}


@pytest.mark.parametrize("fate", ["hangs", "has ended"])
async def test_grammars_do_not_wait_for_a_replica_that_does_not_answer(folder, monkeypatch, fate):
    hangs = ("--hang-at-step", "1") if fate == "hangs" else ()
    options = {"worker_command": (*FAKE_WORKER["worker_command"], *hangs)}
    async with running_replicas(options, model=str(folder), load_format="dummy") as engine:
        first, _ = engine.replicas
        if fate == "has ended":
            monkeypatch.setattr(first.scheduler, "schedule", lambda: 1 / 0)
        stream = first.generate(Request("r", [5, 6, 7], SamplingParams(max_tokens=8)))
        await until(lambda: first.num_in_flight or first.health() is not None)
        await asyncio.wait_for(engine.grammars.prepare(StructuredOutput("regex", "(yes|no)")), 20)
        stream.close()


async def test_the_queue_is_full_when_all_are(folder):
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    options = FAKE_WORKER | {"max_queued_requests": 4}
    async with running_replicas(options, model=str(folder), load_format="dummy") as engine:
        for i in range(4):  # no step begins before this task waits
            engine.generate(Request(f"r{i}", [5, 6, 7], params))
        assert live_requests(engine) == [2, 2]
        with pytest.raises(QueueFullError, match="2 requests are waiting already"):
            engine.generate(Request("r4", [5, 6, 7], params))
        engine.abort("r2")
        assert sorted(live_requests(engine)) == [1, 2]


def test_two_workers_share_no_file_and_no_gpu():
    config = EngineConfig(swap_space=1 << 20, disk_cache="kv", data_parallel_size=2, tensor_parallel_size=4)
    engine = make_engine(config)
    assert [replica.config.disk_cache for replica in engine.replicas] == ["kv/replica-0", "kv/replica-1"]
    assert config.num_processes == 8
    with pytest.raises(ConfigError, match="cannot sleep for another"):
        make_engine(config, room=object())


async def samples_of(stream):
    """The token ids of each sample of a stream."""
    samples = {}
    async for output in stream:
        for part in output.outputs:
            samples.setdefault(part.index, []).extend(part.token_ids)
    return [samples[index] for index in sorted(samples)]


def begin(engine, name, prompt, *, seed=7, **options):
    timeout = options.pop("timeout", None)
    params = SamplingParams(**({"seed": seed, "max_tokens": 120, "ignore_eos": True} | options))
    return engine.generate(Request(name, prompt, params, timeout=timeout))


async def test_other_replicas_go_on_with_the_streams_of_one_that_ends(folder):
    """Its Workers have died too often, such as on a card that has fallen off the bus."""
    options = {"worker_command": (*FAKE_WORKER["worker_command"], "--step-seconds", "0.002")}
    settings = {"model": str(folder), "load_format": "dummy", "max_worker_restarts": 0, "max_num_seqs": 6}
    async with running_replicas(options, **settings) as engine:
        first, second = engine.replicas
        streams = [begin(first, f"r{i}", [97 + i, 5, 6]) for i in range(4)]
        several = begin(first, "several", [9, 8, 7], n=3, temperature=1.0)  # one or two of them do not fit yet
        waits = [begin(first, f"w{i}", [70 + i, 5, 6], n=3, temperature=1.0) for i in range(2)]
        late = begin(first, "late", [3, 3, 3], timeout=0.3, max_tokens=500)
        other = begin(second, "other", [4, 4, 4])
        assert live_requests(engine) == [8, 1]
        tasks = [asyncio.create_task(samples_of(stream)) for stream in (*streams, several, *waits, other)]
        too_late = asyncio.create_task(samples_of(late))
        await until(lambda: all(stream.num_generated_tokens > 9 for stream in streams))
        os.kill(first.worker_pid, signal.SIGKILL)
        await until(lambda: first.health() is not None)
        assert live_requests(engine) == [0, 9] and engine.health() is None
        for replica in engine.replicas:
            replica.check_invariants()
        found = await asyncio.gather(*tasks)
        with pytest.raises(DeadlineError, match=r"its timeout of 0\.3 s"):
            await too_late
        prompts = [*([97 + i, 5, 6] for i in range(4)), [9, 8, 7], [70, 5, 6], [71, 5, 6], [4, 4, 4]]
        for prompt, samples in zip(prompts, found, strict=True):
            seeds = [(7 + index * SEED_STEP) % 2**64 for index in range(len(samples))]
            assert samples == [expected_tokens(prompt, seed, 120) for seed in seeds]
        assert [len(samples) for samples in found] == [1, 1, 1, 1, 3, 3, 3, 1]
        assert engine.request_report("r0").completion_tokens == 120
        assert not live_requests(engine)[1]
        second.check_invariants()


def two_samples_of_which_the_first_ends_soon(seed=7):
    """(prompt, stop string)"""
    for number in range(1000):
        prompt = [97 + number % 26, 1 + number // 26]
        first, second = (bytes(expected_tokens(prompt, seed + i * SEED_STEP, 400)).decode() for i in range(2))
        if (stop := first[4:7]) not in first[:4] + second:
            return prompt, stop
    raise AssertionError("no such prompt")


async def test_a_sample_that_had_ended_before_the_move_shares_no_id_with_another_request(folder):
    options = {"worker_command": (*FAKE_WORKER["worker_command"], "--step-seconds", "0.002")}
    settings = {"model": str(folder), "load_format": "dummy", "max_worker_restarts": 0}
    prompt, stop = two_samples_of_which_the_first_ends_soon()
    async with running_replicas(options, **settings) as engine:
        first, second = engine.replicas
        half = begin(first, "half", prompt, n=2, stop=stop, max_tokens=400)
        other = begin(second, "other", [4, 4, 4], max_tokens=400)
        assert half.sequences()[0].seq_id == other.sequences()[0].seq_id
        other_tokens = asyncio.create_task(samples_of(other))
        await until(lambda: half.sequences()[0].finish_reason)
        os.kill(first.worker_pid, signal.SIGKILL)
        await until(lambda: second.is_live("half"))
        half.close()
        second.check_invariants()
        assert await other_tokens == [expected_tokens([4, 4, 4], 7, 400)]


@pytest.mark.parametrize("held", [False, True])
async def test_a_request_moves_to_the_same_weights_only(folder, tmp_path, held):
    """The name was given to others while it ran; the heir still has the old ones where a request of its own needs
    them."""
    for version in "12":
        (tmp_path / version).mkdir()
    options = {"worker_command": (*FAKE_WORKER["worker_command"], "--step-seconds", "0.002")}
    settings = {"model": str(folder), "load_format": "dummy", "max_worker_restarts": 0}
    lora = {"lora": (f"a={tmp_path / '1'}",), "allow_runtime_lora": True, "lora_root": str(tmp_path)}
    params = SamplingParams(max_tokens=500, ignore_eos=True, seed=7)
    async with running_replicas(options, **settings, **lora) as engine:
        first, second = engine.replicas
        if held:
            second.generate(Request("holder", [5, 6], params, adapter="a"))
        old = first.generate(Request("old", [5, 6], params, adapter="a"))
        for replica in engine.replicas:
            replica.unload_adapter("a")
            await replica.load_adapter("a", "2")
        new = first.generate(Request("new", [5, 6], params, adapter="a"))
        await until(lambda: new.num_generated_tokens > 2)
        os.kill(first.worker_pid, signal.SIGKILL)
        await until(lambda: first.health() is not None)
        live = sorted(request.request_id for request in second.live_requests)
        assert live == (["holder", "new", "old"] if held else ["new"])
        if held:
            assert {seq.adapter for seq in old.sequences()}.isdisjoint(seq.adapter for seq in new.sequences())
            assert await samples_of(old) == [expected_tokens([5, 6], 7, 500)]
        else:
            with pytest.raises(EngineError, match="The engine ended while this request ran"):
                await samples_of(old)
        assert await samples_of(new) == [expected_tokens([5, 6], 7, 500)]


async def test_a_request_that_may_have_killed_the_workers_of_a_replica_does_not_move_on(folder):
    deadly = ("--die-on-token", "250")
    options = {"worker_command": (*FAKE_WORKER["worker_command"], *deadly)}
    settings = {"model": str(folder), "load_format": "dummy", "max_worker_restarts": 1}
    async with running_replicas(options, **settings) as engine:
        first, second = engine.replicas
        guilty = begin(first, "guilty", [250, 5, 6])
        innocent = asyncio.create_task(samples_of(begin(first, "late", [5, 6], max_tokens=8)))
        with pytest.raises(EngineError, match="The engine ended while this request ran"):
            await samples_of(guilty)
        assert first.health() is not None and second.health() is None
        await asyncio.wait([innocent])
        assert second.stats.worker_restarts.values[()] == 0


async def test_a_fault_of_ours_does_not_strike_the_next_replica(folder, monkeypatch):
    async with running_replicas(FAKE_WORKER, model=str(folder), load_format="dummy") as engine:
        first, second = engine.replicas
        monkeypatch.setattr(first.scheduler, "schedule", lambda: 1 / 0)
        with pytest.raises(EngineError, match="an internal error ended the engine loop"):
            await samples_of(begin(first, "r", [5, 6, 7]))
        assert await samples_of(begin(engine, "next", [5, 6, 7])) and second.health() is None


async def test_streams_end_where_the_move_to_another_replica_fails(folder, monkeypatch):
    settings = {"model": str(folder), "load_format": "dummy", "max_worker_restarts": 0}
    async with running_replicas(FAKE_WORKER, **settings) as engine:
        first, second = engine.replicas
        monkeypatch.setattr(second, "take_over", lambda *arguments: 1 / 0)
        stream = begin(first, "r", [5, 6, 7])
        await until(lambda: first.worker_pid is not None)
        os.kill(first.worker_pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="max_worker_restarts is 0"):
            await samples_of(stream)
        assert first.health() is not None and second.health() is None
