"""Logprobs of prompts by the real ModelRunner, through the Scheduler, against transformers in fp32."""

import random
from collections import deque
from dataclasses import replace
from itertools import count

import pytest
import torch

from engine.checkpoint.locate import BUNDLED_MODEL
from engine.config import EngineConfig
from engine.memory.block_manager import BlockManager
from engine.models.decoder import Decoder
from engine.models.families import read_model_config
from engine.outputs import PromptLogprobs
from engine.request import Request
from engine.requests.live_request import new_sequences
from engine.sampling_params import SamplingParams
from engine.scheduling.scheduler import Scheduler
from engine.worker.load import load_runner
from engine.worker.sampling import prompt_scorer
from tests.engine.worker.lazy_queue import LazyQueue
from tests.engine.worker.runners import make_queue_runner, zeroed_kv_caches

CONFIG = EngineConfig(device="cpu", dtype="float32", block_size=8, num_blocks=96, max_num_seqs=24, cpu_threads=1)
PROMPTS = [[5, 6, 7, 8, 9], list(range(10, 31)), [40], list(range(50, 90)), [91, 3] * 8]
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def cpu_runner(model_dir):
    return load_runner(CONFIG, model_dir, [2], lambda phase: None)[0]


@pytest.fixture(scope="module", params=["cpu", "queue"])
def runner(request, model_dir, decoder, cpu_runner):
    """On a CPU, and as on a GPU: inputs in buffers that are written over, results that are there when waited for."""
    if request.param == "cpu":
        return cpu_runner
    kv_caches = zeroed_kv_caches(read_model_config(model_dir), CONFIG.num_blocks)
    return make_queue_runner(model_dir, decoder, LazyQueue(), capacity=24, max_num_seqs=24, kv_caches=kv_caches)


class Scored:
    """Requests side by side through a Scheduler; `logprobs` of each prompt and the `tokens` of each sample."""

    def __init__(self, runner, prompts, num_blocks=96, ahead=1, manager=None, **params):
        settings = {"max_num_seqs": 24, "max_num_batched_tokens": params.pop("budget", 64)}
        params = {"temperature": 0.0, "max_tokens": 4, "prompt_logprobs": 5, "seed": 1} | params
        self.manager = manager or BlockManager(num_blocks, CONFIG.block_size)
        self.scheduler = Scheduler(self.manager, eos_token_ids=[2], watermark=0.0, **settings)
        self.logprobs, self.samples, owners = [], [], {}
        for number, prompt in enumerate(prompts):
            request = Request(str(number), list(prompt), SamplingParams(**params))
            limit = len(prompt) + (request.params.max_tokens or 1)
            first, *forks = samples = new_sequences(request, limit, count(number * 8))
            self.scheduler.add(first, forks)
            self.logprobs.append(PromptLogprobs(list(prompt)))
            self.samples.append(samples)
            owners |= {seq.seq_id: number for seq in samples}
        self.num_scores, launched = 0, deque()
        while launched or self.scheduler.has_work:
            if len(launched) < ahead and (plan := self.scheduler.schedule()) is not None:
                launched.append(runner.launch(plan))
                continue
            result = runner.result(launched.popleft())
            assert not result.failed
            self.scheduler.update(result)
            self.scheduler.check_invariants()
            for scores in result.prompt_scores:
                self.logprobs[owners[scores.seq_id]].add(scores)
                self.num_scores += scores.num_tokens
        for seq_id in list(runner.batch.row_of):  # the next requests begin with ids of their own
            runner.batch.remove(seq_id)
        assert not runner._scorer._unscored

    @property
    def tokens(self):
        return [[seq.token_ids[seq.num_prompt_tokens :] for seq in samples] for samples in self.samples]


@torch.inference_mode()
def assert_like(model, prompt, found, k=5):
    assert len(found) == len(prompt) and found[0] is None
    if len(prompt) == 1:
        return
    expected = model(torch.tensor([prompt])).logits[0, :-1].float().log_softmax(-1)
    for position, (token, logprobs) in enumerate(zip(found[1:], expected, strict=True), start=1):
        assert token.token_id == prompt[position]
        assert token.logprob == pytest.approx(logprobs[token.token_id].item(), abs=TOLERANCE)
        assert [value for _, value in token.top] == pytest.approx(logprobs.topk(k).values.tolist(), abs=TOLERANCE)
        for token_id, value in token.top:
            assert value == pytest.approx(logprobs[token_id].item(), abs=TOLERANCE)
        above = logprobs - logprobs[token.token_id]
        assert (above > TOLERANCE).sum() < token.rank <= 1 + (above > -TOLERANCE).sum()
        assert token.rank > k or dict(token.top)[token.token_id] == token.logprob, "the same bits in both places"


@pytest.mark.parametrize("budget", [1, 3, 16, 64])
@pytest.mark.parametrize("ahead", [1, 2])
def test_prompts_are_scored_as_transformers_does_at_any_budget(runner, hf_model, hf_greedy, budget, ahead):
    found = Scored(runner, PROMPTS, budget=max(budget, 1), ahead=ahead)
    for prompt, logprobs, [tokens] in zip(PROMPTS, found.logprobs, found.tokens, strict=True):
        assert_like(hf_model, prompt, logprobs)
        assert tokens == hf_greedy(prompt, len(tokens)), "what is sampled does not depend on what is scored"
    assert found.num_scores == sum(len(prompt) - 1 for prompt in PROMPTS)


def test_in_pieces_of_a_few_rows_and_beside_those_who_ask_for_less(runner, hf_model, monkeypatch):
    monkeypatch.setattr(prompt_scorer, "MAX_SCORED_LOGITS", 96 * 7)
    for k in (0, 1, 96):
        for prompt, logprobs in zip(PROMPTS, Scored(runner, PROMPTS, prompt_logprobs=k).logprobs, strict=True):
            assert_like(hf_model, prompt, logprobs, k)


def test_more_alternatives_than_the_vocabulary_has(cpu_runner, hf_model):
    [logprobs] = Scored(cpu_runner, PROMPTS[:1], prompt_logprobs=128).logprobs
    assert_like(hf_model, PROMPTS[0], logprobs, 96)


def test_a_cached_prefix_is_computed_again_and_only_then(cpu_runner, hf_model):
    prompt = PROMPTS[3]
    first = Scored(cpu_runner, [prompt], prompt_logprobs=None)
    again = Scored(cpu_runner, [prompt, prompt], manager=first.manager)
    assert [samples[0].num_cached_tokens for samples in again.samples] == [0, 0]
    assert all(assert_like(hf_model, prompt, logprobs) is None for logprobs in again.logprobs)
    last = Scored(cpu_runner, [prompt], manager=first.manager, prompt_logprobs=None)
    assert last.samples[0][0].num_cached_tokens == len(prompt) - 1 and last.tokens == first.tokens == again.tokens[:1]


def test_under_preemption(cpu_runner, hf_model):
    prompts = [[*prompt, 33, 34, 35, number] for number, prompt in enumerate(PROMPTS * 2)]
    found = Scored(cpu_runner, prompts, num_blocks=14, budget=24, max_tokens=30)
    assert found.scheduler.num_preemptions > 0
    for prompt, logprobs in zip(prompts, found.logprobs, strict=True):
        assert_like(hf_model, prompt, logprobs)


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_samples_of_one_prompt_score_it_once(runner, hf_model, max_tokens):
    found = Scored(runner, PROMPTS, n=2, temperature=1.0, max_tokens=max_tokens, budget=16)
    assert found.num_scores == sum(len(prompt) - 1 for prompt in PROMPTS)
    for prompt, logprobs, tokens in zip(PROMPTS, found.logprobs, found.tokens, strict=True):
        assert_like(hf_model, prompt, logprobs)
        assert [len(ids) <= max_tokens for ids in tokens] == [True] * (2 if max_tokens else 1), (
            "no tokens: one sequence"
        )


def test_an_error_of_the_computation_fails_those_that_are_scored_alone(cpu_runner, monkeypatch):
    def broken(*arguments):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(prompt_scorer, "compute_scores", broken)
    scheduler = Scheduler(BlockManager(96, 8), max_num_seqs=24, max_num_batched_tokens=64)
    for number, k in enumerate((1, None)):
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=k)
        scheduler.add(*new_sequences(Request("", PROMPTS[0], params), 6, count(number)))
    result = cpu_runner.result(cpu_runner.launch(scheduler.schedule()))
    assert result.failed == {0: "RuntimeError: out of memory"} and result.seq_ids == [1]
    for seq_id in (0, 1):
        cpu_runner.batch.remove(seq_id)


def test_logits_that_are_no_numbers_fail_the_request(cpu_runner, monkeypatch):
    compute = Decoder.compute_logits
    monkeypatch.setattr(Decoder, "compute_logits", lambda decoder, hidden: compute(decoder, hidden) * float("nan"))
    scheduler = Scheduler(BlockManager(96, 8), max_num_seqs=24, max_num_batched_tokens=64)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    scheduler.add(*new_sequences(Request("", PROMPTS[0], params), 6, count(7)))
    result = cpu_runner.result(cpu_runner.launch(scheduler.schedule()))
    assert "NaN" in result.failed[7] and not result.samples and not result.prompt_scores
    cpu_runner.batch.remove(7)


def test_bit_for_bit_at_any_budget_where_batch_invariance_is_asked():
    config = replace(CONFIG, dtype="bfloat16", batch_invariant=True)
    runner = load_runner(config, BUNDLED_MODEL, [0, 2], lambda phase: None)[0]
    found = [[list(x) for x in Scored(runner, PROMPTS, budget=budget).logprobs] for budget in (5, 24, 64)]
    assert found[0] == found[1] == found[2]


def test_the_bundled_model_against_transformers():
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.float32).eval()
    runner = load_runner(CONFIG, BUNDLED_MODEL, [0, 2], lambda phase: None)[0]
    rng = random.Random(5)
    prompts = [[rng.randrange(3, 3072) for _ in range(length)] for length in (2, 65, 200)]
    for budget in (48, 512):
        found = Scored(runner, prompts, budget=budget, max_tokens=1)
        for prompt, logprobs in zip(prompts, found.logprobs, strict=True):
            assert_like(oracle, prompt, logprobs)
