"""The linear layer over int8 codes and inputs rounded to int8 (W8A8), on a CPU with AVX512-VNNI.

One instruction (vpdpbusd) adds 64 products of 8-bit integers to sums of 32 bits: twice as many as vdpbf16ps multiplies
pairs of bf16, and codes need no conversion. AMX multiplies tiles of them, sixteen times as fast. A row of inputs is
rounded in parts of 256, each with a scale of its own: finer than the scale per token that checkpoints of this kind ask
for (LLM.int8, Dettmers et al. 2022, section 2.1; SmoothQuant, Xiao et al. 2023). The sums of a part are exact, and
parts are added in order, so a row's bits do not depend on the other rows.
"""

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from kernels.cpu import amx, simd
from kernels.cpu.codes import WIDTH, F32Pointer
from kernels.cpu.dots import broadcast, by_rows, vector_at
from kernels.cpu.features import HAS_INT8_TILES, instruction
from kernels.cpu.linear.panels import NO_GATE, store_gated_outputs, store_outputs
from kernels.cpu.linear.places import RowGroups, count_items, give_out_rest, place_of
from kernels.cpu.parallel import empty, jit, next_item, parallel_kernel
from kernels.cpu.quantized.integers import LEAST_SCALE, round_quotient, store_bytes
from kernels.cpu.quantized.scales import COLUMNS, load_scales
from kernels.cpu.quantized.words import MIDDLE, VECTORS
from kernels.cpu.simd import I32Pointer, advance, load, read, splat, store, write
from kernels.cpu.widened_dots import fma

ROWS = 6  # the most rows of a microkernel: 24 sums, 4 vectors of codes and one of inputs in 32 registers
ROWS_PER_ITEM = 96
ROUNDED_APART = 8  # more rows are rounded once for all threads, by a kernel before
PART = 64  # quads of inputs with a common scale; their codes of a panel take 16 KiB, which stay in L1
AHEAD = 24  # quads that a single block of rows prefetches ahead: 6 KiB; several prefetch the next part
MOST = np.float32(127)
ZERO = np.float32(0)

_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_F32V, _I32V = (ir.VectorType(scalar, WIDTH) for scalar in (_F32, _I32))


@jit
def rounded_words(quads):
    """Words of a rounded row: its quads, then the scale of each part (fp32), then START of each part (int32): the sum
    of its integers times -128, which the sums of products begin with, because codes are stored 128 too large."""
    return quads + 2 * ((quads + PART - 1) // PART)


@jit
def round_row(x, quads, out):
    """Round a row of bf16 to a row of rounded_words(quads) words. A part with NaN or an infinity gets NaN as its
    scale."""
    parts = (quads + PART - 1) // PART
    scales = simd.pointer_f32(simd.address(advance(out, quads)))
    starts = advance(out, quads + parts)
    for p in range(parts):
        begin, end = 4 * PART * p, min(4 * PART * (p + 1), 4 * quads)
        top, plain = splat(ZERO), splat(ZERO)
        for k in range(begin, end, WIDTH):
            values = load(x, k)
            top = simd.larger(simd.larger(values, simd.sub(splat(ZERO), values)), top)
            plain = simd.fma(values, splat(ZERO), plain)
        scale = max(simd.first(simd.spread_max1(top)), LEAST_SCALE) / MOST
        inverse, total = splat(np.float32(1) / scale), splat(ZERO)
        for k in range(begin, end, WIDTH):
            values = round_quotient(load(x, k), inverse)
            total = simd.add(total, values)
            store_bytes(out, k // 4, values)
        write(scales, p, scale + simd.first(simd.spread_add1(plain)))
        write(starts, p, np.int32(np.int64(simd.first(simd.spread_add1(total))) * -MIDDLE))


def _multiply(rows, lines):
    """An intrinsic: sums[r, :] += x[r, :] @ part of a panel for `rows` rounded rows and 64 outputs. `depth`: quads of
    the part; `scales`: index in x of the part's scale; `starts`: of its START. Each quad prefetches `lines` cache lines
    of `soon`."""

    def codegen(context, builder, sig, args):
        x, x_stride, codes, depth, scales, starts, sums, soon = args
        x_rows = [builder.gep(x, [builder.mul(x_stride, ir.Constant(_I64, r))]) for r in range(rows)]
        cells = [(r, v) for r in range(rows) for v in range(VECTORS)]
        totals = {cell: cgutils.alloca_once(builder, _I32V) for cell in cells}

        def word_of(r, index):
            return broadcast(builder, builder.load(builder.gep(x_rows[r], [index])))

        for r in range(rows):
            start = word_of(r, starts)
            for v in range(VECTORS):
                builder.store(start, totals[r, v])
        with cgutils.for_range(builder, depth) as loop:
            at = builder.mul(loop.index, ir.Constant(_I64, COLUMNS))
            quads = []
            for v in range(VECTORS):
                place = builder.add(at, ir.Constant(_I64, v * WIDTH))
                quads.append(builder.load(vector_at(builder, codes, place, _I32V), align=4))
            first = builder.mul(loop.index, ir.Constant(_I64, lines * WIDTH))
            for line in range(lines):
                place = builder.add(first, ir.Constant(_I64, line * WIDTH))
                simd.prefetch(builder, builder.gep(soon, [place]))
            for r in range(rows):
                inputs = word_of(r, loop.index)
                for v in range(VECTORS):
                    total = builder.load(totals[r, v])
                    total = instruction(builder, "vpdpbusd $2, $1, $0", "=v,v,v,0", _I32V, quads[v], inputs, total)
                    builder.store(total, totals[r, v])
        for r in range(rows):
            scale = builder.bitcast(word_of(r, scales), _F32V)
            for v in range(VECTORS):
                place = vector_at(builder, sums, ir.Constant(_I64, r * COLUMNS + v * WIDTH), _F32V)
                product = builder.sitofp(builder.load(totals[r, v]), _F32V)
                builder.store(fma(builder, product, scale, builder.load(place, align=4)), place, align=4)
        return context.get_dummy_value()

    i64 = types.int64

    def typing(typingctx, x, x_stride, codes, depth, scales, starts, sums, soon):
        return types.void(I32Pointer, i64, I32Pointer, i64, i64, i64, F32Pointer, I32Pointer), codegen

    typing.__doc__ = f"Products of {rows} rounded rows with a part of a panel."
    return intrinsic(typing)


_multiply_ahead, _half, _quarter = (by_rows([_multiply(rows, n) for rows in range(1, ROWS + 1)]) for n in (4, 2, 1))


@jit
def _multiply_rows(num_rows, x, x_stride, codes, quads, sums):
    """See _multiply: all parts, and any number of rows in blocks of nearly equal size. Blocks share the prefetch of the
    next part, as in panels.py."""
    parts, blocks = (quads + PART - 1) // PART, (num_rows + ROWS - 1) // ROWS
    blocks = max(blocks, 4) if blocks > 2 else blocks
    for part in range(parts):
        begin, row = part * PART, 0
        depth = min(PART, quads - begin)
        panel, scales = advance(codes, begin * COLUMNS), quads - begin + part
        for block in range(blocks):
            count = (num_rows - row + blocks - block - 1) // (blocks - block)
            a, out = advance(x, row * x_stride + begin), advance(sums, row * COLUMNS)
            if blocks == 1:
                soon = advance(panel, AHEAD * COLUMNS)
                _multiply_ahead(count, a, x_stride, panel, depth, scales, scales + parts, out, soon)
            elif blocks == 2:
                soon = advance(panel, (2 * PART + block * depth) * COLUMNS // 2)
                _half(count, a, x_stride, panel, depth, scales, scales + parts, out, soon)
            else:
                soon = advance(panel, (4 * PART + block % 4 * depth) * COLUMNS // 4)
                _quarter(count, a, x_stride, panel, depth, scales, scales + parts, out, soon)
            row += count


@intrinsic
def _add_scaled(typingctx, integers, start, scale, sums):
    """sums[:] += (integers[:] + start) * scale for 64 outputs."""

    def codegen(context, builder, sig, args):
        integers, start, scale, sums = args
        start, scale = broadcast(builder, start), broadcast(builder, scale)
        for v in range(VECTORS):
            index = ir.Constant(_I64, v * WIDTH)
            total = builder.add(builder.load(vector_at(builder, integers, index, _I32V), align=4), start)
            place = vector_at(builder, sums, index, _F32V)
            product = fma(builder, builder.sitofp(total, _F32V), scale, builder.load(place, align=4))
            builder.store(product, place, align=4)
        return context.get_dummy_value()

    return types.void(I32Pointer, types.int32, types.float32, F32Pointer), codegen


@jit
def _multiply_in_tiles(state, num_rows, x, x_stride, codes, quads, sums, integers):
    """As _multiply_rows, by AMX, with the same bits: sums of integers are exact. integers: room for a band of rows."""
    parts = (quads + PART - 1) // PART
    for part in range(parts):
        begin = part * PART
        depth, panel = min(PART, quads - begin), advance(codes, begin * COLUMNS)
        for row in range(0, num_rows, amx.BAND_ROWS):
            rows, band = advance(x, row * x_stride), min(amx.BAND_ROWS, num_rows - row)
            amx.multiply_integers(state, advance(rows, begin), x_stride, panel, depth, band, integers)
            for r in range(band):
                parameters = advance(rows, r * x_stride + quads + part)
                scale = read(simd.pointer_f32(simd.address(parameters)), 0)
                _add_scaled(simd.pointer_i32(simd.address(advance(integers, r * COLUMNS))), read(parameters, parts),
                            scale, advance(sums, (row + r) * COLUMNS))  # fmt: skip


@jit
def _scale_sums(sums, rows, scales, form, first):
    """sums[:, c] *= the scale of output c."""
    for c in range(0, COLUMNS, WIDTH):
        factor = load_scales(scales, form, first + c)
        for r in range(rows):
            store(sums, r * COLUMNS + c, simd.mul(load(sums, r * COLUMNS + c), factor))


@parallel_kernel("5q")
def _w8a8_rows(args):
    """Work items are rows to round."""
    x, out, x_stride, quads = simd.pointer_bf16(args[2]), simd.pointer_i32(args[3]), args[4], args[5]
    item = next_item(args)
    while item < args[1]:
        round_row(advance(x, item * x_stride), quads, advance(out, item * args[6]))
        item = next_item(args)


@parallel_kernel("15q2d")
def _w8a8_linear(args):
    """Work items: see kernels/cpu/linear/places.py."""
    x, codes, out, bias = args[2], simd.pointer_i32(args[3]), simd.pointer_bf16(args[4]), simd.pointer_bf16(args[5])
    scales, num_rows, x_stride, quads, out_features = simd.pointer_f32(args[6]), args[7], args[8], args[9], args[10]
    form, num_runs, num_panels, table, is_rounded = args[11], args[12], args[13], simd.pointer_i64(args[14]), args[15]
    function = args[16]
    limit, slope = np.float32(simd.as_float(args[17])), np.float32(simd.as_float(args[18]))
    stride, most_rows = rounded_words(quads), min(ROWS_PER_ITEM, num_rows)
    scratch = np.empty(most_rows * (COLUMNS + (0 if is_rounded else stride)), np.float32)
    sums = simd.pointer_f32(scratch.ctypes.data)
    room = simd.pointer_i32(simd.address(advance(sums, most_rows * COLUMNS)))
    in_tiles = HAS_INT8_TILES and quads % amx.DEPTH == 0 and num_rows > ROWS
    tiles, spare = np.zeros(amx.STATE, np.int64), np.empty(amx.BAND_ROWS * COLUMNS + WIDTH, np.float32)
    state = simd.pointer_i64(tiles.ctypes.data)
    integers = simd.pointer_f32((spare.ctypes.data + 63) // 64 * 64)
    prepared = np.int64(-1)  # `room` has the rows from there on
    items = count_items(args[1], table, num_panels)
    item = next_item(args)
    while item < items:
        matrix, place, begin, rows = place_of(item, items, table, num_rows, num_panels, num_runs, ROWS_PER_ITEM)
        panel, terms, rounded = matrix * num_panels + place, bias, room
        if simd.address(bias) != 0:
            terms = advance(bias, matrix * out_features)
        if is_rounded:
            rounded = advance(simd.pointer_i32(x), begin * stride)
        elif prepared != begin:
            for r in range(rows):
                round_row(advance(simd.pointer_bf16(x), (begin + r) * x_stride), quads, advance(room, r * stride))
            prepared = begin
        for i in range(0, rows * COLUMNS, WIDTH):
            store(sums, i, splat(ZERO))
        panel_codes = advance(codes, panel * quads * COLUMNS)
        if in_tiles:
            _multiply_in_tiles(state, rows, rounded, stride, panel_codes, quads, sums, integers)
        else:
            _multiply_rows(rows, rounded, stride, panel_codes, quads, sums)
        _scale_sums(sums, rows, scales, form, panel * COLUMNS)
        column = place * COLUMNS
        if function < 0:
            store_outputs(sums, terms, out, out_features, rows, begin, column)
        else:
            store_gated_outputs(sums, terms, out, out_features // 2, rows, begin, column, function, limit, slope)
        item = next_item(args)
    give_out_rest(args)
    if in_tiles:
        amx.release()
    simd.keep(scratch)
    simd.keep(tiles)
    simd.keep(spare)


def w8a8_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    form: int,
    bias: Tensor | None,
    out_features: int,
    groups: RowGroups | None = None,
    gate: tuple[int, float, float] = NO_GATE,
) -> Tensor:
    """x bf16 [num_rows, in_features], which may be strided, and a bias bf16 [out_features] -> bf16 [num_rows,
    out_features].

    codes: of the kind W8A8, see words.py; scales: in a `form` of scales.py. With `groups`, rows are sorted by expert,
    and codes, scales and biases are those of all experts, one below the other. With a `gate` (Gate.arguments) the rows
    of the matrix are those of panels.interleave, and half as many outputs are act(gate) * up.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    (num_rows, in_features), x_stride = x.shape, x.stride(0)
    quads, num_panels = in_features // 4, len(codes)
    blocks, table = -(-num_rows // ROWS_PER_ITEM), 0
    if groups is not None:
        num_panels, out_features = num_panels // groups.num_experts, out_features // groups.num_experts
        blocks, table = groups.most_blocks, groups.table.data_ptr()
    out = empty((num_rows, out_features if gate is NO_GATE else out_features // 2), torch.bfloat16)
    is_rounded = num_rows > ROUNDED_APART
    if is_rounded:
        words = rounded_words.py_func(quads)
        rounded = empty((num_rows, words), torch.int32)
        _w8a8_rows(num_rows, x.data_ptr(), rounded.data_ptr(), x_stride, quads, words)
        x = rounded
    _w8a8_linear(
        num_panels * blocks,
        x.data_ptr(), codes.data_ptr(), out.data_ptr(), 0 if bias is None else bias.data_ptr(), scales.data_ptr(),
        num_rows, x_stride, quads, out_features, form, torch.get_num_threads(), num_panels, table, is_rounded,
        *gate,
    )  # fmt: skip
    return out
