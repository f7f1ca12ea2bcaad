"""Embeddings by the Worker of a decoder, against transformers: pooled over chunks, beside generation, begun anew."""

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.executor.step import NewSequence, SequenceStep, StepPlan
from engine.sampling_params import Pooling, SamplingParams
from engine.worker.load import load_runner
from tests.engine.models.tiny_models import VOCAB, save_model

BLOCK_SIZE = 8
LENGTHS = (1, 7, 33, 40, 64)
LAST, MEAN = Pooling("last"), Pooling("mean")
TOLERANCE = {"atol": 2e-5, "rtol": 1e-4}


@pytest.fixture(scope="module", params=["llama", "qwen3", "gpt2", "mistral", "opt"])
def pair(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    oracle = save_model(request.param, folder)
    config = EngineConfig(model=str(folder), num_blocks=128, block_size=BLOCK_SIZE, max_num_seqs=16)
    runner, ready = load_runner(config, folder, [], lambda phase: None)
    assert not ready.encoder and ready.hidden_size == oracle.config.hidden_size
    return oracle, runner


def prompts(*lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in lengths]


@torch.no_grad()
def oracle_vector(model, ids, pooling):
    hidden = model.base_model(torch.tensor([ids]), use_cache=False).last_hidden_state[0].double()
    vector = (hidden.mean(0) if pooling.kind == "mean" else hidden[-1])[: pooling.dimensions]
    return (vector / vector.norm() if pooling.normalize else vector).numpy()


class Plans:
    """Sequences with blocks of their own; `run` computes the next tokens of each."""

    def __init__(self, runner) -> None:
        self.runner, self.num_computed, self.new, self.next_block, self.step_id = runner, {}, {}, 0, 0

    def add(self, seq_id, ids, params) -> None:
        num_blocks = -(-(len(ids) + 8) // BLOCK_SIZE)
        blocks = list(range(self.next_block, self.next_block + num_blocks))
        self.next_block += num_blocks
        self.new[seq_id] = NewSequence(
            seq_id=seq_id,
            token_ids=ids,
            num_prompt_tokens=len(ids),
            num_computed_tokens=0,
            block_ids=blocks,
            params=params,
            seed=0,
        )
        self.num_computed[seq_id] = 0, len(ids)

    def run(self, counts, removed=(), decodes=()):
        new = [self.new.pop(seq_id) for seq_id in counts if seq_id in self.new]
        steps = []
        for seq_id, count in counts.items():
            computed, length = self.num_computed[seq_id]
            self.num_computed[seq_id] = computed + count, length
            steps.append(SequenceStep(seq_id, count, computed + count == length, []))
        self.step_id += 1
        plan = StepPlan(self.step_id, list(removed), new, [], steps, decodes=list(decodes))
        return self.runner.result(self.runner.launch(plan))

    def close(self, *seq_ids) -> None:
        self.runner.result(self.runner.launch(StepPlan(0, list(seq_ids), [], [], [])))


def vector(result, seq_id):
    return np.frombuffer(result.vectors[seq_id], "<f4")


@pytest.mark.parametrize("pooling", [LAST, MEAN, Pooling("mean", False), Pooling("last", dimensions=9)], ids=str)
def test_a_batch_of_prompts(pair, pooling):
    oracle, runner = pair
    plans, texts = Plans(runner), prompts(*LENGTHS)
    for i, ids in enumerate(texts):
        plans.add(i, ids, SamplingParams(pooling=pooling))
    result = plans.run({i: len(ids) for i, ids in enumerate(texts)})
    assert not result.failed and not result.seq_ids and not result.detailed
    for i, ids in enumerate(texts):
        np.testing.assert_allclose(vector(result, i), oracle_vector(oracle, ids, pooling), **TOLERANCE)
    plans.close(*range(len(texts)))


def test_chunks_mixed_with_decodes_of_others(pair):
    """Both poolings in uneven chunks, one token at the end too, while two sequences generate the same text as alone."""
    oracle, runner = pair
    a, b, c, d = prompts(40, 33, 9, 5)
    greedy = SamplingParams(temperature=0.0, max_tokens=8)

    def generate(with_others):
        plans = Plans(runner)
        plans.add(2, c, greedy)
        plans.add(3, d, greedy)
        if with_others:
            plans.add(0, a, SamplingParams(pooling=MEAN))
            plans.add(1, b, SamplingParams(pooling=LAST))
        results = [plans.run({2: 9, 3: 5, **({0: 7, 1: 30} if with_others else {})})]
        for chunks in ({0: 20, 1: 2}, {0: 12, 1: 1}, {0: 1}):
            results.append(plans.run(chunks if with_others else {}, decodes=(2, 3)))
        plans.close(0, 1, 2, 3)
        return results

    together, alone = generate(True), generate(False)
    for one, other in zip(together, alone, strict=True):
        assert dict(zip(one.seq_ids, one.token_ids, strict=True)) == dict(
            zip(other.seq_ids, other.token_ids, strict=True)
        )
    assert [sorted(result.vectors) for result in together] == [[], [], [1], [0]]
    np.testing.assert_allclose(vector(together[3], 0), oracle_vector(oracle, a, MEAN), **TOLERANCE)
    np.testing.assert_allclose(vector(together[2], 1), oracle_vector(oracle, b, LAST), **TOLERANCE)


def test_a_mean_that_was_preempted_begins_again(pair):
    oracle, runner = pair
    (ids,) = prompts(40)
    plans = Plans(runner)
    plans.add(0, ids, SamplingParams(pooling=MEAN))
    plans.run({0: 25})
    plans.add(0, ids, SamplingParams(pooling=MEAN))
    result = plans.run({0: 40}, removed=[0])
    np.testing.assert_allclose(vector(result, 0), oracle_vector(oracle, ids, MEAN), **TOLERANCE)
    plans.close(0)


def test_beside_prompts_that_are_scored(pair):
    """Logprobs of a prompt and an embedding want the same hidden states of a step."""
    oracle, runner = pair
    a, b = prompts(20, 30)
    plans = Plans(runner)
    plans.add(0, a, SamplingParams(pooling=LAST))
    plans.add(1, b, SamplingParams(max_tokens=0, prompt_logprobs=1))
    result = plans.run({0: 20, 1: 30})
    np.testing.assert_allclose(vector(result, 0), oracle_vector(oracle, a, LAST), **TOLERANCE)
    assert [scores.num_tokens for scores in result.prompt_scores] == [29] and result.seq_ids == [1]
    plans.close(0, 1)


def test_bad_tokens_and_nan_fail_alone(pair):
    _, runner = pair
    plans = Plans(runner)
    weight = runner._decoder.embedding.weight
    kept = weight[50].clone()
    weight[50] = float("nan")
    for i, ids in enumerate(([5, 6], [5, VOCAB], [50, 6])):
        plans.add(i, ids, SamplingParams(pooling=LAST))
    result = plans.run({0: 2, 1: 2, 2: 2})
    weight[50] = kept
    assert result.vectors.keys() == {0} and result.failed.keys() == {1, 2}
    assert "NaN" in result.failed[2]
    plans.close(0, 1, 2)
