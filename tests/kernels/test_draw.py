"""The draw of a token on a CPU, against the same in float64 by sorting."""

import numpy as np
import pytest
import torch

from engine.sampling_params import SamplingParams
from engine.worker.sampling.sampling_rows import PlainDraws, SamplingInputs, SamplingRows, uniforms
from kernels.dispatch import cpu_kernels
from kernels.sampling import FAILED

pytestmark = pytest.mark.skipif(cpu_kernels() is None, reason="numba is not installed")
ROWS = 40
NO_TOP_K = 1 << 30


def expected_token(logits, temperature, min_p, top_k, top_p, uniform):
    """One row. Each filter keeps the tokens that are tied with its last one."""
    x = logits.astype(np.float64)
    if not np.isfinite(x.max()) or np.isnan(x).any():
        return FAILED
    weights = np.exp((x - x.max()) / temperature)
    weights[weights < min_p] = 0.0
    if top_k < len(x):
        weights[weights < np.sort(weights)[-top_k]] = 0.0
    if top_p < 1.0:
        order = np.argsort(-weights, kind="stable")
        reached = np.cumsum(weights[order]) >= top_p * weights.sum()
        weights[weights < weights[order[np.argmax(reached)]]] = 0.0
    cumulative = np.cumsum(weights)
    return int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))


FILTERS = {
    "none": (0.0, NO_TOP_K, 1.0),
    "min_p": (0.05, NO_TOP_K, 1.0),
    "min_p 1": (1.0, NO_TOP_K, 1.0),
    "top_k 1": (0.0, 1, 1.0),
    "top_k": (0.0, 20, 1.0),
    "top_k above the number of buckets": (0.0, 300, 1.0),
    "min_p and top_k": (0.05, 300, 1.0),
    "top_p": (0.0, NO_TOP_K, 0.8),
    "small top_p": (0.0, NO_TOP_K, 1e-6),
    "large top_p": (0.0, NO_TOP_K, 0.999),
    "min_p and top_p": (0.02, NO_TOP_K, 0.6),
    "top_k and top_p": (0.0, 20, 0.8),
    "all": (0.001, 300, 0.95),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1, 5, 64, 1000, 8193])
@pytest.mark.parametrize("name", FILTERS)
def test_tokens_are_those_of_the_whole_distribution(dtype, vocab_size, name):
    min_p, top_k, top_p = FILTERS[name]
    rng = np.random.default_rng(vocab_size)
    wide = torch.from_numpy(rng.normal(0, 3, (ROWS + 3, vocab_size + 7))).to(dtype)
    logits = wide[:, :vocab_size]  # rows with a stride
    logits[1], logits[2, vocab_size // 2], logits[3, -1] = 0.0, np.nan, np.inf
    logits[4] = -np.inf
    logits[5, 1:] = -np.inf  # fewer tokens than top_k asks for
    rows = rng.permutation(ROWS + 3)[:ROWS]
    temperature, uniform = rng.uniform(0.3, 2.0, ROWS).astype(np.float32), rng.uniform(0, 1, ROWS)
    uniform[:2] = 0.0, np.nextafter(1.0, 0.0)
    found = cpu_kernels().draw.draw(
        logits, torch.from_numpy(rows), torch.from_numpy(temperature), torch.from_numpy(uniform),
        log_min_p=None if min_p == 0.0 else torch.full((ROWS,), float(np.log(min_p))),
        top_k=None if top_k == NO_TOP_K else torch.full((ROWS,), min(top_k, vocab_size)),
        top_p=None if top_p == 1.0 else torch.full((ROWS,), top_p, dtype=torch.float64),
    )  # fmt: skip
    values = logits.float().numpy()
    expected = [
        expected_token(values[row], temperature[i], min_p, top_k, top_p, uniform[i])
        for i, row in enumerate(rows.tolist())
    ]
    wrong = np.flatnonzero(found.numpy() != np.array(expected))
    assert len(wrong) <= 1, "a uniform number may fall between the sums of fp32 and those of float64"


@pytest.mark.parametrize(
    "tokens",
    [range(0, 105, 5), range(0, 64 * 21, 64), [0, 1, *range(64, 64 * 20, 64)]],
    ids=["in two buckets", "each in its own", "two in one"],
)
def test_top_k_keeps_exactly_so_many(tokens):
    tokens, logits = torch.tensor(tokens), torch.full((2, 2000), -50.0)
    logits[:, tokens] = -0.01 * torch.arange(21)
    top = {"rows": torch.arange(2), "temperature": torch.ones(2), "uniform": torch.full((2,), 0.9999).double()}
    found = cpu_kernels().draw.draw(logits, **top, top_k=torch.tensor([20, 21]))
    assert found.tolist() == [tokens[19], tokens[20]]


def test_a_target_that_rounds_to_the_whole_weight_takes_the_last_token():
    logits = torch.full((3, 2000), -torch.inf)
    logits[:, [3, 700, 705, 1990]] = torch.tensor([0.0, 0.0, 0.0, -1.0])
    top_p = torch.tensor([1.0, 0.6, 1.0], dtype=torch.float64)  # of the second row: without the last token
    uniform, top_k = torch.ones(3, dtype=torch.float64), torch.tensor([2000, 2000, 3])
    found = cpu_kernels().draw.draw(logits, torch.arange(3), torch.ones(3), uniform, top_k=top_k, top_p=top_p)
    assert found.tolist() == [1990, 705, 705]


def penalised(logits, params, prompt, generated):
    """The logits of one row after its penalties, float32."""
    x = logits.astype(np.float32)
    for token in set(prompt) | set(generated):
        factor = np.float32(params.repetition_penalty)
        x[token] = x[token] / factor if x[token] > 0 else x[token] * factor
    for token in set(generated):
        x[token] -= np.float32(params.frequency_penalty) * generated.count(token) + np.float32(params.presence_penalty)
    return x


PLAIN = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.3),
    SamplingParams(temperature=0.7, top_p=0.8),
    SamplingParams(temperature=0.9, min_p=0.1),
    SamplingParams(temperature=1.0, top_k=20, top_p=0.8, repetition_penalty=1.05),
    SamplingParams(temperature=0.0, repetition_penalty=3.0, presence_penalty=1.0, frequency_penalty=0.5),
    SamplingParams(temperature=1.0, presence_penalty=-1.5, frequency_penalty=-0.5),
    SamplingParams(temperature=0.0, presence_penalty=2.0),
    SamplingParams(temperature=0.0, frequency_penalty=2.0),
]


def test_draws_of_live_sequences_are_those_of_their_seeds_positions_and_tokens():
    """The arrays of SamplingRows, read by row, against the same parameters as inputs of a step."""
    rng = np.random.default_rng(0)
    known = rng.integers(0, 500, (11, 90)).astype(np.int32)
    known[:, 40:] = known[:, :50]  # tokens that occur in the prompt, behind it, twice, or not at all
    sampling = SamplingRows(11, 500, [], token_ids=known)
    order = [8, 3, 5, 0, 2, 7, 4, 10, 1]
    for row, one in zip(order, PLAIN, strict=True):
        sampling.set(row, one, seed=2**64 - 1 - 7 * row, num_prompt_tokens=30 + row)
    rows, positions = np.zeros(11, np.int64), np.zeros(11, np.int64)
    draw = sampling.plain_draws(rows, positions)
    logits = torch.from_numpy(rng.normal(0, 3, (9, 500))).bfloat16()
    changed = 0
    for _ in range(20):
        rows[:9], positions[:9] = rng.permutation(order), rng.integers(42, 90, 9)
        found = draw(logits).tolist()
        assert sampling.is_plain(rows[:9]) and not sampling.is_greedy(rows[:9])
        for i, row in enumerate(rows[:9].tolist()):
            one, values = PLAIN[order.index(row)], logits[i].float().numpy()
            tokens = known[row, : positions[i]].tolist()
            own = penalised(values, one, tokens[: 30 + row], tokens[30 + row :])
            changed += not np.array_equal(own, values)
            if one.greedy:
                assert found[i] == own.argmax()
                continue
            uniform = uniforms(np.array([2**64 - 1 - 7 * row], np.uint64), positions[i : i + 1])[0]
            top_k = one.top_k if one.top_k > 0 else NO_TOP_K
            assert found[i] == expected_token(own, np.float32(one.temperature), one.min_p, top_k, one.top_p, uniform)
    assert changed == 100


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(logit_bias={3: 1.0}), SamplingParams(temperature=0.0, logprobs=1),
        SamplingParams(bad_words=((4,),)), SamplingParams(min_tokens=3),
    ],
)  # fmt: skip
def test_other_rows_are_not_plain(params):
    sampling = SamplingRows(3, 500, [2], token_ids=np.zeros((3, 9), np.int32))
    sampling.set(0, SamplingParams(top_k=5, presence_penalty=1.0), seed=1, num_prompt_tokens=4)
    sampling.set(1, params, seed=1, num_prompt_tokens=4)
    assert sampling.is_plain(np.array([0])) and not sampling.is_plain(np.array([0, 1]))
    assert isinstance(sampling.build(np.array([0]), np.array([4]), torch.from_numpy), PlainDraws)
    sampling.set_greedy(1)
    assert sampling.is_plain(np.array([0, 1]))
    draw, logits = sampling.plain_draws(np.ones(1, np.int64), np.zeros(1, np.int64)), torch.randn(20, 1, 500)
    assert all(int(draw(row)) == int(row.argmax()) for row in logits)


def test_without_the_known_tokens_no_row_is_plain():
    sampling = SamplingRows(1, 500, [2])
    sampling.set(0, SamplingParams(), seed=1, num_prompt_tokens=4)
    assert not sampling.is_plain(np.array([0]))
    assert isinstance(sampling.build(np.array([0]), np.array([4]), torch.from_numpy), SamplingInputs)
