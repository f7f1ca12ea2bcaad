"""The linear layer over fp32 rows on a CPU: weights in fp16 or bf16 where that loses nothing, else in fp32.

A checkpoint in fp16 is computed in fp32 on a CPU, because bf16 has not its digits. Its weights stay in 16 bits all the
same, in panels of 64 outputs as in panels.py, and are widened as they are read: a step of few rows reads half of the
bytes. A row's products are added in the order of the inputs, whatever the other rows are.
"""

import numpy as np
import torch
import torch.nn.functional as F
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from kernels import huge_pages
from kernels.cpu import simd
from kernels.cpu.codes import WIDTH, F32Pointer, constant
from kernels.cpu.dots import by_rows
from kernels.cpu.features import HAS_AVX2, HAS_AVX512
from kernels.cpu.linear.panels import COLUMNS, ROWS, ROWS_PER_ITEM, ZERO, store_outputs
from kernels.cpu.linear.places import place_of
from kernels.cpu.parallel import empty, jit, next_item, parallel_kernel
from kernels.cpu.simd import I32Pointer, advance, broadcast, splat, store, vector_at
from kernels.cpu.widened_dots import accumulate, column_blocks, prefetcher

BF16, FP16, FP32 = FORMS = range(3)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # by form
LINES = (2, 2, 4)  # by form: cache lines of 64 weights
DEPTH = 512  # inputs at a time: this part of a panel, 64 or 128 KiB, stays in L2 for the next rows
_F32, _HALF, _I16, _I32, _I64 = ir.FloatType(), ir.HalfType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_F32V, _I32V = ir.VectorType(_F32, WIDTH), ir.VectorType(_I32, WIDTH)


def _load_weights(builder, form, row, c):
    """Sixteen weights of a row of a panel as floats. row: pointer to its first word."""
    element = (_I16, _HALF, _F32)[form]
    place = vector_at(builder, builder.bitcast(row, element.as_pointer()), ir.Constant(_I64, WIDTH * c),
                      ir.VectorType(element, WIDTH))  # fmt: skip
    weights = builder.load(place, align=4)
    if form == FP16:
        return builder.fpext(weights, _F32V)
    if form == BF16:
        return builder.bitcast(builder.shl(builder.zext(weights, _I32V), constant(_I32, 16)), _F32V)
    return weights


def _multiply(rows, form, ahead):
    """An intrinsic: sums[r, :] += x[r, :] @ panel for `rows` rows and 64 outputs. Each input prefetches cache lines of
    `soon`: as many as its weights have if `ahead`, else one."""
    words = LINES[form] * WIDTH
    lines = LINES[form] if ahead else 1

    def codegen(context, builder, sig, args):
        x, x_stride, panel, depth, sums, soon = args
        blocks = column_blocks(rows, COLUMNS // WIDTH)

        def sums_of(r, c):
            return vector_at(builder, sums, ir.Constant(_I64, r * COLUMNS + WIDTH * c), _F32V)

        def products(index, block):
            row = builder.gep(panel, [builder.mul(index, ir.Constant(_I64, words))])

            def input_of(r):
                place = builder.add(builder.mul(x_stride, ir.Constant(_I64, r)), index)
                return broadcast(builder, builder.load(builder.gep(x, [place])))

            yield input_of, [_load_weights(builder, form, row, c) for c in block]

        prefetch = prefetcher(builder, lines, blocks, soon, ir.Constant(_I64, 0), depth)
        accumulate(builder, rows, blocks, sums_of, depth, products, prefetch)
        return context.get_dummy_value()

    def typing(typingctx, x, x_stride, panel, depth, sums, soon):
        i64 = types.int64
        return types.void(F32Pointer, i64, I32Pointer, i64, F32Pointer, I32Pointer), codegen

    typing.__doc__ = f"{rows} rows of a panel of floats."
    return intrinsic(typing)


def _microkernel(form, ahead):
    return by_rows([_multiply(rows, form, ahead) for rows in range(1, ROWS + 1)])


_bf16, _fp16, _fp32 = (_microkernel(form, False) for form in FORMS)
_bf16_ahead, _fp16_ahead, _fp32_ahead = (_microkernel(form, True) for form in FORMS)


@jit
def _multiply_panel(form, ahead, num_rows, *args):
    if form == FP16:
        if ahead:
            _fp16_ahead(num_rows, *args)
        else:
            _fp16(num_rows, *args)
    elif form == BF16:
        if ahead:
            _bf16_ahead(num_rows, *args)
        else:
            _bf16(num_rows, *args)
    elif ahead:
        _fp32_ahead(num_rows, *args)
    else:
        _fp32(num_rows, *args)


@jit
def multiply_rows(form, x, x_stride, part, depth, num_rows, sums, soon):
    """sums[r, :] += x[r, :] @ part, with the rows in groups of nearly equal size, which share what they prefetch of the
    next part, `soon`. A single group prefetches all of it."""
    lines = 4 if form == FP32 else 2
    groups, row = (num_rows + ROWS - 1) // ROWS, 0
    for group in range(groups):
        count = (num_rows - row + groups - group - 1) // (groups - group)
        share = advance(soon, group % lines * depth * WIDTH)
        _multiply_panel(form, groups == 1, count, advance(x, row * x_stride), x_stride, part, depth,
                        advance(sums, row * COLUMNS), soon if groups == 1 else share)  # fmt: skip
        row += count


@parallel_kernel("11q")
def _float_linear(args):
    """Work items: see places.py."""
    x, panels = simd.pointer_f32(args[2]), simd.pointer_i32(args[3])
    out, bias = simd.pointer_f32(args[4]), simd.pointer_f32(args[5])
    num_rows, x_stride, inputs, out_features, num_runs = args[6], args[7], args[8], args[9], args[10]
    num_panels, form = args[11], args[12]
    words = COLUMNS if form == FP32 else COLUMNS // 2  # an input's weights in a panel
    scratch = np.empty(ROWS_PER_ITEM * COLUMNS, np.float32)
    sums = simd.pointer_f32(scratch.ctypes.data)
    table = simd.pointer_i64(0)
    items, item = args[1], next_item(args)
    while item < items:
        _, panel, begin, rows = place_of(item, items, table, num_rows, num_panels, num_runs, ROWS_PER_ITEM)
        for i in range(0, rows * COLUMNS, WIDTH):
            store(sums, i, splat(ZERO))
        for k in range(0, inputs, DEPTH):
            depth = min(DEPTH, inputs - k)
            part = advance(panels, (panel * inputs + k) * words)
            multiply_rows(form, advance(x, begin * x_stride + k), x_stride, part, depth, rows, sums,
                           advance(part, depth * words))  # fmt: skip
        store_outputs(sums, bias, out, out_features, rows, begin, panel * COLUMNS)
        item = next_item(args)
    simd.keep(scratch)


class FloatPanels:
    """A matrix fp32 [out_features, in_features] in panels of 64 outputs, in the smallest form that holds it exactly."""

    def __init__(self, weight: Tensor) -> None:
        self.out_features = len(weight)
        exact = (form for form in (BF16, FP16) if torch.equal(weight.to(DTYPES[form]).float(), weight))
        self.form = next(exact, FP32)
        rows = F.pad(weight.to(DTYPES[self.form]), (0, 0, 0, -len(weight) % COLUMNS))
        self.panels = huge_pages.copy(rows.view(-1, COLUMNS, weight.shape[1]).transpose(1, 2))

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x fp32 [num_rows, in_features], whose rows may be strided -> fp32 [num_rows, out_features]."""
        row_stride, stride = x.stride()
        if stride != 1:
            x, row_stride = x.contiguous(), x.shape[1]
        num_rows, num_panels = len(x), len(self.panels)
        out = empty((num_rows, self.out_features), torch.float32)
        _float_linear(
            num_panels * -(-num_rows // ROWS_PER_ITEM),
            x.data_ptr(), self.panels.data_ptr(), out.data_ptr(), 0 if bias is None else bias.data_ptr(),
            num_rows, row_stride, x.shape[1], self.out_features, torch.get_num_threads(), num_panels, self.form,
        )  # fmt: skip
        return out


def supports_floats(weight: Tensor, bias: Tensor | None) -> bool:
    """True for fp32 weights in two dimensions, on processors that widen 16-bit floats."""
    return (
        (HAS_AVX2 or HAS_AVX512)
        and weight.dtype == torch.float32
        and weight.dim() == 2
        and (bias is None or (bias.dtype == torch.float32 and bias.is_contiguous()))
    )
