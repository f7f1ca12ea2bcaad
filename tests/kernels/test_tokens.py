"""The ends of a step on a CPU: the embedding and the most likely tokens."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kernels.dispatch import cpu_kernels
from kernels.elementwise.embedding import embedding
from kernels.sampling import FAILED
from kernels.sampling.greedy import most_likely

DTYPES = (torch.bfloat16, torch.float32, torch.float16)  # float16 has no compiled kernel
COMPILED = cpu_kernels() is not None


def logits_with_every_fault(dtype: torch.dtype, rows: int, vocab_size: int) -> torch.Tensor:
    """Row i has fault i: none, no logit above -inf, NaN, +inf, NaN behind the largest, ties, -inf among others."""
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size)).to(dtype)
    middle = vocab_size // 2
    faults = [(slice(0), 0.0), (slice(None), -torch.inf), (middle, torch.nan), (-1, torch.inf)]
    for row, (place, value) in zip(range(rows), faults, strict=False):
        logits[row, place] = value
    if rows > 6:
        logits[4, 0], logits[4, -1] = 9.0, torch.nan
        logits[5, [middle, -1]] = 20.0
        logits[6, : vocab_size - 1] = -torch.inf
    return logits


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "vocab_size"), [(1, 1), (1, 5), (4, 16), (7, 1000), (7, 1024), (7, 1025), (64, 33333)]
)
def test_most_likely_tokens_are_those_of_numpy(dtype: torch.dtype, rows: int, vocab_size: int) -> None:
    logits = logits_with_every_fault(dtype, rows, vocab_size)
    values = logits.float().numpy()
    expected = values.argmax(-1)
    expected[~np.isfinite(values[np.arange(rows), expected])] = FAILED
    assert most_likely(logits).tolist() == expected.tolist()
    wide = torch.cat([logits, torch.full((rows, 3), 1000.0).to(dtype)], 1)[:, :vocab_size]
    assert most_likely(wide).tolist() == expected.tolist(), "rows with a stride"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [48, 40])  # 40 is no multiple of a vector
@pytest.mark.parametrize("scale", [1.0, 5.5])
@pytest.mark.parametrize("learned", [False, True])
def test_embedding_has_the_bits_of_torch(dtype: torch.dtype, hidden: int, scale: float, learned: bool) -> None:
    weight, table = torch.randn(100, hidden).to(dtype), torch.randn(50, hidden).to(dtype)
    for count in (1, 3, 700):
        ids, positions = torch.randint(0, 100, (count,)), torch.randint(0, 40, (count,))
        expected = F.embedding(ids, weight) * scale
        if learned:
            expected = expected + F.embedding(positions + 2, table)
        assert torch.equal(embedding(ids, weight, scale, positions, table if learned else None, 2), expected)


@pytest.mark.skipif(not COMPILED, reason="numba is not installed")
def test_kernels_serve_the_dtypes_of_a_cpu() -> None:
    tokens = cpu_kernels().tokens
    ids, weight = torch.zeros(2, dtype=torch.int64), torch.zeros(4, 32, dtype=torch.bfloat16)
    assert tokens.supports_embed(ids, weight, 1.0, None, None)
    assert tokens.supports_embed(ids, weight, 2.0, None, None)
    assert tokens.supports_embed(ids, weight, 1.0, ids, weight)
    assert not tokens.supports_embed(ids, weight, 2.0, ids, weight)
    assert not tokens.supports_embed(ids, weight[:, :16], 1.0, None, None)
    assert tokens.supports_most_likely(weight) and not tokens.supports_most_likely(weight.T)
