"""The draw of a token on a CPU, against the same in float64 by sorting."""

import numpy as np
import pytest
import torch

from engine.sampling_params import SamplingParams
from engine.worker.sampling.sampling_rows import SamplingRows, uniforms
from kernels.dispatch import cpu_kernels
from kernels.sampling import FAILED

pytestmark = pytest.mark.skipif(cpu_kernels() is None, reason="numba is not installed")
ROWS = 40


def expected_token(logits, temperature, min_p, top_p, uniform):
    """One row. Each filter keeps the tokens that are tied with its last one."""
    x = logits.astype(np.float64)
    if not np.isfinite(x.max()) or np.isnan(x).any():
        return FAILED
    weights = np.exp((x - x.max()) / temperature)
    weights[weights < min_p] = 0.0
    if top_p < 1.0:
        order = np.argsort(-weights, kind="stable")
        reached = np.cumsum(weights[order]) >= top_p * weights.sum()
        weights[weights < weights[order[np.argmax(reached)]]] = 0.0
    cumulative = np.cumsum(weights)
    return int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1, 5, 64, 1000, 8193])
@pytest.mark.parametrize(
    ("min_p", "top_p"), [(0.0, 1.0), (0.05, 1.0), (0.0, 0.8), (0.02, 0.6), (1.0, 1.0), (0.0, 1e-6)]
)
def test_tokens_are_those_of_the_whole_distribution(dtype, vocab_size, min_p, top_p):
    rng = np.random.default_rng(vocab_size)
    wide = torch.from_numpy(rng.normal(0, 3, (ROWS + 3, vocab_size + 7))).to(dtype)
    logits = wide[:, :vocab_size]  # rows with a stride
    logits[1], logits[2, vocab_size // 2], logits[3, -1] = 0.0, np.nan, np.inf
    logits[4] = -np.inf
    rows = rng.permutation(ROWS + 3)[:ROWS]
    temperature, uniform = rng.uniform(0.3, 2.0, ROWS).astype(np.float32), rng.uniform(0, 1, ROWS)
    uniform[:2] = 0.0, np.nextafter(1.0, 0.0)
    log_min_p = None if min_p == 0.0 else torch.full((ROWS,), float(np.log(min_p)))
    found = cpu_kernels().draw.draw(
        logits, torch.from_numpy(rows), torch.from_numpy(temperature), torch.from_numpy(uniform), log_min_p,
        None if top_p == 1.0 else torch.full((ROWS,), top_p, dtype=torch.float64),
    )  # fmt: skip
    values = logits.float().numpy()
    expected = [
        expected_token(values[row], temperature[i], min_p, top_p, uniform[i]) for i, row in enumerate(rows.tolist())
    ]
    wrong = np.flatnonzero(found.numpy() != np.array(expected))
    assert len(wrong) <= 1, "a uniform number may fall between the sums of fp32 and those of float64"


def test_draws_of_live_sequences_are_those_of_their_seeds_and_positions():
    """The arrays of SamplingRows, read by row, against the same parameters as inputs of a step."""
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.3),
        SamplingParams(temperature=0.7, top_p=0.8),
        SamplingParams(temperature=0.9, min_p=0.1),
        SamplingParams(temperature=1.0, top_p=0.5, min_p=0.05),
    ]
    sampling = SamplingRows(9, 500, [])
    for row, one in zip((8, 3, 5, 0, 2), params, strict=True):
        sampling.set(row, one, seed=2**64 - 1 - 7 * row, num_prompt_tokens=4)
    rows, positions = np.zeros(9, np.int64), np.zeros(9, np.int64)
    draw = sampling.plain_draws(rows, positions)
    logits = torch.randn(5, 500, generator=torch.Generator().manual_seed(0)).bfloat16() * 3
    for step in range(20):
        rows[:5], positions[:5] = [2, 8, 0, 5, 3], np.arange(5) + 10**step % 10**7
        found = draw(logits).tolist()
        assert found[1] == int(logits[1].argmax())
        assert sampling.is_plain(rows[:5]) and not sampling.is_greedy(rows[:5])
        for i in (0, 2, 3, 4):
            one, seed = params[[8, 3, 5, 0, 2].index(rows[i])], np.array([2**64 - 1 - 7 * int(rows[i])], np.uint64)
            uniform = uniforms(seed, positions[i : i + 1])[0]
            values = logits[i].float().numpy()
            assert found[i] == expected_token(values, np.float32(one.temperature), one.min_p, one.top_p, uniform)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_k=5), SamplingParams(presence_penalty=1.0), SamplingParams(logit_bias={3: 1.0}),
        SamplingParams(temperature=0.0, logprobs=1), SamplingParams(bad_words=((4,),)), SamplingParams(min_tokens=3),
    ],
)  # fmt: skip
def test_other_rows_are_not_plain(params):
    sampling = SamplingRows(3, 500, [2])
    sampling.set(0, SamplingParams(), seed=1, num_prompt_tokens=4)
    sampling.set(1, params, seed=1, num_prompt_tokens=4)
    assert sampling.is_plain(np.array([0])) and not sampling.is_plain(np.array([0, 1]))
    sampling.set_greedy(1)
    assert sampling.is_plain(np.array([0, 1]))
    draw, logits = sampling.plain_draws(np.ones(1, np.int64), np.zeros(1, np.int64)), torch.randn(20, 1, 500)
    assert all(int(draw(row)) == int(row.argmax()) for row in logits)
