"""Applies token masks of grammars: logits of tokens whose bit is 0 become -inf, in place."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.aot_configuration import AotConfiguration
from kernels.dispatch import cpu_kernels, tl, triton, use_triton

BLOCK = 4096  # tokens per program


@dataclass(frozen=True, slots=True)
class TokenMask:
    """rows int64 [n]: distinct rows of the logits. words int32 [n, num_words]: bit i of word w is token 32w + i.

    Tokens past the last word are ruled out.
    """

    rows: Tensor
    words: Tensor

    def of_row(self, row: int) -> "TokenMask | None":
        """The mask of one row, for logits of that row alone; None if the row has no mask."""
        words = self.words[self.rows == row]
        return TokenMask(torch.zeros_like(self.rows[:1]), words) if len(words) else None


def mask_tokens(logits: Tensor, mask: TokenMask) -> None:
    """Set the logits [rows, vocab_size] of tokens that `mask` rules out to -inf, in place.

    NaN and +inf stay, so that a row with one still fails. Reads the logits of a masked row once.
    """
    if not use_triton(logits):
        cpu = cpu_kernels()
        if cpu and cpu.token_mask.supports_mask_tokens(logits, mask.rows, mask.words):
            return cpu.token_mask.mask_tokens(logits, mask.rows, mask.words)
        return mask_tokens_reference(logits, mask)
    rows, vocab_size = mask.rows, logits.shape[1]
    if len(rows):
        mask_tokens_kernel[(len(rows), -(-vocab_size // BLOCK))](
            logits, rows, mask.words, logits.stride(0), mask.words.shape[1], VOCAB=vocab_size, BLOCK=BLOCK, num_warps=8
        )


def mask_tokens_reference(logits: Tensor, mask: TokenMask) -> None:
    """mask_tokens on a CPU, in numpy. Logits of any float dtype with a dense last axis."""
    vocab_size = logits.shape[1]
    words = np.invert(mask.words.numpy()).view(np.uint8)
    given = min(vocab_size, 8 * words.shape[1])
    ruled_out = np.ones((len(words), vocab_size), np.bool_)
    ruled_out[:, :given] = np.unpackbits(words, axis=1, count=given, bitorder="little")
    for row, out in zip(mask.rows.tolist(), ruled_out, strict=True):
        x = logits[row]
        if x.dtype is torch.float32:  # numpy is several times faster than torch on rows this short
            values = x.numpy()
            np.copyto(values, -np.inf, where=out & (values < np.inf))
        else:
            x.masked_fill_(torch.from_numpy(out) & (x < torch.inf), -torch.inf)


@triton.jit(do_not_specialize=["num_words"])
def mask_tokens_kernel(
    logits_ptr, rows_ptr, words_ptr, logits_stride, num_words, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid (masked rows, ceil(VOCAB / BLOCK)): masks a part of one row."""
    at = tl.program_id(0)
    row = tl.load(rows_ptr + at)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < VOCAB
    word = offs // 32
    words = tl.load(words_ptr + at.to(tl.int64) * num_words + word, mask=inside & (word < num_words), other=0)
    logits_at = logits_ptr + row * logits_stride + offs
    x = tl.load(logits_at, mask=inside, other=0.0).to(tl.float32)
    ruled_out = ((words >> (offs % 32)) & 1) == 0
    tl.store(logits_at, float("-inf"), mask=inside & ruled_out & (x < float("inf")))


def aot_configurations(capability: int) -> Iterator[AotConfiguration]:
    """Yields the vocabularies of kernels/sampling/logits.py."""
    for dtype, vocab_size in (("bf16", 128256), ("fp16", 50257), ("fp32", 262144)):
        yield AotConfiguration(
            mask_tokens_kernel, f"vocabulary {vocab_size}", dtype, {"VOCAB": vocab_size, "BLOCK": BLOCK}, num_warps=8,
            types={"rows_ptr": "*i64", "words_ptr": "*i32"}, quick=dtype == "bf16",
            multiples_of_16=("logits_stride",) * (vocab_size % 16 == 0),
        )  # fmt: skip
