"""The kernel that rules out tokens, against its reference. Run like triton_cases.py: on a CUDA device as it is,
elsewhere by test_triton.py in the interpreter."""

import pytest
import torch

from kernels.dispatch import INTERPRET
from kernels.sampling.token_mask import TokenMask, mask_tokens, mask_tokens_reference

DEVICE = "cpu" if INTERPRET else "cuda"
DTYPES = [torch.float32, torch.float16] if INTERPRET else [torch.float32, torch.float16, torch.bfloat16]


# (vocabulary, words): a word that is cut, a vocabulary that goes past the words, words that go past it
@pytest.mark.parametrize("vocab_size, num_words", [(96, 3), (97, 4), (5000, 157), (4200, 100), (70, 9)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mask_tokens(dtype, vocab_size, num_words):
    torch.manual_seed(0)
    logits = torch.randn(7, vocab_size).to(dtype)
    logits[4, 3], logits[4, 5], logits[4, 6] = torch.nan, torch.inf, -torch.inf
    rows = torch.tensor([5, 0, 4])
    words = torch.randint(-(2**31), 2**31, (3, num_words), dtype=torch.int64).to(torch.int32)
    words[1] = 0
    expected = logits.clone()
    mask_tokens_reference(expected, TokenMask(rows, words))
    on_device = logits.to(DEVICE)
    mask_tokens(on_device, TokenMask(rows.to(DEVICE), words.to(DEVICE)))
    torch.testing.assert_close(on_device.cpu(), expected, equal_nan=True, atol=0, rtol=0)
