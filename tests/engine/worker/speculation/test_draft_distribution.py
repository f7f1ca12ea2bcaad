"""Sampled tokens behind a draft are distributed as the model says: chi-squared tests of the real sampler.

Each trial verifies the same draft behind the same prompt with another seed. The tokens at a position, among the trials
whose draft was right up to there, must be distributed as the probabilities that a plain float64 oracle computes from
transformers' logits. `make speculation-chi2` takes a million draws per case.
"""

import math
import os

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.executor.step import Draft, NewSequence, SampledToken, SequenceStep, StepPlan
from engine.sampling_params import SamplingParams
from engine.structured_output import StructuredOutput, Vocabulary
from engine.worker.batch.input_batch import SampleTargets
from engine.worker.load import load_runner
from engine.worker.speculation.draft_rounds import DraftRounds
from tests.checkpoints import byte_tokenizer

NUM_DRAWS = int(os.environ.get("DRAFT_DRAWS", "8000"))  # draws in a case
ROWS, BLOCK, EOS = 128, 8, 2
PROMPT = [65, 48, 66, 49, 65, 50, 67, 51]  # one block, whose keys and values all trials share
KNOWN = 68  # generated before the trial: the token that a decode computes
LEAST_P = 1e-6  # seeds are fixed, so the result is the same in every run
LETTERS = "[ABCDEF]{4}[0-9]*"
CASES = {
    "temperature": {"temperature": 0.9},
    "filters, logprobs": {"temperature": 1.0, "top_p": 0.9, "min_p": 0.02, "top_k": 30, "logprobs": 3},
    "penalties": {"temperature": 1.0, "presence_penalty": 0.4, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
    "grammar": {"temperature": 3.0, "structured_output": StructuredOutput("regex", LETTERS)},
    "all of them": {
        "temperature": 3.0,
        "top_p": 0.95,
        "min_p": 0.01,
        "frequency_penalty": 0.5,
        "logprobs": 2,
        "structured_output": StructuredOutput("regex", LETTERS),
    },
}


@pytest.fixture(scope="module")
def hf_model():
    """One layer with the bundled model's heads, which the CPU's kernels compute."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 96}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
    config = LlamaConfig(**sizes, **heads, max_position_embeddings=128, eos_token_id=EOS, initializer_range=0.3)
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def runner(hf_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one-layer")
    hf_model.save_pretrained(folder)
    config = EngineConfig(
        device="cpu", dtype="float32", block_size=BLOCK, num_blocks=ROWS + 1, max_num_seqs=ROWS, cpu_threads=1
    )
    runner = load_runner(config, folder, [EOS], lambda phase: None)[0]
    runner.sampler.grammars.cache.set_vocabulary(Vocabulary(byte_tokenizer().to_str(), 96, [EOS]))
    return runner


class Oracle:
    """Probabilities of the next token in float64, from transformers' logits."""

    def __init__(self, hf_model, params):
        self.hf_model, self.params = hf_model, params

    @torch.inference_mode()
    def logits(self, generated):
        return self.hf_model(torch.tensor([PROMPT + generated])).logits[0, -1].double().numpy()

    def probabilities(self, generated):
        params, logits = self.params, self.logits(generated)
        if params.structured_output is not None:
            letters, digits = [*range(65, 71)], [*range(48, 58), EOS]
            banned = np.setdiff1d(np.arange(len(logits)), letters if len(generated) < 4 else digits)
            logits[banned] = -np.inf
        counts = np.bincount(generated, minlength=len(logits))
        seen = np.isin(np.arange(len(logits)), [*PROMPT, *generated])
        repeated = np.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
        logits = np.where(seen, repeated, logits)
        logits -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        weights = np.exp((logits - logits.max()) / params.temperature)
        weights[weights < params.min_p] = 0.0
        if params.top_k > 0:
            weights[weights < np.sort(weights)[-params.top_k]] = 0.0
        order = np.argsort(-weights, kind="stable")
        kept = np.cumsum(weights[order]) - weights[order] < params.top_p * weights.sum()
        weights[order[~kept]] = 0.0
        return weights / weights.sum()


def trials(runner, params, draft, num_draws):
    """Yields the verified tokens of each trial, until `num_draws` tokens were drawn."""

    def run(plan):
        return runner.result(runner.launch(plan))

    held, seed = list(runner.batch.row_of), 0
    while num_draws > 0:
        new = [
            NewSequence(
                seq_id=i + 1,
                token_ids=[*PROMPT, KNOWN],
                num_prompt_tokens=len(PROMPT),
                num_computed_tokens=len(PROMPT) if seed else 0,
                block_ids=[0] if seed else [0, 1],
                params=params,
                seed=seed + i,
            )
            for i in range(ROWS if seed else 1)
        ]
        ids = [sequence.seq_id for sequence in new]
        if not seed:  # only to fill the shared block
            run(StepPlan(1, held, new, [], [SequenceStep(1, len(PROMPT), False, [])]))
        else:
            blocks = [x for i in ids for x in (i, i)]
            drafts = [Draft(i, draft) for i in ids]
            result = run(StepPlan(1, held, new, [], [], decodes=ids, decode_blocks=blocks, drafts=drafts))
            assert not result.failed
            num_draws -= sum(map(len, result.verified))
            yield from result.verified
        held, seed = ids, seed + ROWS
    run(StepPlan(1, held, [], [], []))


def p_value(observed, probabilities):
    """Pearson's chi-squared test; cells that expect fewer than 10 draws count as one."""
    expected = probabilities * observed.sum()
    rare = expected < 10
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    cells = expected > 0
    if observed[~cells].any():  # tokens that the parameters exclude
        return 0.0
    statistic = float((((observed - expected) ** 2)[cells] / expected[cells]).sum())
    return float(torch.special.gammaincc(torch.tensor((cells.sum() - 1) / 2.0), torch.tensor(statistic / 2)))


def least_p(runner, hf_model, params, num_draws=NUM_DRAWS):
    """The smallest p-value of all positions of a draft of likely tokens; checks logprobs, too."""
    oracle, context, draft = Oracle(hf_model, params), [KNOWN], []
    for _ in range(3):
        draft.append(int(oracle.probabilities(context + draft).argmax()))
    verified = [[t.token_id for t in tokens] for tokens in trials(runner, params, draft, num_draws)]
    found = []
    for place in range(len(draft) + 1):
        drawn = [tokens[place] for tokens in verified if len(tokens) > place]
        expected = math.prod(oracle.probabilities(context + draft[:i])[draft[i]] for i in range(place))
        assert expected > 0.002, "the draft is right often enough"
        if not drawn:
            return 0.0
        assert all(tokens[:place] == draft[:place] for tokens in verified if len(tokens) > place)
        found.append(p_value(np.bincount(drawn, minlength=96), oracle.probabilities(context + draft[:place])))
    return min(found)


@pytest.mark.parametrize("name", CASES)
def test_draws_behind_a_draft_have_the_distribution_of_the_model(runner, hf_model, name):
    p = least_p(runner, hf_model, SamplingParams(**CASES[name]))
    print(f"{name}: least p {p:.3g} of {NUM_DRAWS:,} draws")
    assert p > LEAST_P


def test_logprobs_are_those_of_the_model(runner, hf_model):
    params = SamplingParams(**CASES["all of them"])
    oracle = Oracle(hf_model, params)
    draft = [int(oracle.probabilities([KNOWN]).argmax()), 65]
    for tokens in trials(runner, params, draft, 400):
        for place, token in enumerate(tokens):
            logits = torch.from_numpy(oracle.logits([KNOWN, *draft[:place]]))
            assert math.isclose(token.logprob, float(logits.log_softmax(-1)[token.token_id]), abs_tol=1e-4)


def accept_without_drawing(self, builder, batch, results=DraftRounds.results):
    verified = results(self, builder, batch)
    return [
        [SampledToken(draft.seq_id, draft.token_ids[0]), *tokens[1:]]
        for draft, tokens in zip(self._drafts, verified, strict=True)
    ]


def draw_once_for_all_positions(self, places):
    targets = self.targets
    return SampleTargets(targets.seq_ids[places], targets.rows[places], np.full_like(places, targets.positions[0]))


@pytest.mark.parametrize(
    ("method", "mistake", "name"),
    [
        ("results", accept_without_drawing, "temperature"),
        ("results", accept_without_drawing, "all of them"),
        ("part", draw_once_for_all_positions, "temperature"),
    ],
)
def test_a_planted_mistake_is_found(runner, hf_model, monkeypatch, method, mistake, name):
    monkeypatch.setattr(DraftRounds, method, mistake)
    assert least_p(runner, hf_model, SamplingParams(**CASES[name]), 3000) < LEAST_P
