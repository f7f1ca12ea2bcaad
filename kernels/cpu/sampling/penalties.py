"""Penalties of tokens that a sequence holds, on a CPU: they visit those tokens alone, and need no counts that somebody
keeps. The host knows all tokens of a sequence."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kernels.cpu import simd
from kernels.cpu.parallel import jit, next_item, parallel_kernel
from kernels.cpu.simd import advance, read, write

Array = npt.NDArray[Any]


class History(NamedTuple):
    """The tokens of the live sequences and their penalties, contiguous: token_ids int32 [max_rows, max_tokens],
    num_prompt int64 [max_rows], factors float32 [max_rows, 3] (repetition, presence, frequency; 1, 0, 0: none)."""

    token_ids: Array
    num_prompt: Array
    factors: Array

    def addresses(self) -> tuple[int, ...]:
        """The arrays and the length of a row of tokens, as arguments of a kernel."""
        return (*(array.ctypes.data for array in self), self.token_ids.shape[1])


@jit
def has_penalty(factors):
    return read(factors, 0) != np.float32(1) or read(factors, 1) != np.float32(0) or read(factors, 2) != np.float32(0)


@jit
def _penalised(x, count, repetition, presence, frequency):
    x = x / repetition if x > np.float32(0) else x * repetition
    return x - (frequency * np.float32(count) + presence) if count > 0 else x


@jit
def penalise(values, token_ids, num_prompt, length, factors, counts):
    """Change the logits float32 of the first `length` of token_ids: by the repetition penalty (CTRL), and those
    generated, behind num_prompt tokens, then by frequency and presence (OpenAI). counts: room for a vocabulary."""
    for i in range(length):
        write(counts, np.int64(read(token_ids, i)), np.int32(0))
    for i in range(num_prompt, length):
        token = np.int64(read(token_ids, i))
        write(counts, token, np.int32(read(counts, token) + 1))
    for i in range(length):
        token = np.int64(read(token_ids, i))
        count = read(counts, token)
        if count >= 0:
            write(counts, token, np.int32(-1))  # done
            x = _penalised(read(values, token), count, read(factors, 0), read(factors, 1), read(factors, 2))
            write(values, token, x)


@parallel_kernel("10q")
def _penalise_rows(args):
    logits, stride, size, token_ids = simd.pointer_f32(args[2]), args[3], args[4], simd.pointer_i32(args[8])
    rows, places, lengths = simd.pointer_i64(args[5]), simd.pointer_i64(args[6]), simd.pointer_i64(args[7])
    num_prompt, factors, max_tokens = simd.pointer_i64(args[9]), simd.pointer_f32(args[10]), args[11]
    room = np.empty(size, np.int32)
    item = next_item(args)
    while item < args[1]:
        place = read(places, item)
        penalise(
            advance(logits, read(rows, item) * stride), advance(token_ids, place * max_tokens),
            read(num_prompt, place), read(lengths, item), advance(factors, 3 * place),
            simd.pointer_i32(room.ctypes.data),
        )  # fmt: skip
        item = next_item(args)
    simd.keep(room)


def penalise_rows(logits: Tensor, rows: Tensor, places: Tensor, lengths: Tensor, history: History) -> None:
    """Penalise `rows` of logits float32 [n, vocab_size], dense, in place. int64 [rows]: `rows`, `places` (their rows in
    the history), and `lengths`, the tokens of each."""
    _penalise_rows(
        len(rows), logits.data_ptr(), logits.stride(0), logits.shape[1], rows.data_ptr(), places.data_ptr(),
        lengths.data_ptr(), *history.addresses(),
    )  # fmt: skip
