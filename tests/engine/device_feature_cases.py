"""Every feature of the engine with the bundled model on a CUDA device, else on the CPU. `make gpu-check` runs it.

The oracle is transformers in fp32: given our tokens, it must find each as likely as the best that the request allows,
or nearly.
"""

import asyncio
import json
import re
from contextlib import contextmanager

import pytest
import torch

pytest.importorskip("msgspec", reason="msgspec is not installed: make gpu-wheels fetches it")

from engine.checkpoint.locate import BUNDLED_MODEL
from engine.config import EngineConfig
from engine.driver import Driver
from engine.llm import LLM
from engine.request import Request
from engine.sampling_params import BeamSearchParams, Pooling, SamplingParams
from engine.structured_output import StructuredOutput
from tests.engine.models.adapters.peft_files import Merged, write_adapter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS = ["Once upon a time", "The little fox", "What is the capital of France?", "One day, a big bear"]
STORY = "Once upon a time there was a small fox who lived in a hollow log by the blue stream. " * 6
MANY = [*PROMPTS, STORY, STORY + "The fox", STORY + "One day", "The " * 300, *PROMPTS]  # long ones share a prefix
NUM_TOKENS = 32
NOT_ON_A_CPU = pytest.mark.skipif(DEVICE == "cpu", reason="float16 is not served on a CPU")
MAX_GAP = 0.25  # logits: bf16 may turn two choices around that fp32 finds this close


@pytest.fixture(scope="module")
def oracle():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def plain():
    with open_llm() as llm:
        yield llm


@contextmanager
def open_llm(**settings):
    settings = {"dtype": "bfloat16", "num_blocks": 256, "max_num_seqs": 8, "max_num_batched_tokens": 256} | settings
    with LLM(device=DEVICE, **settings) as llm:
        yield llm


def greedy(**fields):
    return SamplingParams(**({"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True} | fields))


def generate(llm, prompts, params, **options):
    outputs = llm.generate(prompts, params, use_tqdm=False, **options)
    assert all(part.finish_reason in ("length", "stop") for output in outputs for part in output.outputs)
    return outputs


@torch.no_grad()
def oracle_logits(oracle, output, index=0):
    """(the oracle's logits before each generated token [tokens, vocabulary], the tokens [tokens])"""
    prompt, tokens = list(output.prompt_token_ids), list(output.outputs[index].token_ids)
    logits = oracle(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return logits, torch.tensor(tokens)


def check(oracle, outputs, max_gap=MAX_GAP, equal=0.9):
    """Each token of each sample is the oracle's choice, or was nearly as likely."""
    for output in outputs:
        for index in range(len(output.outputs)):
            logits, tokens = oracle_logits(oracle, output, index)
            check_choices(logits, tokens, max_gap, equal)


def check_choices(logits, tokens, max_gap=MAX_GAP, equal=0.9):
    chosen = logits.gather(1, tokens[:, None])[:, 0]
    assert (logits.amax(-1) - chosen).max() <= max_gap
    assert (logits.argmax(-1) == tokens).float().mean() >= equal


@pytest.mark.parametrize(
    "settings, max_gap, equal",
    [
        pytest.param({"dtype": "float16"}, MAX_GAP, 0.9, marks=NOT_ON_A_CPU),
        ({"dtype": "float32"}, 0.01, 1.0),
        ({"cuda_graphs": False}, MAX_GAP, 0.9),
        ({"async_scheduling": False}, MAX_GAP, 0.9),
        ({"batch_invariant": True}, MAX_GAP, 0.9),
        ({"block_size": 128, "num_blocks": 32}, MAX_GAP, 0.9),
        ({"kv_cache_dtype": "int8"}, 2 * MAX_GAP, 0.85),
        ({"kv_cache_dtype": "fp8"}, 4 * MAX_GAP, 0.8),
        ({"kv_cache_dtype": "int4"}, 12 * MAX_GAP, 0.6),
        ({"quantization": "int8"}, 4 * MAX_GAP, 0.85),
        ({"quantization": "fp8"}, 6 * MAX_GAP, 0.75),
        ({"quantization": "int4"}, 16 * MAX_GAP, 0.5),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)  # fmt: skip
def test_greedy(oracle, settings, max_gap, equal):
    """More sequences than fit one step, twice."""
    with open_llm(**settings) as llm:
        for _ in range(2):
            check(oracle, generate(llm, MANY, greedy()), max_gap, equal)


@pytest.mark.parametrize("swaps", [False, True])
def test_preemption(oracle, swaps):
    """A pool too small for its sequences, whose blocks are computed again or come back from host memory."""
    settings = {"swap_space": 0.1, "swap_policy": "always"} if swaps else {"enable_prefix_caching": False}
    with open_llm(num_blocks=40, **settings) as llm:
        check(oracle, generate(llm, MANY, greedy(max_tokens=96)))
        stats = counted(llm)
    assert stats.num_preemptions.values[()] > 0
    assert (stats.host_tier_loads.values[()] > 0) == swaps


@pytest.mark.parametrize("guesses", ["ngram:4", f"{BUNDLED_MODEL}:3"], ids=["ngram", "draft"])
def test_speculation(oracle, guesses):
    """One stream that repeats itself, then several."""
    with open_llm(speculative=guesses) as llm:
        check(oracle, generate(llm, STORY, greedy(max_tokens=192)))
        check(oracle, generate(llm, MANY, greedy()))
        assert counted(llm).spec_decode_num_accepted_tokens.values[()] > 0


def counted(llm):
    """The engine's counters, brought up to date."""
    driver = llm.driver.replicas[0]
    driver.stats_snapshot()
    return driver.stats


def test_batch_invariant_bits():
    with open_llm(batch_invariant=True) as llm:
        together = generate(llm, [*PROMPTS, STORY], greedy(logprobs=2))
        for prompt, output in zip([*PROMPTS, STORY], together, strict=True):
            [alone] = generate(llm, prompt, greedy(logprobs=2))
            assert alone.outputs[0].token_ids == output.outputs[0].token_ids
            assert alone.outputs[0].logprobs == output.outputs[0].logprobs


def test_filters_that_leave_one_token(oracle, plain):
    """At a high temperature, so that a filter that does nothing shows."""
    narrow = [{"top_k": 1}, {"top_p": 1e-4}, {"min_p": 1.0}, {"top_k": 50, "top_p": 1e-4, "min_p": 0.5}]
    params = [greedy(temperature=1.5, **fields) for fields in narrow]
    check(oracle, generate(plain, PROMPTS, params))


def test_filters(oracle, plain):
    """Every token is one that the filter leaves."""
    params = [greedy(temperature=1.0, n=2, seed=5, **fields) for fields in ({"top_k": 4}, {"min_p": 0.2})]
    by_top_k, by_min_p = generate(plain, PROMPTS[:2], params)
    for index in range(2):
        logits, tokens = oracle_logits(oracle, by_top_k, index)
        least = logits.topk(4).values[:, -1]
        assert (logits.gather(1, tokens[:, None])[:, 0] >= least - MAX_GAP).all()
        logits, tokens = oracle_logits(oracle, by_min_p, index)
        gap = logits.amax(-1) - logits.gather(1, tokens[:, None])[:, 0]
        assert (gap <= -torch.log(torch.tensor(0.2)) + MAX_GAP).all() and (gap > 0).any()
    assert by_top_k.outputs[0].token_ids != by_top_k.outputs[1].token_ids


def test_penalties_biases_and_bans(oracle, plain):
    [first] = generate(plain, PROMPTS[0], greedy())
    banned = first.outputs[0].token_ids[0]
    tokens = sorted(set(first.outputs[0].token_ids))[:6]
    penalised, biased, without, among = generate(plain, PROMPTS[0:1] * 4, [
        greedy(frequency_penalty=1.0, presence_penalty=0.5), greedy(logit_bias={11: 100.0}),
        greedy(bad_words=((banned,),)), greedy(allowed_token_ids=tuple(tokens)),
    ])  # fmt: skip
    logits, chosen = oracle_logits(oracle, penalised)
    for at in range(len(chosen)):
        for token in set(chosen[:at].tolist()):
            logits[at, token] -= 0.5 + int((chosen[:at] == token).sum())
    check_choices(logits, chosen, 2 * MAX_GAP)
    assert set(biased.outputs[0].token_ids) == {11}
    logits, chosen = oracle_logits(oracle, without)
    logits[:, banned] = float("-inf")
    check_choices(logits, chosen)
    logits, chosen = oracle_logits(oracle, among)
    others = torch.ones(logits.shape[1], dtype=torch.bool)
    others[tokens] = False
    check_choices(logits.masked_fill(others, float("-inf")), chosen)


def test_logprobs_and_seeds(oracle, plain):
    params = greedy(temperature=1.0, seed=3, logprobs=5)
    [output], [again] = (generate(plain, PROMPTS[1], params) for _ in range(2))
    assert output.outputs[0].token_ids[:8] == again.outputs[0].token_ids[:8]
    logits, tokens = oracle_logits(oracle, output)
    expected = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    found = torch.tensor([token.logprob for token in output.outputs[0].logprobs])
    assert (found - expected).abs().max() < 2 * MAX_GAP
    assert all(len(token.top) >= 5 for token in output.outputs[0].logprobs)


def test_forms(plain):
    for package in ("llguidance", "jsonschema"):
        pytest.importorskip(package, reason=f"{package} is not installed: make gpu-wheels fetches it")
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    forms = [StructuredOutput.json_schema(schema), StructuredOutput("regex", "[a-f]{3}-[0-9]{4}"),
             StructuredOutput("choice", '["red", "green"]'), StructuredOutput.json_object()]  # fmt: skip
    params = [greedy(temperature=1.0, seed=1, max_tokens=80, ignore_eos=False, structured_output=form)
              for form in forms]  # fmt: skip
    by_schema, by_regex, by_choice, any_object = (output.outputs[0].text for output in generate(plain, PROMPTS, params))
    found = json.loads(by_schema)
    assert set(found) == {"name", "age"} and isinstance(found["age"], int)
    assert re.fullmatch("[a-f]{3}-[0-9]{4}", by_regex) and by_choice in ("red", "green")
    assert isinstance(json.loads(any_object), dict)


def test_beam_search(oracle, plain):
    """The best hypothesis is at least as likely as the greedy text, and its score is the oracle's."""
    [found] = plain.beam_search(PROMPTS[0], BeamSearchParams(beam_width=4, max_tokens=12, ignore_eos=True), False)
    assert len(found.outputs) == 4
    sums = []
    for index, hypothesis in enumerate(found.outputs):
        logits, tokens = oracle_logits(oracle, found, index)
        sums.append(float(logits.log_softmax(-1).gather(1, tokens[:, None]).sum()))
        assert abs(sums[-1] - hypothesis.cumulative_logprob) < 4 * MAX_GAP
    [best] = generate(plain, PROMPTS[0], greedy(max_tokens=12))
    logits, tokens = oracle_logits(oracle, best)
    assert sums[0] >= float(logits.log_softmax(-1).gather(1, tokens[:, None]).sum()) - MAX_GAP


def test_samples_share_a_prompt_whose_prefix_is_cached(oracle, plain):
    [output] = generate(plain, STORY, greedy(n=4))
    [again] = generate(plain, STORY + "The fox", greedy(n=3))
    check(oracle, [output, again])
    assert again.num_cached_tokens >= 64


def test_embeddings(oracle):
    text = "a small fox who lived in a hollow log"

    async def embed(driver, pooling):
        request = Request(pooling.kind, driver.tokenizer.encode(text), SamplingParams(pooling=pooling))
        [output] = [output async for output in driver.generate(request)]
        return torch.frombuffer(bytearray(output.outputs[0].embedding), dtype=torch.float32)

    async def work(driver):
        return driver.tokenizer.encode(text), [await embed(driver, Pooling(kind)) for kind in ("last", "mean")]

    ids, found = asyncio.run(with_driver(work))
    with torch.no_grad():
        hidden = oracle.model(torch.tensor([ids])).last_hidden_state[0]
    for vector, expected in zip(found, (hidden[-1], hidden.mean(0)), strict=True):
        assert torch.nn.functional.cosine_similarity(vector, expected, dim=0) > 0.99


def test_adapters(oracle, tmp_path):
    """A batch whose rows have different adapters, or none."""
    deltas = [write_adapter(tmp_path / str(i), oracle, seed=i, alpha=4, rank=8) for i in range(2)]
    names = tuple(f"a{i}={tmp_path / str(i)}" for i in range(2))
    with open_llm(lora=names) as llm:
        outputs = generate(llm, [PROMPTS[0]] * 3, greedy(), lora=["a0", "a1", ""])
    for output, delta in zip(outputs, [*deltas, {}], strict=True):
        with Merged(oracle, delta):
            check(oracle, [output], 2 * MAX_GAP, 0.85)


def test_sleep():
    async def text(driver, name):
        stream = driver.generate(Request(name, driver.tokenizer.encode(PROMPTS[0]), greedy()))
        return "".join([part.text async for output in stream for part in output.outputs])

    async def work(driver):
        texts = [await text(driver, "awake")]
        for level in (1, 2):
            await driver.sleep(level)
            await driver.wake()
            texts.append(await text(driver, f"after level {level}"))
        return texts

    awake, *others = asyncio.run(with_driver(work))
    assert awake and others == [awake, awake]


async def with_driver(work):
    """Start a Driver, and return the result of `work` with it."""
    driver = Driver(EngineConfig(device=DEVICE, dtype="bfloat16", num_blocks=256, max_num_seqs=8))
    await driver.start()
    try:
        await driver.wait_ready()
        return await work(driver)
    finally:
        await driver.stop()
