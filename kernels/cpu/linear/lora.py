"""LoRA on a CPU with bf16 pairs: two kernels for all adapters of a step, over rows in the order of their adapters.

`shrink` multiplies the rows of each slot with its A, 2 rows by 8 ranks at a time, whose 16 sums stay in registers while
x and A are read along their rows: A needs no packing and no padding beyond 8 ranks. `expand` multiplies the short rows
with B, in panels of 64 outputs, and adds them to the output of the linear layer. Addresses and ranks stand in a table
by slot that the kernels read when they run, so that a recorded program (kernels/cpu/program.py) serves whatever
adapters the slots hold then. Items of slots without rows end at once.
"""

import numpy as np
import torch
import torch.nn.functional as F
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from kernels.cpu import simd
from kernels.cpu.codes import WIDTH, F32Pointer
from kernels.cpu.dots import dot, multiply, vector_at
from kernels.cpu.features import MULTIPLIES_PAIRS
from kernels.cpu.parallel import empty, jit, next_item, parallel_kernel
from kernels.cpu.simd import I32Pointer, advance, load, splat, store, sums4

RANKS = 8  # ranks of a microkernel of shrink; each adapter's rank is padded to a multiple
COLUMNS = 64  # outputs per panel
COLUMNS_PER_ITEM = 512
ROWS_PER_ITEM = 48
ROWS = 6  # rows of a microkernel of expand
ENTRY = 3  # words of a slot and part in the table: address of A, address of B, rank
ZERO = np.float32(0)
_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_F32V, _I32V = (ir.VectorType(scalar, WIDTH) for scalar in (_F32, _I32))


@intrinsic
def _shrink_two_rows(typingctx, x0, x1, a, words, out0, out1):
    """out0[:8] = x0 @ a.T and out1[:8] = x1 @ a.T; a has 8 rows of `words` pairs of bf16, a multiple of 16."""

    def codegen(context, builder, sig, args):
        x0, x1, a, words, out0, out1 = args
        totals = [
            [cgutils.alloca_once_value(builder, ir.Constant(_F32V, [0.0] * WIDTH)) for _ in range(RANKS)]
            for _ in range(2)
        ]
        with cgutils.for_range_slice(builder, ir.Constant(_I64, 0), words, ir.Constant(_I64, WIDTH)) as (k, _):
            rows = [builder.load(vector_at(builder, x, k, _I32V), align=4) for x in (x0, x1)]
            for rank in range(RANKS):
                place = builder.add(builder.mul(words, ir.Constant(_I64, rank)), k)
                column = builder.load(vector_at(builder, a, place, _I32V), align=4)
                for row, sums in zip(rows, totals, strict=True):
                    builder.store(dot(builder, builder.load(sums[rank]), row, column), sums[rank])
        for sums, out in zip(totals, (out0, out1), strict=True):
            for first in range(0, RANKS, 4):
                four = sums4(builder, *[builder.load(place) for place in sums[first : first + 4]])
                builder.store(four, vector_at(builder, out, ir.Constant(_I64, first), four.type), align=4)
        return context.get_dummy_value()

    arguments = I32Pointer, I32Pointer, I32Pointer, types.int64, F32Pointer, F32Pointer
    return types.void(*arguments), codegen


_rows1, _rows2, _rows3, _rows4, _rows5, _rows6 = (
    multiply(rows, COLUMNS // WIDTH, f"{rows} rows of a panel's columns.") for rows in range(1, ROWS + 1)
)


@jit
def _expand_rows(num_rows, x, x_stride, panel, depth, sums):
    """sums[r, :64] += x[r, :] @ panel for 1 to 6 rows."""
    if num_rows == 6:
        _rows6(x, x_stride, panel, COLUMNS, depth, sums, COLUMNS)
    elif num_rows == 5:
        _rows5(x, x_stride, panel, COLUMNS, depth, sums, COLUMNS)
    elif num_rows == 4:
        _rows4(x, x_stride, panel, COLUMNS, depth, sums, COLUMNS)
    elif num_rows == 3:
        _rows3(x, x_stride, panel, COLUMNS, depth, sums, COLUMNS)
    elif num_rows == 2:
        _rows2(x, x_stride, panel, COLUMNS, depth, sums, COLUMNS)
    else:
        _rows1(x, x_stride, panel, COLUMNS, depth, sums, COLUMNS)


@parallel_kernel("10q")
def _shrink(args):
    """Work items are (slot, part, 8 ranks, 48 rows)."""
    x, x_stride, words = simd.pointer_i32(args[2]), args[3], args[4]
    table, order, starts = simd.pointer_i64(args[5]), simd.pointer_i64(args[6]), simd.pointer_i64(args[7])
    inner, num_parts, max_rank, row_blocks = simd.pointer_f32(args[8]), args[9], args[10], args[11]
    rank_blocks = max_rank // RANKS
    item = next_item(args)
    while item < args[1]:
        row_block, rest = item % row_blocks, item // row_blocks
        rank, part = rest % rank_blocks * RANKS, rest // rank_blocks % num_parts
        slot = rest // rank_blocks // num_parts
        entry = (slot * num_parts + part) * ENTRY
        first = starts[slot] + row_block * ROWS_PER_ITEM
        end = min(starts[slot + 1], first + ROWS_PER_ITEM)
        if first < end and rank < table[entry + 2]:
            a = simd.pointer_i32(table[entry] + rank * words * 4)
            for i in range(first, end, 2):
                j = min(i + 1, end - 1)
                _shrink_two_rows(
                    advance(x, order[i] * x_stride), advance(x, order[j] * x_stride), a, words,
                    advance(inner, (i * num_parts + part) * max_rank + rank),
                    advance(inner, (j * num_parts + part) * max_rank + rank),
                )  # fmt: skip
        item = next_item(args)


@parallel_kernel("10q")
def _expand(args):
    """Work items are (slot, part, 512 outputs, 48 rows)."""
    inner, table = simd.pointer_f32(args[2]), simd.pointer_i64(args[3])
    order, starts, out = simd.pointer_i64(args[4]), simd.pointer_i64(args[5]), simd.pointer_bf16(args[6])
    offsets, num_parts, max_rank = simd.pointer_i64(args[7]), args[8], args[9]
    column_blocks, row_blocks = args[10], args[11]
    out_features = offsets[num_parts]
    rounded = np.empty(ROWS_PER_ITEM * max_rank, np.uint16)
    scratch = np.empty(ROWS * COLUMNS, np.float32)
    short, sums = simd.pointer_bf16(rounded.ctypes.data), simd.pointer_f32(scratch.ctypes.data)
    pairs = simd.pointer_i32(rounded.ctypes.data)
    item = next_item(args)
    while item < args[1]:
        row_block, rest = item % row_blocks, item // row_blocks
        begin, part = rest % column_blocks * COLUMNS_PER_ITEM, rest // column_blocks % num_parts
        slot = rest // column_blocks // num_parts
        entry = (slot * num_parts + part) * ENTRY
        rank, width = table[entry + 2], offsets[part + 1] - offsets[part]
        first = starts[slot] + row_block * ROWS_PER_ITEM
        end = min(starts[slot + 1], first + ROWS_PER_ITEM)
        if first < end and rank > 0 and begin < width:
            for i in range(first, end):
                for r in range(0, rank, WIDTH):
                    store(short, (i - first) * max_rank + r, load(inner, (i * num_parts + part) * max_rank + r))
            for column in range(begin, min(begin + COLUMNS_PER_ITEM, width), COLUMNS):
                panel = simd.pointer_i32(table[entry + 1] + column * rank // 2 * 4)
                for i in range(first, end, ROWS):
                    count = min(ROWS, end - i)
                    for c in range(0, count * COLUMNS, WIDTH):
                        store(sums, c, splat(ZERO))
                    _expand_rows(
                        count, advance(pairs, (i - first) * max_rank // 2), max_rank // 2, panel, rank // 2, sums
                    )
                    for r in range(count):
                        at = order[i + r] * out_features + offsets[part] + column
                        for c in range(0, min(COLUMNS, width - column), WIDTH):
                            store(out, at + c, simd.add(load(out, at + c), load(sums, r * COLUMNS + c)))
        item = next_item(args)
    simd.keep(rounded)
    simd.keep(scratch)


def supports_lora(in_features: int, parts: tuple[int, ...], dtype: torch.dtype) -> bool:
    """True for bf16, in_features in 32s and parts of the output in 16s."""
    whole = in_features % (2 * WIDTH) == 0 and all(rows % WIDTH == 0 for rows in parts)
    return MULTIPLIES_PAIRS and dtype == torch.bfloat16 and whole


def pack_a(a: Tensor) -> Tensor:
    """A, bf16 [rank, in_features], with zeros up to a multiple of 8 ranks."""
    return F.pad(a, (0, 0, 0, -len(a) % RANKS)).contiguous()


def pack_b(b: Tensor) -> Tensor:
    """B, bf16 [rows, rank] -> int32 [panels, rank / 2, 64] with the rank of pack_a, zeros behind the last row."""
    b = F.pad(b, (0, -b.shape[1] % RANKS, 0, -len(b) % COLUMNS)).contiguous()
    return b.view(torch.int32).view(-1, COLUMNS, b.shape[1] // 2).transpose(1, 2).contiguous()


def add_lora(
    out: Tensor, x: Tensor, table: Tensor, order: Tensor, starts: Tensor, offsets: Tensor, widest: int, max_rank: int
) -> None:
    """out[order[i]] += x[order[i]] @ A.T @ B.T for the rows i from starts[slot] to starts[slot + 1] of each slot.

    x bf16 [num_rows, in_features], rows may be strided; out bf16 [num_rows, out_features], contiguous. table int64
    [slots, parts, 3]: the addresses of pack_a and pack_b and the padded rank, at most max_rank (in 16s), 0 for none.
    order int64, starts int64 [slots + 1]. offsets int64 [parts + 1]: the first row of each part of the output; widest:
    rows of the largest part.
    """
    num_slots, num_parts, _ = table.shape
    num_rows = len(x)
    inner = empty((num_rows, num_parts, max_rank), torch.float32)  # the products with A
    row_stride, stride = x.stride()
    if stride != 1 or row_stride % 2:
        x, row_stride = x.contiguous(), x.shape[1]
    row_blocks = -(-num_rows // ROWS_PER_ITEM)
    tables = table.data_ptr(), order.data_ptr(), starts.data_ptr()
    _shrink(
        num_slots * num_parts * (max_rank // RANKS) * row_blocks,
        x.data_ptr(), row_stride // 2, x.shape[1] // 2, *tables, inner.data_ptr(), num_parts, max_rank, row_blocks,
    )  # fmt: skip
    column_blocks = -(-widest // COLUMNS_PER_ITEM)
    _expand(
        num_slots * num_parts * column_blocks * row_blocks,
        inner.data_ptr(), *tables, out.data_ptr(), offsets.data_ptr(), num_parts, max_rank, column_blocks, row_blocks,
    )  # fmt: skip
