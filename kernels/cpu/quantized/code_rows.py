"""Rows of a matrix in panels of codes (code_linear.py), for embeddings, and sums of groups of inputs, for offsets."""

import torch
from numba import float32
from torch import Tensor

from kernels.cpu import simd
from kernels.cpu.codes import WIDTH
from kernels.cpu.parallel import empty, jit, next_item, parallel_kernel
from kernels.cpu.quantized.scales import COLUMNS, read_scale
from kernels.cpu.simd import advance, load, read, splat, write

LINE = 16  # 32-bit words of a line of codes


@jit
def _code4(codes, values, line, row, i):
    """The meaning of the code of input `i` of a pair, for output `row` of the panel; the sum of the planes' values."""
    word = read(codes, line * LINE + row % WIDTH)
    return read(values, word >> (row // WIDTH * 4 + 16 * i) & 15)


@jit
def _code8(codes, values, pair, place):
    """The meaning of the byte at `place` of the 128 bytes of a pair of inputs."""
    word = read(codes, pair * 2 * LINE + place // 4)
    return read(values, word >> (place % 4 * 8) & 255)


@parallel_kernel("14q")
def _code_rows(args):
    """Work items are rows: out[item] = row indices[item] of the matrix."""
    indices, codes, values = simd.pointer_i64(args[2]), simd.pointer_i32(args[3]), simd.pointer_f32(args[4])
    scales, offsets, out = simd.pointer_f32(args[5]), simd.pointer_f32(args[6]), simd.pointer_f32(args[7])
    words, group, num_groups, form = args[8], args[9], args[10], args[11]
    planes, num_tables, row_step, input_step = args[12], args[13], args[14], args[15]
    item = next_item(args)
    while item < args[1]:
        index = read(indices, item)
        panel, row = index // COLUMNS, index % COLUMNS
        for k in range(words):
            pair = panel * words + k
            at = (panel * num_groups + k // group) * COLUMNS + row
            scale = read_scale(scales, form, at)
            offset = read_scale(offsets, form, at) if simd.address(offsets) != 0 else float32(0)
            for i in range(2):
                if planes == 0:
                    meaning = _code8(codes, values, pair, row * row_step + i * input_step)
                else:
                    meaning = float32(0)
                    for table in range(num_tables):
                        line = pair * planes + min(table, planes - 1)
                        meaning += _code4(codes, advance(values, table * 16), line, row, i)
                write(out, (item * words + k) * 2 + i, meaning * scale + offset)
        item = next_item(args)


def code_rows(
    indices: Tensor,
    codes: Tensor,
    values: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    *,
    form: int,
    group_size: int,
    planes: int,
    steps: tuple[int, int] = (0, 0),
) -> Tensor:
    """Rows `indices`, int64 [n], of a matrix of PackedCodes -> fp32 [n, in_features].

    values fp32 [tables, 16] or [256]: the meanings of codes. scales and offsets: in a `form` of scales.py.
    planes: lines of 4-bit codes for a pair of inputs; 0 for 8-bit codes, whose `steps` are the bytes from an output to
    the next and from an input to the next.
    """
    words = codes.shape[1]
    out = empty((len(indices), 2 * words), torch.float32)
    indices = indices.contiguous()
    _code_rows(
        len(indices), indices.data_ptr(), codes.data_ptr(), values.data_ptr(), scales.data_ptr(),
        0 if offsets is None else offsets.data_ptr(), out.data_ptr(), words, group_size // 2,
        2 * words // group_size, form, planes, len(values), *steps,
    )  # fmt: skip
    return out


@parallel_kernel("5q")
def _sum_groups(args):
    """Work items are rows: out[item, g] = the sum of the inputs of group g."""
    x, out = simd.pointer_bf16(args[2]), simd.pointer_f32(args[3])
    stride, group, num_groups = args[4], args[5], args[6]
    whole = group // WIDTH * WIDTH
    item = next_item(args)
    while item < args[1]:
        for g in range(num_groups):
            start = item * stride + g * group
            total = splat(float32(0))
            for i in range(0, whole, WIDTH):
                total = simd.add(total, load(x, start + i))
            rest = float32(0)
            for i in range(whole, group):
                rest += read(x, start + i)
            write(out, item * num_groups + g, simd.first(simd.spread_add1(total)) + rest)
        item = next_item(args)


def sum_groups(x: Tensor, group: int) -> Tensor:
    """x bf16 [num_rows, in_features], whose rows may be strided -> fp32 [num_rows, in_features / group]: sums of groups
    of inputs."""
    num_rows, num_groups = x.shape[0], x.shape[1] // group
    out = empty((num_rows, num_groups), torch.float32)
    _sum_groups(num_rows, x.data_ptr(), out.data_ptr(), x.stride(0), group, num_groups)
    return out
