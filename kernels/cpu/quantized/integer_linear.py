"""The linear layer over integer codes of a CPU without an instruction for bf16 pairs: in 16-bit integers.

One instruction (vpmaddwd, or vpdpwssd) multiplies 16-bit pairs of codes with pairs of inputs: twice as many as one that
multiplies floats, and codes need not become floats or bf16. So rows are rounded to integers first (integers.py): an
input is off by 2^-16 of the largest of its part of a group, where bf16 has rounded it by up to 2^-9 of itself.
(llama.cpp rounds inputs to 8 bits.) Codes are read packed, see words.py, and no weight is rounded. With an instruction
for bf16 pairs, 4-bit and 6-bit codes take as long this way, and 8-bit codes gain in the caches, but not in a model.
"""

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from kernels.cpu import simd
from kernels.cpu.codes import WIDTH, F32Pointer
from kernels.cpu.dots import LANES, broadcast, by_rows, vector_at
from kernels.cpu.linear.panels import store_outputs
from kernels.cpu.linear.places import count_items, give_out_rest, place_of
from kernels.cpu.parallel import empty, jit, next_item, parallel_kernel
from kernels.cpu.quantized.integers import SCALE, START, SUM, multiply_add, round_row, rounded_words
from kernels.cpu.quantized.scales import COLUMNS, FP32, load_by_form, load_scales
from kernels.cpu.quantized.words import INT4, INT6, INT8, INTEGERS, VECTORS, load_integers, prefetch_pair
from kernels.cpu.simd import I32Pointer, advance, splat, store
from kernels.cpu.widened_dots import column_blocks, fma

ROWS = 6  # the most rows of a microkernel
ROWS_PER_ITEM = 192
ROUNDED_APART = 8  # more rows are rounded once for all threads, by a kernel before
ZERO = np.float32(0)

_F32V, _I32V, _I64 = ir.VectorType(ir.FloatType(), WIDTH), ir.VectorType(ir.IntType(32), WIDTH), ir.IntType(64)


def _multiply(rows, kind):
    """An intrinsic: sums[r, :] += x[r, :] @ panel for `rows` rounded rows and 64 outputs.

    Each of `groups` groups has `parts` parts of `depth` pairs of inputs. `first`: index of the panel's first scale;
    scales and offsets (null: none) have the same form.
    """

    def codegen(context, builder, sig, args):
        for block in column_blocks(rows, VECTORS, 1):
            add_block(builder, block, *args)
        return context.get_dummy_value()

    def add_block(builder, block, x, x_stride, codes, depth, parts, groups, scales, offsets, form, first, sums):
        x_rows = [builder.gep(x, [builder.mul(x_stride, ir.Constant(_I64, r))]) for r in range(rows)]
        num_parts = builder.mul(parts, groups)
        words = builder.mul(num_parts, depth)
        cells = [(r, v) for r in range(rows) for v in block]
        totals = {cell: cgutils.alloca_once(builder, _I32V) for cell in cells}

        def word_of(r, index):
            return broadcast(builder, builder.load(builder.gep(x_rows[r], [index])))

        def behind(r, numbers, index):
            place = builder.add(words, builder.mul(num_parts, ir.Constant(_I64, numbers)))
            return word_of(r, builder.add(place, index))

        def add(cell, value, factor):
            index = ir.Constant(_I64, cell[0] * COLUMNS + cell[1] * WIDTH)
            place = vector_at(builder, sums, index, _F32V)
            builder.store(fma(builder, value, factor, builder.load(place, align=4)), place, align=4)

        with cgutils.for_range(builder, groups) as group:
            scale = builder.add(first, builder.mul(group.index, ir.Constant(_I64, COLUMNS)))
            with cgutils.for_range(builder, parts) as part:
                number = builder.add(builder.mul(group.index, parts), part.index)
                begin = builder.mul(number, depth)
                for (r, _), total in totals.items():
                    builder.store(behind(r, START, number), total)
                with cgutils.for_range(builder, depth) as loop:
                    index = builder.add(begin, loop.index)
                    if block[0] == 0:
                        prefetch_pair(builder, kind, codes, index)
                    inputs = [builder.bitcast(word_of(r, index), LANES) for r in range(rows)]
                    for v, pairs in zip(block, load_integers(builder, kind, codes, index, block), strict=True):
                        for r in range(rows):
                            total = multiply_add(builder, builder.load(totals[r, v]), pairs, inputs[r])
                            builder.store(total, totals[r, v])
                factors = load_by_form(builder, scales, form, scale, block)
                for r in range(rows):
                    x_scale = builder.bitcast(behind(r, SCALE, number), _F32V)
                    for v in block:
                        total = builder.sitofp(builder.load(totals[r, v]), _F32V)
                        add((r, v), builder.fmul(total, x_scale), factors[v])
            has_offsets = builder.icmp_unsigned("!=", builder.ptrtoint(offsets, _I64), ir.Constant(_I64, 0))
            with builder.if_then(has_offsets):
                terms = load_by_form(builder, offsets, form, scale, block)
                for r in range(rows):
                    x_sum = builder.bitcast(behind(r, SUM, group.index), _F32V)
                    for v in block:
                        add((r, v), x_sum, terms[v])

    i64 = types.int64
    arguments = I32Pointer, i64, I32Pointer, i64, i64, i64, F32Pointer, F32Pointer, i64, i64, F32Pointer

    def typing(typingctx, x, x_stride, codes, depth, parts, groups, scales, offsets, form, first, sums):
        return types.void(*arguments), codegen

    typing.__doc__ = f"Products of {rows} rows with codes."
    return intrinsic(typing)


_multiply4, _multiply8, _multiply6 = (
    by_rows([_multiply(rows, kind) for rows in range(1, ROWS + 1) if kind in INTEGERS]) for kind in (INT4, INT8, INT6)
)


@jit
def _multiply_rows(kind, num_rows, x, x_stride, codes, depth, parts, groups, scales, offsets, form, first, sums):
    """See _multiply: any number of rows, in blocks of nearly equal size."""
    blocks, row = (num_rows + ROWS - 1) // ROWS, 0
    for block in range(blocks):
        count = (num_rows - row + blocks - block - 1) // (blocks - block)
        a, out = advance(x, row * x_stride), advance(sums, row * COLUMNS)
        if kind == INT4:
            _multiply4(count, a, x_stride, codes, depth, parts, groups, scales, offsets, form, first, out)
        elif kind == INT8:
            _multiply8(count, a, x_stride, codes, depth, parts, groups, scales, offsets, form, first, out)
        else:
            _multiply6(count, a, x_stride, codes, depth, parts, groups, scales, offsets, form, first, out)
        row += count


@parallel_kernel("7q")
def _round_rows(args):
    """Work items are rows."""
    x, out, x_stride, words, part = simd.pointer_bf16(args[2]), simd.pointer_i32(args[3]), args[4], args[5], args[6]
    num_groups, least = args[7], args[8]
    stride = rounded_words(words, part, num_groups)
    item = next_item(args)
    while item < args[1]:
        round_row(advance(x, item * x_stride), words, part, num_groups, least, advance(out, item * stride))
        item = next_item(args)


def round_rows(x: Tensor, x_stride: int, words: int, part: int, num_groups: int, least: int) -> Tensor:
    """Rounded rows of x, bf16 [num_rows, 2 * words] -> int32 [num_rows, ...]; see round_row."""
    out = empty((len(x), rounded_words.py_func(words, part, num_groups)), torch.int32)
    _round_rows(len(x), x.data_ptr(), out.data_ptr(), x_stride, words, part, num_groups, least)
    return out


@parallel_kernel("20q")
def integer_linear(args):
    """Work items: see kernels/cpu/linear/places.py."""
    x, codes, out, bias = args[2], simd.pointer_i32(args[3]), simd.pointer_bf16(args[4]), simd.pointer_bf16(args[5])
    scales, offsets, num_rows, x_stride = simd.pointer_f32(args[6]), simd.pointer_f32(args[7]), args[8], args[9]
    out_features, kind, form, num_runs, pair_words = args[10], args[11], args[12], args[13], args[14]
    num_panels, table, is_rounded = args[15], simd.pointer_i64(args[16]), args[17]
    words, part, num_groups, least = args[18], args[19], args[20], args[21]
    stride, group = rounded_words(words, part, num_groups), words // num_groups
    most_rows = min(ROWS_PER_ITEM, num_rows)
    widens, most_scales = num_rows > ROWS and form != FP32, num_groups * COLUMNS
    scratch = np.empty(most_rows * (COLUMNS + (0 if is_rounded else stride)) + 2 * most_scales * widens, np.float32)
    sums = simd.pointer_f32(scratch.ctypes.data)
    wide_scales = advance(sums, most_rows * COLUMNS)
    wide_offsets = advance(wide_scales, most_scales * widens)
    room = simd.pointer_i32(simd.address(advance(wide_offsets, most_scales * widens)))
    prepared = np.int64(-1)
    items = count_items(args[1], table, num_panels)
    item = next_item(args)
    while item < items:
        matrix, place, begin, rows = place_of(item, items, table, num_rows, num_panels, num_runs, ROWS_PER_ITEM)
        panel, column, terms = matrix * num_panels + place, place * COLUMNS, bias
        if simd.address(bias) != 0:
            terms = advance(bias, matrix * out_features)
        rounded = room
        if is_rounded:
            rounded = advance(simd.pointer_i32(x), begin * stride)
        elif prepared != begin:
            for r in range(rows):
                numbers = advance(simd.pointer_bf16(x), (begin + r) * x_stride)
                round_row(numbers, words, part, num_groups, least, advance(room, r * stride))
            prepared = begin
        for i in range(0, rows * COLUMNS, WIDTH):
            store(sums, i, splat(ZERO))
        panel_codes, first = advance(codes, panel * words * pair_words), panel * most_scales
        if widens:  # once for all blocks of rows
            for i in range(0, most_scales, WIDTH):
                store(wide_scales, i, load_scales(scales, form, first + i))
                if simd.address(offsets) != 0:
                    store(wide_offsets, i, load_scales(offsets, form, first + i))
            terms_of = wide_offsets if simd.address(offsets) != 0 else offsets
            _multiply_rows(kind, rows, rounded, stride, panel_codes, part, group // part, num_groups, wide_scales,
                           terms_of, FP32, 0, sums)  # fmt: skip
        else:
            _multiply_rows(kind, rows, rounded, stride, panel_codes, part, group // part, num_groups, scales, offsets,
                           form, first, sums)  # fmt: skip
        store_outputs(sums, terms, out, out_features, rows, begin, column)
        item = next_item(args)
    give_out_rest(args)
    simd.keep(scratch)
