"""Ruling out tokens on a CPU."""

import numpy as np
import pytest
import torch

from kernels.sampling.token_mask import TokenMask, mask_tokens, mask_tokens_reference


def make_mask(rows, allowed, num_words):
    bits = np.zeros((len(rows), num_words * 32), np.uint8)
    for i, tokens in enumerate(allowed):
        bits[i, tokens] = 1
    words = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    return TokenMask(torch.tensor(rows), torch.from_numpy(words))


def test_what_is_not_allowed_goes_and_the_rest_stays():
    logits = torch.randn(4, 70)
    before = logits.clone()
    mask_tokens(logits, make_mask([2, 0], [[0, 31, 32, 69], [5]], 3))
    assert logits[2].isfinite().nonzero()[:, 0].tolist() == [0, 31, 32, 69]
    assert logits[0].isfinite().nonzero()[:, 0].tolist() == [5]
    assert torch.equal(logits[[1, 3]], before[[1, 3]])
    kept = logits.isfinite()
    assert torch.equal(logits[kept], before[kept])


def test_tokens_past_the_words_are_not_allowed():
    logits = torch.zeros(1, 70)
    mask_tokens(logits, make_mask([0], [list(range(64))], 2))
    assert logits.isfinite().sum() == 64


def test_what_is_no_number_still_fails_its_row():
    logits = torch.zeros(1, 40)
    logits[0, 3], logits[0, 4] = torch.nan, torch.inf
    mask_tokens(logits, make_mask([0], [[0]], 2))
    assert logits[0, 3].isnan() and logits[0, 4] == torch.inf and logits[0, 5] == -torch.inf


@pytest.mark.parametrize("vocab_size, num_words", [(96, 3), (97, 4), (5000, 157), (4200, 100), (70, 9), (15, 1)])
def test_compiled_as_in_numpy(vocab_size, num_words):
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn((7, vocab_size + 5), generator=generator)
    wide[4, 3], wide[4, 5], wide[4, 6] = torch.nan, torch.inf, -torch.inf
    rows = torch.tensor([5, 0, 4])
    words = torch.randint(-(2**31), 2**31, (3, num_words), dtype=torch.int64, generator=generator).to(torch.int32)
    words[1] = 0
    expected = wide.clone()
    mask_tokens_reference(expected[:, :vocab_size], TokenMask(rows, words))
    mask_tokens(wide[:, :vocab_size], TokenMask(rows, words))
    torch.testing.assert_close(wide, expected, equal_nan=True, atol=0, rtol=0)


def test_the_mask_of_one_row():
    mask = make_mask([2, 0], [[1], [5]], 1)
    assert mask.of_row(1) is None
    one = mask.of_row(0)
    assert one.rows.tolist() == [0] and one.words.tolist() == [[1 << 5]]
