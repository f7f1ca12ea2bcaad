"""The linear layer over codes and fp32 rows: a part of a panel at a time becomes floats, which stay in L1.

No weight and no input is rounded: it serves float16 checkpoints in GPTQ, AWQ and other formats, which are computed in
fp32 on a CPU. The floats of a part serve all rows.
"""

import numpy as np
import torch
from torch import Tensor

from kernels.cpu import simd
from kernels.cpu.codes import WIDTH
from kernels.cpu.linear.floats import FP32, multiply_rows
from kernels.cpu.linear.panels import store_outputs
from kernels.cpu.linear.places import place_of
from kernels.cpu.parallel import empty, next_item, parallel_kernel
from kernels.cpu.quantized.code_linear import ROWS_PER_ITEM, PackedCodes
from kernels.cpu.quantized.decoding import decode_floats
from kernels.cpu.quantized.scales import COLUMNS
from kernels.cpu.quantized.words import PAIR_WORDS
from kernels.cpu.simd import advance, splat, store

PART = 32  # pairs of inputs that are decoded at a time: 16 KiB
ZERO = np.float32(0)


@parallel_kernel("18q")
def _code_linear_f32(args):
    """Work items: see kernels/cpu/linear/places.py."""
    x, codes, tables, out = (
        simd.pointer_f32(args[2]), simd.pointer_i32(args[3]), simd.pointer_i32(args[4]), simd.pointer_f32(args[5])
    )  # fmt: skip
    bias, scales, offsets = simd.pointer_f32(args[6]), simd.pointer_f32(args[7]), simd.pointer_f32(args[8])
    num_rows, x_stride, words, out_features = args[9], args[10], args[11], args[12]
    kind, group, form, num_groups = args[13], args[14], args[15], args[16]
    num_runs, pair_words, num_panels = args[17], args[18], args[19]
    most_rows = min(ROWS_PER_ITEM, num_rows)
    scratch = np.empty((most_rows + 2 + 2 * PART) * COLUMNS, np.float32)
    sums = simd.pointer_f32(scratch.ctypes.data)
    factors = advance(sums, most_rows * COLUMNS)
    weights = simd.pointer_i32(simd.address(advance(factors, 2 * COLUMNS)))
    table = simd.pointer_i64(0)
    items, item = args[1], next_item(args)
    while item < items:
        _, panel, begin, rows = place_of(item, items, table, num_rows, num_panels, num_runs, ROWS_PER_ITEM)
        for i in range(0, rows * COLUMNS, WIDTH):
            store(sums, i, splat(ZERO))
        for k in range(0, words, PART):
            depth = min(PART, words - k)
            decode_floats(kind, advance(codes, panel * words * pair_words), pair_words, tables, group, k, depth,
                          weights, factors, scales, offsets, form, panel * num_groups * COLUMNS)  # fmt: skip
            multiply_rows(FP32, advance(x, begin * x_stride + 2 * k), x_stride, weights, 2 * depth, rows, sums, weights)
        store_outputs(sums, bias, out, out_features, rows, begin, panel * COLUMNS)
        item = next_item(args)
    simd.keep(scratch)


def code_linear_f32(x: Tensor, weight: PackedCodes, bias: Tensor | None) -> Tensor:
    """x fp32 [num_rows, in_features], whose rows may be strided -> fp32 [num_rows, out_features]. bias: fp32
    [out_features]."""
    row_stride, stride = x.stride()
    if stride != 1:
        x, row_stride = x.contiguous(), x.shape[1]
    num_rows, in_features = x.shape
    offsets, num_panels = weight.offsets, len(weight.codes)
    out = empty((num_rows, weight.out_features), torch.float32)
    _code_linear_f32(
        num_panels * -(-num_rows // ROWS_PER_ITEM),
        x.data_ptr(), weight.codes.data_ptr(), weight.tables.data_ptr(), out.data_ptr(),
        0 if bias is None else bias.data_ptr(), weight.scales.data_ptr(), 0 if offsets is None else offsets.data_ptr(),
        num_rows, row_stride, in_features // 2, weight.out_features,
        weight.kind, weight.group_size // 2, weight.form, in_features // weight.group_size,
        torch.get_num_threads(), PAIR_WORDS[weight.kind], num_panels,
    )  # fmt: skip
    return out
