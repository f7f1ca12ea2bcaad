"""Logprobs and ranks against log_softmax and a sort in float64."""

import numpy as np
import pytest
import torch

from kernels.dispatch import cpu_kernels
from kernels.sampling import logprobs as front
from kernels.sampling.logprobs import top_logprobs

ROWS = 12
compiled = pytest.param("compiled", marks=pytest.mark.skipif(cpu_kernels() is None, reason="numba is not installed"))


@pytest.fixture(params=[compiled, "torch"])
def by_whom(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(front, "cpu_kernels", lambda: None)
    return request.param


def expected_scores(logits, token_ids, k):
    """(logprobs, ranks, ids of the k highest), float64; of equal logits the lower id is higher."""
    x = logits.float().numpy().astype(np.float64)
    logprobs = x - x.max(-1, keepdims=True)
    logprobs -= np.log(np.exp(logprobs).sum(-1, keepdims=True))
    order = np.argsort(-x, axis=-1, kind="stable")[:, :k]
    own = np.take_along_axis(logprobs, token_ids[:, None], 1)
    ranks = 1 + (x > np.take_along_axis(x, token_ids[:, None], 1)).sum(-1)
    return np.concatenate([own, np.take_along_axis(logprobs, order, 1)], 1), ranks, order


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab_size", "k"), [(1, 0), (1, 1), (5, 5), (64, 1), (1000, 0), (1000, 20), (8193, 128)])
def test_scores_are_those_of_the_whole_distribution(by_whom, dtype, vocab_size, k):
    rng = np.random.default_rng(vocab_size + k)
    wide = torch.from_numpy(rng.normal(0, 4, (ROWS, vocab_size + 3))).to(dtype)
    logits = wide[:, :vocab_size]  # rows with a stride
    if vocab_size > 64:
        logits[0, 5:] = -np.inf  # fewer tokens than k
    before = logits.clone()
    token_ids = rng.integers(0, vocab_size, ROWS)
    token_ids[1] = int(logits[1].argmax())
    found, ranks, top_ids = top_logprobs(logits, torch.from_numpy(token_ids), k, with_ranks=True)
    expected, expected_ranks, order = expected_scores(logits, token_ids, k)
    np.testing.assert_allclose(found.numpy(), expected, atol=2e-5)
    assert ranks.tolist() == expected_ranks.tolist() and ranks[1] == 1
    assert top_logprobs(logits, torch.from_numpy(token_ids), k)[1] is None
    assert torch.equal(logits, before)
    if by_whom == "compiled":
        assert top_ids.tolist() == order.tolist()
    else:  # torch puts equal logits in any order
        assert torch.equal(logits.gather(1, top_ids), logits.gather(1, torch.from_numpy(order)))


@pytest.mark.parametrize("by_whom", [compiled], indirect=True)
def test_of_equal_logits_the_lowest_ids_are_reported(by_whom):
    logits = torch.zeros(1, 1000)
    logits[0, 700] = 1.0
    assert top_logprobs(logits, torch.tensor([3]), 4)[2].tolist() == [[700, 0, 1, 2]]


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_has_no_logprobs(by_whom, poison):
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(0))
    logits[1, slice(None) if poison == -np.inf else 7] = poison
    logprobs = top_logprobs(logits, torch.tensor([3, 4]), 5)[0]
    assert logprobs[0].isfinite().all() and logprobs[1].isnan().all()


def test_float16_logits_are_computed_too():
    logits, token_ids = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).half(), torch.tensor([4, 0, 49])
    found = top_logprobs(logits, token_ids, 5, with_ranks=True)
    expected = top_logprobs(logits.float(), token_ids, 5, with_ranks=True)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
