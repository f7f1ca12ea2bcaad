"""Rows of a matrix in panels of codes (words.py), for embeddings, and sums of groups of inputs, for offsets."""

import torch
from numba import float32
from torch import Tensor

from kernels.cpu import simd
from kernels.cpu.codes import WIDTH
from kernels.cpu.parallel import empty, jit, next_item, parallel_kernel
from kernels.cpu.quantized.scales import COLUMNS, read_scale
from kernels.cpu.quantized.words import FP8, INT6, INT8, LINE, PAIR_WORDS, PLACES8, SPLIT4, W8A8
from kernels.cpu.simd import advance, load, read, splat, write


@jit
def _byte(codes, place):
    return read(codes, place // 4) >> (place % 4 * 8) & 255


@jit
def _code(kind, codes, row, k, i):
    """The code of input `i` of pair k, for output `row` of the panel. codes: of this pair."""
    if kind == W8A8:
        odd = k % 2
        return _byte(advance(codes, -odd * PAIR_WORDS[W8A8]), 4 * row + 2 * odd + i)
    if kind == INT8:
        return _byte(codes, PLACES8[0] * i + PLACES8[1] * row)
    if kind == FP8:
        return _byte(codes, 2 * row + i)
    column, vector = row % WIDTH, row // WIDTH
    low = read(codes, column) >> (4 * vector + 16 * i) & 15
    if kind == INT6:
        return low | (_byte(codes, 4 * LINE + 2 * column + i) >> (2 * vector) & 3) << 4
    return low


@parallel_kernel("12q")
def _code_rows(args):
    """Work items are rows: out[item] = row indices[item] of the matrix."""
    indices, codes, values = simd.pointer_i64(args[2]), simd.pointer_i32(args[3]), simd.pointer_f32(args[4])
    scales, offsets, out = simd.pointer_f32(args[5]), simd.pointer_f32(args[6]), simd.pointer_f32(args[7])
    words, group, num_groups, form, kind, pair_words = args[8], args[9], args[10], args[11], args[12], args[13]
    item = next_item(args)
    while item < args[1]:
        index = read(indices, item)
        panel, row = index // COLUMNS, index % COLUMNS
        for k in range(words):
            pair = advance(codes, (panel * words + k) * pair_words)
            at = (panel * num_groups + k // group) * COLUMNS + row
            scale = read_scale(scales, form, at)
            offset = read_scale(offsets, form, at) if simd.address(offsets) != 0 else float32(0)
            for i in range(2):
                code = _code(kind, pair, row, k, i)
                meaning = read(values, code)
                if kind == SPLIT4:
                    meaning += read(values, 16 + code)
                write(out, (item * words + k) * 2 + i, meaning * scale + offset)
        item = next_item(args)


def code_rows(
    indices: Tensor,
    codes: Tensor,
    values: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    *,
    kind: int,
    form: int,
    group_size: int,
) -> Tensor:
    """Rows `indices`, int64 [n], of a matrix of PackedCodes -> fp32 [n, in_features].

    codes of a `kind` and values, their meanings: see words.py. scales and offsets: in a `form` of scales.py.
    """
    words = codes.shape[1]
    out = empty((len(indices), 2 * words), torch.float32)
    indices = indices.contiguous()
    _code_rows(
        len(indices), indices.data_ptr(), codes.data_ptr(), values.data_ptr(), scales.data_ptr(),
        0 if offsets is None else offsets.data_ptr(), out.data_ptr(), words, group_size // 2,
        2 * words // group_size, form, kind, PAIR_WORDS[kind],
    )  # fmt: skip
    return out


@jit
def sum_groups(x, stride, group, num_groups, num_rows, out):
    """out[row, g] = the sum of the inputs of group g; x bf16, group: inputs of a group."""
    whole = group // WIDTH * WIDTH
    for row in range(num_rows):
        for g in range(num_groups):
            start = row * stride + g * group
            total = splat(float32(0))
            for i in range(0, whole, WIDTH):
                total = simd.add(total, load(x, start + i))
            rest = float32(0)
            for i in range(whole, group):
                rest += read(x, start + i)
            write(out, row * num_groups + g, simd.first(simd.spread_add1(total)) + rest)
