"""The inputs of a step of decodes on a CPU, gathered from the rows of the live sequences by one call.

A step reads all weights, and so pushes everything else out of the caches. After it, each call of numpy or torch waits
for its own code to come from memory, 5 to 10 us; some thirty of them are a twentieth of a step of a small model.
"""

import ctypes
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kernels.cpu import simd
from kernels.cpu.parallel import jit, parallel_kernel
from kernels.cpu.simd import advance, read, write

Array = npt.NDArray[Any]


class Rows(NamedTuple):
    """The rows of the live sequences, contiguous. int64 [max_rows]: num_tokens, num_computed, num_blocks. int32:
    token_ids [max_rows, max_tokens], block_table [max_rows, max_blocks]."""

    num_tokens: Array
    num_computed: Array
    num_blocks: Array
    token_ids: Array
    block_table: Array


class DecodeInputs(NamedTuple):
    """The inputs of a step, contiguous; one entry for each of its rows. int64: rows (of Rows), offsets (0, or how far a
    draft token is behind the next token to compute), input_ids, positions, slots, lengths. int32: seq_lens, the lengths
    again, and block_tables [max_rows, max_blocks], where entries behind the blocks of a sequence mean nothing."""

    rows: Array
    offsets: Array
    input_ids: Array
    positions: Array
    slots: Array
    lengths: Array
    seq_lens: Array
    block_tables: Array


COUNT, READY, TOKENS = 2, 3, 4  # words of the arguments, behind the two that every kernel has


@jit
def _are_ready(rows, offsets, count, num_tokens, num_computed, num_blocks, token_ids, max_tokens, block_size):
    for i in range(count):
        row = read(rows, i)
        computed, offset = read(num_computed, row), read(offsets, i)
        position = computed + offset
        if computed + 1 != read(num_tokens, row) or position >= read(num_blocks, row) * block_size:
            return 0
        if position + 1 >= max_tokens or read(token_ids, row * max_tokens + position) < 0:
            return 0
    return 1


@parallel_kernel("19q")
def _advance_rows(args):
    i64, i32 = simd.pointer_i64, simd.pointer_i32
    count, num_tokens, num_computed, num_blocks = args[COUNT], i64(args[5]), i64(args[6]), i64(args[7])
    token_ids, block_table, rows, offsets = i32(args[8]), i32(args[9]), i64(args[10]), i64(args[11])
    input_ids, positions, slots, lengths = i64(args[12]), i64(args[13]), i64(args[14]), i64(args[15])
    seq_lens, tables, max_tokens, max_blocks, block_size = i32(args[16]), i32(args[17]), args[18], args[19], args[20]
    ready = _are_ready(rows, offsets, count, num_tokens, num_computed, num_blocks, token_ids, max_tokens, block_size)
    write(args, READY, ready)
    if not ready:
        return
    for i in range(count):
        row = read(rows, i)
        position = read(num_computed, row) + read(offsets, i)
        table, out = advance(block_table, row * max_blocks), advance(tables, i * max_blocks)
        for block in range(position // block_size + 1):
            write(out, block, read(table, block))
        write(input_ids, i, np.int64(read(token_ids, row * max_tokens + position)))
        write(positions, i, position)
        write(slots, i, np.int64(read(table, position // block_size)) * block_size + position % block_size)
        write(lengths, i, position + 1)
        write(seq_lens, i, np.int32(position + 1))
    for i in range(count):  # the rows of a draft are in order: its last token counts
        row, length = read(rows, i), read(lengths, i)
        write(num_computed, row, length)
        write(num_tokens, row, length + 1)


@parallel_kernel("19q")
def _store_tokens(args):
    tokens, token_ids, rows = simd.pointer_i64(args[TOKENS]), simd.pointer_i32(args[8]), simd.pointer_i64(args[10])
    lengths, max_tokens = simd.pointer_i64(args[15]), args[18]
    for i in range(args[COUNT]):
        place = read(rows, i) * max_tokens + read(lengths, i)
        write(token_ids, place, np.int32(max(0, read(tokens, i))))


class DecodeRows:
    """`advance`, then `store`, for each step. The arrays never move."""

    def __init__(self, rows: Rows, inputs: DecodeInputs, block_size: int) -> None:
        sizes = rows.token_ids.shape[1], rows.block_table.shape[1], block_size
        addresses = [array.ctypes.data for array in (*rows, *inputs)]
        self._words = np.array([0, 1, 0, 0, 0, *addresses, *sizes], np.int64)
        self._owners = rows, inputs
        self._address = ctypes.c_void_p(self._words.ctypes.data)

    def advance(self, count: int) -> bool:
        """Count one more token of each of the first `count` of inputs.rows as computed, another one as known, and enter
        the other inputs of the step that computes it. Rows with an offset follow those with less. False, and nothing is
        done, if the next token of a row is not known, is not its last, or has no block, and if a token of a draft has
        no block."""
        self._words[COUNT] = count
        _advance_rows.entry(self._address)
        return bool(self._words[READY])

    def store(self, tokens: int) -> None:
        """Enter the tokens that the rows of the last `advance` sampled: int64 at the address `tokens`, 0 for one below
        0."""
        self._words[TOKENS] = tokens
        _store_tokens.entry(self._address)
