"""Adapters in a Driver with a real Worker: slots, prefixes, loading while streams run, restarts and sleep."""

import asyncio
import copy
import os
import signal

import pytest
import torch
from transformers import LlamaForCausalLM

from engine.checkpoint.locate import BUNDLED_MODEL
from engine.config import EngineConfig
from engine.driver import Driver
from engine.errors import ConfigError, EngineError, InvalidRequestError, ModelError
from engine.llm import LLM
from engine.request import Request
from engine.requests.adapters import Adapters
from engine.sampling_params import BeamSearchParams, SamplingParams
from tests.engine.bundled_driver import read, running_driver
from tests.engine.driving import until
from tests.engine.models.adapters.peft_files import TARGETS, Merged, write_adapter

NUM_ADAPTERS, NUM_TOKENS = 5, 24
RANKS = int(os.environ.get("RANKS", "2"))  # `make ranks` also runs with 4
PROMPT = "Once upon a time there was a fox who lived by the blue sea. " * 3


@pytest.fixture(scope="module")
def model():
    return LlamaForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def adapters(model, tmp_path_factory):
    """(root folder with adapters "0" to "4", what each adds to the weights)"""
    root = tmp_path_factory.mktemp("adapters")
    return root, [write_adapter(root / str(i), model, seed=i, alpha=4, rank=8) for i in range(NUM_ADAPTERS)]


def named(root):
    return tuple(f"a{i}={root / str(i)}" for i in range(NUM_ADAPTERS))


def start(driver, name, adapter="", prompt=PROMPT, tokens=NUM_TOKENS, **params):
    params = SamplingParams(**({"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True} | params))
    return driver.generate(Request(name, driver.tokenizer.encode(prompt), params, adapter=adapter))


async def cached_tokens(driver, name, adapter=""):
    outputs = [output async for output in start(driver, name, adapter, tokens=1)]
    return outputs[-1].num_cached_tokens


@torch.inference_mode()
def merged_greedy(model, deltas, ids):
    with Merged(model, deltas):
        ids = list(ids)
        for _ in range(NUM_TOKENS):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[-NUM_TOKENS:]


@torch.inference_mode()
def merged_logprob(model, deltas, ids, generated):
    with Merged(model, deltas):
        logprobs = model(torch.tensor([[*ids, *generated]])).logits[0].log_softmax(-1)
    return sum(float(logprobs[len(ids) - 1 + i, token]) for i, token in enumerate(generated))


async def test_five_adapters_in_two_slots_and_the_base(model, adapters):
    """More adapters than slots: they take turns. Each stream has the text of merged weights; no prefix is shared."""
    root, deltas = adapters
    async with running_driver(lora=named(root), max_loras=2, model=str(BUNDLED_MODEL)) as driver:
        assert sorted(driver.adapters) == [f"a{i}" for i in range(NUM_ADAPTERS)]
        names = ["", *driver.adapters, "", "a3"]
        streams = [start(driver, f"{i}", name) for i, name in enumerate(names)]
        found = await asyncio.gather(*map(read, streams))
        ids = driver.tokenizer.encode(PROMPT)
        for name, (tokens, _) in zip(names, found, strict=True):
            assert tokens == merged_greedy(model, deltas[int(name[1:])] if name else {}, ids), name
        assert len({tuple(tokens) for tokens, _ in found}) > 3, "adapters change the text"
        assert await cached_tokens(driver, "again", "a1") >= 16, "an adapter's own prefix"
        with pytest.raises(InvalidRequestError, match="no adapter 'a9'"):
            start(driver, "unknown", "a9")
        scores = [output async for output in start(driver, "s", "a2", tokens=1, prompt_logprobs=1)][-1]
        assert scores.num_generated_tokens == 1


async def test_loading_at_run_time_changes_no_byte_of_live_streams(model, adapters):
    """Nor does unloading; a name that is loaded again with other weights shares no prefix; a wrong path is refused."""
    root, deltas = adapters
    settings = {"allow_runtime_lora": True, "lora_root": str(root), "model": str(BUNDLED_MODEL)}
    async with running_driver(lora=(f"a0={root / '0'}",), **settings) as driver:
        expected = [(await read(start(driver, name, name, tokens=100)))[0] for name in ("", "a0")]
        streams = [start(driver, f"live{i}", name, tokens=100) for i, name in enumerate(("", "a0"))]
        reading = asyncio.gather(*map(read, streams))
        await until(lambda: streams[0].num_generated_tokens > 3)
        await driver.load_adapter("new", "1")
        driver.unload_adapter("a0")
        assert list(driver.adapters) == ["new"] and not streams[0].finished
        assert [tokens for tokens, _ in await reading] == expected
        ids = driver.tokenizer.encode(PROMPT)
        assert (await read(start(driver, "n1", "new")))[0] == merged_greedy(model, deltas[1], ids)
        with pytest.raises(InvalidRequestError, match="loaded already"):
            await driver.load_adapter("new", "1")
        driver.unload_adapter("new")
        with pytest.raises(InvalidRequestError, match="no adapter 'new'"):
            driver.unload_adapter("new")
        await driver.load_adapter("new", "2")
        assert await cached_tokens(driver, "n2", "new") == 0
        assert (await read(start(driver, "n3", "new")))[0] == merged_greedy(model, deltas[2], ids)
        (root / "link").unlink(missing_ok=True)
        (root / "link").symlink_to("/tmp")
        for path in ("..", "/etc", "link", "missing", ".", "\0", "0/../../x"):
            with pytest.raises(InvalidRequestError, match="inside --lora-root"):
                await driver.load_adapter("outside", path)
        (root / "empty").mkdir(exist_ok=True)
        with pytest.raises(InvalidRequestError, match="cannot read"):
            await driver.load_adapter("empty", "empty")


def test_scores_of_the_base_do_not_depend_on_the_adapter_of_the_step_before(model, tmp_path):
    """An adapter that changes lm_head, on all rows of a step; then the scores of a prompt without one."""
    write_adapter(tmp_path / "0", model, targets=(*TARGETS, "lm_head"))
    params = SamplingParams(max_tokens=0, prompt_logprobs=1)
    settings = {"device": "cpu", "dtype": "float32", "max_model_len": 128, "model": str(BUNDLED_MODEL)}
    with LLM(lora=(f"a0={tmp_path / '0'}",), **settings) as llm:

        def scores(name):
            (output,) = llm.generate([PROMPT], params, False, lora=name)
            return [token.logprob for token in output.prompt_logprobs[1:]]

        plain, adapted = scores(""), scores("a0")
        llm.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True), False, lora="a0")
        assert scores("") == pytest.approx(plain, abs=1e-4)
        assert plain != pytest.approx(adapted, abs=1e-2)


def test_an_llm_takes_an_adapter_for_a_call_or_for_each_prompt(model, adapters):
    root, deltas = adapters
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    settings = {"device": "cpu", "dtype": "float32", "max_model_len": 128, "model": str(BUNDLED_MODEL)}
    with LLM(lora=named(root)[:2], **settings) as llm:
        chat = [{"role": "user", "content": "Hi"}]
        found = [
            *zip(("a0", "", "a1"), llm.generate([PROMPT] * 3, params, False, lora=["a0", "", "a1"]), strict=True),
            ("a1", llm.chat(chat, params, False, lora="a1")[0]),
            ("", llm.chat(chat, params, False)[0]),
        ]
        for name, output in found:
            tokens = merged_greedy(model, deltas[int(name[1:])] if name else {}, output.prompt_token_ids)
            assert list(output.outputs[0].token_ids) == tokens, name
        search = BeamSearchParams(beam_width=2, max_tokens=6)
        (found_beams,) = llm.beam_search(PROMPT, search, False, lora="a0")
        for beam in found_beams.outputs:
            scored = merged_logprob(model, deltas[0], found_beams.prompt_token_ids, beam.token_ids)
            assert beam.cumulative_logprob == pytest.approx(scored, abs=1e-4)
        with pytest.raises(InvalidRequestError, match=r"no adapter 'a9'.* has \['a0', 'a1'\]"):
            llm.generate(["x", "y"], params, False, lora=["a0", "a9"])
        for lora in (["a0"], None, [None, "a0"], [[], "a0"], 3):
            with pytest.raises(InvalidRequestError, match="lora"):
                llm.generate(["x", "y"], params, False, lora=lora)
        assert llm.driver.num_live_requests == 0


@pytest.mark.slow
async def test_a_restart_and_a_sleep_load_the_adapters_again(adapters, tmp_path, model):
    root = tmp_path / "root"
    write_adapter(root / "0", model, seed=0, alpha=4, rank=8)
    async with running_driver(lora=(f"a0={root / '0'}",), model=str(BUNDLED_MODEL)) as driver:
        expected = await read(start(driver, "first", "a0", tokens=100))
        for name in ("killed", "asleep1", "asleep2"):
            stream = start(driver, name, "a0", tokens=100)
            reading = asyncio.ensure_future(read(stream))
            await until(lambda stream=stream: stream.num_generated_tokens > 3)
            if name == "killed":
                os.kill(driver.worker_pid, signal.SIGKILL)
            else:
                await driver.sleep(int(name[-1]))
                await driver.wake()
            assert await reading == expected, name
        write_adapter(root / "0", model, seed=1)  # the files change before the next restart
        stream = start(driver, "changed", "a0", tokens=100)
        reading = asyncio.ensure_future(read(stream))
        await until(lambda: stream.num_generated_tokens > 3)
        os.kill(driver.worker_pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="changed since the adapter was loaded"):
            await reading
        with pytest.raises(EngineError, match="cannot be loaded any more"):
            start(driver, "later", "a0")
        assert (await read(start(driver, "base")))[0], "the base goes on"


async def test_a_load_ends_with_the_engine(tmp_path):
    (tmp_path / "a").mkdir()
    adapters, sent = Adapters(EngineConfig(allow_runtime_lora=True, lora_root=str(tmp_path))), []
    adapters.attach(sent.append)
    loading = asyncio.ensure_future(adapters.load("a", "a"))
    await until(lambda: sent)
    adapters.fail_all(EngineError("the engine has ended"))
    for load in (loading, adapters.load("b", "a")):
        with pytest.raises(EngineError, match="has ended"):
            await load


async def test_an_adapter_that_is_not_served_ends_the_start(tmp_path):
    driver = Driver(EngineConfig(device="cpu", lora=(f"bad={tmp_path}",)))
    await driver.start()
    try:
        with pytest.raises(ModelError, match=r"lora.*adapter_config\.json"):
            await driver.wait_ready()
    finally:
        await driver.stop()


async def test_a_worker_that_is_killed_while_it_reads_the_first_adapters_is_replaced(adapters):
    root, _ = adapters
    driver = Driver(EngineConfig(model=str(BUNDLED_MODEL), device="cpu", max_model_len=256, lora=named(root)))
    await driver.start()
    try:
        while driver.phase != "loading adapters":  # noqa: ASYNC110 - that phase is over within milliseconds
            await asyncio.sleep(0)
        os.kill(driver.worker_pid, signal.SIGKILL)
        await driver.wait_ready()
        assert sorted(driver.adapters) == [f"a{i}" for i in range(NUM_ADAPTERS)]
        ids, _ = await read(start(driver, "first", "a0"))
        assert len(ids) == NUM_TOKENS
    finally:
        await driver.stop()


@pytest.mark.slow
async def test_each_rank_adds_its_share_of_an_adapter(model, adapters):
    """Three adapters and the base in one batch over ranks: the text of merged weights, without another call between
    ranks. One adapter comes at run time, and a rank ends under the streams."""
    root, deltas = adapters
    model = copy.deepcopy(model)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())  # the embedding stays as it is
    deltas = [*deltas[:2], write_adapter(root / "head", model, targets=(*TARGETS, "lm_head"), seed=2, alpha=4, rank=8)]
    settings = {"model": str(BUNDLED_MODEL), "cpu_threads": 1, "allow_runtime_lora": True, "lora_root": str(root)}
    async with running_driver(lora=named(root)[:2], tensor_parallel_size=RANKS, **settings) as driver:
        await driver.load_adapter("a2", "head")
        names = ["", *driver.adapters]
        streams = [start(driver, f"{i}", name) for i, name in enumerate(names)]
        texts = asyncio.gather(*map(read, streams))
        await until(lambda: all(stream.num_generated_tokens > 3 for stream in streams))
        os.kill(driver.supervisor.executor.pids[1], signal.SIGKILL)
        ids = driver.tokenizer.encode(PROMPT)
        for name, (tokens, _) in zip(names, await texts, strict=True):
            assert tokens == merged_greedy(model, deltas[int(name[1:])] if name else {}, ids), name
        assert driver.stats.worker_restarts.values[()] == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora": ("x",)}, "not NAME=DIR"),
        ({"lora": ("x=a", "x=b")}, "the same name"),
        ({"allow_runtime_lora": True}, "name the folder of the adapters with lora_root"),
        ({"lora": ("x=a",), "batch_invariant": True}, "batch_invariant"),
    ],
    ids=str,
)
def test_refused_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**settings)
