"""The linear layer over codes of a CPU that multiplies bf16 pairs; codes are read packed, see words.py.

Sums of a group are fp32 and stay in registers; the group's scale multiplies the sum, and its offset the sum of the
group's inputs, so no weight is rounded. Few rows look the codes up as they read them. More rows share the pairs of a
part of a group, which stay in L1, where looking up takes long; the order of additions is the same, and so are the bits.
With many rows, each panel is decoded to rounded bf16 weights first: their sums need no scales. AMX multiplies those.
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
from kernels.cpu.dots import add_products, broadcast, by_rows, multiply, vector_at
from kernels.cpu.features import HAS_AVX512, HAS_BF16_DOT, HAS_BF16_TILES, MULTIPLIES_PAIRS
from kernels.cpu.linear.panels import TILE_DEPTH, store_outputs
from kernels.cpu.linear.places import RowGroups, count_items, give_out_rest, place_of
from kernels.cpu.parallel import empty, jit, next_item, parallel_kernel
from kernels.cpu.quantized.code_rows import code_rows, sum_groups
from kernels.cpu.quantized.decoding import decode_pairs
from kernels.cpu.quantized.integer_linear import ROUNDED_APART, ROWS_PER_ITEM, integer_linear, round_rows
from kernels.cpu.quantized.scales import COLUMNS, load_by_form, pack_scales
from kernels.cpu.quantized.w8a8 import w8a8_linear
from kernels.cpu.quantized.words import (
    FP8,
    INT4,
    INT6,
    INT8,
    INTEGERS,
    KINDS,
    PAIR_WORDS,
    SPLIT4,
    TABLES,
    VECTORS,
    W8A8,
    WORDS,
    kind_of,
    load_pairs,
    load_tables,
    meanings_of,
    pack_codes,
    prefetch_pair,
    supports_w8a8,
    tables_of,
    word_decoder,
)
from kernels.cpu.simd import I32Pointer, advance, splat, store
from kernels.cpu.widened_dots import column_blocks, fma, widen_pairs
from kernels.quantized.weight import QuantizedWeight

ROWS = 6  # rows of a microkernel: 24 sums in 32 registers
# By kind of codes. MOST_DIRECT: rows that look codes up as they read them, where registers hold their sums, the tables
# and a line. DECODED_FROM: rows from which panels are decoded first, because that takes less time.
NEVER = 1 << 62
if HAS_BF16_TILES:
    MOST_DIRECT, DECODED_FROM = (6, 6, 6, 6, 5, 5), (0, 4, 4, 5, 3, 5)
elif HAS_BF16_DOT:
    MOST_DIRECT, DECODED_FROM = (6, 6, 6, 6, 5, 5), (0, 24, 32, 64, 9, 16)
elif HAS_AVX512:
    MOST_DIRECT, DECODED_FROM = (6, 4, 4, 4, 4, 4), (0, NEVER, NEVER, 12, 16, NEVER)
else:
    MOST_DIRECT, DECODED_FROM = (6, 4, 4, 4, 4, 4), (0, NEVER, NEVER, 5, 4, 24)
FEW_ROWS = 4  # as MOST_DIRECT, where a panel is read again from L2: reading is no longer the limit
PART = 64  # pairs of inputs that rows share, at most: 16 KiB, half of L1
LEAST_PART = 8
DEPTH = 512  # pairs of inputs that are decoded at a time: 128 KiB, which stay in L2
ZERO = np.float32(0)

_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_F32V, _I32V = ir.VectorType(_F32, WIDTH), ir.VectorType(_I32, WIDTH)


def _load_input(builder, row, x_stride, index):
    """A pair of a row's inputs in all lanes, as a factor of `dot`."""
    if HAS_BF16_DOT:
        return broadcast(builder, builder.load(builder.gep(row, [index])))
    row, odd = builder.bitcast(row, _F32.as_pointer()), builder.lshr(x_stride, ir.Constant(_I64, 1))
    return tuple(broadcast(builder, builder.load(builder.gep(row, [i]))) for i in (index, builder.add(index, odd)))


def _multiply(rows, kind):
    """An intrinsic: sums[r, :] += x[r, :] @ panel for `rows` rows and 64 outputs.

    Each of `groups` groups has `parts` parts of `depth` pairs of inputs; the sum of a part is multiplied by the group's
    scale. Then the group's offset times x_sums[r, group] is added, if `offsets` is not null. `first`: index of the
    panel's first scale; scales and offsets have the same form.
    """

    def add_pair(builder, x, x_stride, codes, index, table, totals, block):
        if kind != WORDS and block[0] == 0:
            prefetch_pair(builder, kind, codes, index)
        inputs = [_load_input(builder, builder.gep(x, [builder.mul(x_stride, ir.Constant(_I64, r))]), x_stride, index)
                  for r in range(rows)]  # fmt: skip
        for v, factors in enumerate(load_pairs(builder, kind, codes, index, table)):
            for factor in factors if v in block else ():
                add_products(builder, [totals[r, v] for r in range(rows)], inputs, factor)

    def add_product(builder, sums, cell, a, b):
        place = vector_at(builder, sums, ir.Constant(_I64, cell[0] * COLUMNS + cell[1] * WIDTH), _F32V)
        builder.store(fma(builder, a, b, builder.load(place, align=4)), place, align=4)

    def codegen(context, builder, sig, args):
        for block in column_blocks(rows, VECTORS, 1):
            add_block(builder, block, *args)
        return context.get_dummy_value()

    def add_block(builder, block, x, x_stride, codes, depth, parts, groups, tables, scales, offsets, form, first,
                  x_sums, sums_stride, sums):  # fmt: skip
        cells = [(r, v) for r in range(rows) for v in block]
        table = load_tables(builder, tables, kind)
        totals = {cell: cgutils.alloca_once(builder, _F32V) for cell in cells}
        has_offsets = builder.icmp_unsigned("!=", builder.ptrtoint(offsets, _I64), ir.Constant(_I64, 0))
        with cgutils.for_range(builder, groups) as group:
            place = builder.add(first, builder.mul(group.index, ir.Constant(_I64, COLUMNS)))
            with cgutils.for_range(builder, parts) as part:
                for total in totals.values():
                    builder.store(ir.Constant(_F32V, [0.0] * WIDTH), total)
                begin = builder.mul(builder.add(builder.mul(group.index, parts), part.index), depth)
                with cgutils.for_range(builder, depth) as loop:
                    add_pair(builder, x, x_stride, codes, builder.add(begin, loop.index), table, totals, block)
                factors = load_by_form(builder, scales, form, place, block)
                for cell in cells:
                    add_product(builder, sums, cell, builder.load(totals[cell]), factors[cell[1]])
            with builder.if_then(has_offsets):
                terms = load_by_form(builder, offsets, form, place, block)
                for r in range(rows):
                    index = builder.add(builder.mul(sums_stride, ir.Constant(_I64, r)), group.index)
                    x_sum = broadcast(builder, builder.load(builder.gep(x_sums, [index])))
                    for v in block:
                        add_product(builder, sums, (r, v), x_sum, terms[v])

    i64 = types.int64
    arguments = (
        I32Pointer, i64, I32Pointer, i64, i64, i64, I32Pointer, F32Pointer, F32Pointer, i64, i64, F32Pointer, i64,
        F32Pointer,
    )  # fmt: skip

    def typing(typingctx, x, x_stride, codes, depth, parts, groups, tables, scales, offsets, form, first, x_sums,
               sums_stride, sums):  # fmt: skip
        return types.void(*arguments), codegen

    typing.__doc__ = f"Products of {rows} rows with codes."
    return intrinsic(typing)


def _microkernel(kind):
    """Products of one to six rows with codes, or to fewer; none where integer_linear.py multiplies them."""
    return by_rows([_multiply(rows, kind) for rows in range(1, MOST_DIRECT[kind] + 1) if kind not in INTEGERS])


_multiply_words, _multiply4, _multiply8, _multiply_fp8, _multiply_split4, _multiply6 = map(_microkernel, KINDS)
_words8, _words_fp8, _words6 = (word_decoder(kind) for kind in (INT8, FP8, INT6))
_rows6, _rows5, _rows4, _rows3, _rows2, _rows1 = (
    multiply(rows, VECTORS, f"{rows} rows of a decoded panel's columns.") for rows in (6, 5, 4, 3, 2, 1)
)


@jit
def _multiply_direct(kind, num_rows, *args):
    """See _multiply: up to six rows, which look up codes as they read them."""
    if kind == INT4:
        _multiply4(num_rows, *args)
    elif kind == INT6:
        _multiply6(num_rows, *args)
    elif kind == SPLIT4:
        _multiply_split4(num_rows, *args)
    elif kind == INT8:
        _multiply8(num_rows, *args)
    else:
        _multiply_fp8(num_rows, *args)


@jit
def _look_up(kind, codes, depth, tables, words):
    """words[k, :] = bf16 pairs of `depth` pairs of inputs."""
    if kind == INT6:
        _words6(codes, depth, tables, words)
    elif kind == INT8:
        _words8(codes, depth, tables, words)
    else:
        _words_fp8(codes, depth, tables, words)


@jit
def _multiply_shared(num_rows, x, x_stride, words, depth, groups, scales, offsets, form, first, x_sums,
                     sums_stride, sums):  # fmt: skip
    """See _multiply: six or more rows, which share looked up pairs, in blocks of up to six of nearly equal size."""
    blocks, row = (num_rows + ROWS - 1) // ROWS, 0
    for block in range(blocks):
        count = (num_rows - row + blocks - block - 1) // (blocks - block)
        a, at, out = advance(x, row * x_stride), advance(x_sums, row * sums_stride), advance(sums, row * COLUMNS)
        _multiply_words(count, a, x_stride, words, depth, 1, groups, words, scales, offsets, form, first, at,
                        sums_stride, out)  # fmt: skip
        row += count


@jit
def _multiply_codes(kind, num_rows, x, x_stride, codes, pair_words, depth, parts, groups, tables, words, scales,
                    offsets, form, first, x_sums, sums):  # fmt: skip
    """See _multiply: any number of rows, with `groups` sums of each in x_sums. words: room for PART pairs or a part."""
    together = num_rows <= MOST_DIRECT[kind]
    if together or kind == INT4 or kind == SPLIT4:
        most = num_rows if together else FEW_ROWS
        blocks, row = (num_rows + most - 1) // most, 0
        for block in range(blocks):
            count = (num_rows - row + blocks - block - 1) // (blocks - block)
            _multiply_direct(kind, count, advance(x, row * x_stride), x_stride, codes, depth, parts, groups, tables,
                             scales, offsets, form, first, advance(x_sums, row * groups), groups,
                             advance(sums, row * COLUMNS))  # fmt: skip
            row += count
        return
    span = max(1, PART // (depth * parts))
    for group in range(0, groups, span):
        count = min(span, groups - group)
        for part in range(parts):
            k = (group * parts + part) * depth
            terms = offsets if part == parts - 1 else simd.pointer_f32(0)  # once in a group
            _look_up(kind, advance(codes, k * pair_words), count * depth, tables, words)
            _multiply_shared(num_rows, advance(x, k), x_stride, words, depth, count, scales, terms, form,
                             first + group * COLUMNS, advance(x_sums, group), groups, sums)  # fmt: skip


@jit
def _multiply_decoded(x, x_stride, weights, depth, num_rows, sums):
    row = 0
    while row < num_rows:
        a, out, left = advance(x, row * x_stride), advance(sums, row * COLUMNS), num_rows - row
        if left >= 6:
            _rows6(a, x_stride, weights, COLUMNS, depth, out, COLUMNS)
        elif left == 5:
            _rows5(a, x_stride, weights, COLUMNS, depth, out, COLUMNS)
        elif left == 4:
            _rows4(a, x_stride, weights, COLUMNS, depth, out, COLUMNS)
        elif left == 3:
            _rows3(a, x_stride, weights, COLUMNS, depth, out, COLUMNS)
        elif left == 2:
            _rows2(a, x_stride, weights, COLUMNS, depth, out, COLUMNS)
        else:
            _rows1(a, x_stride, weights, COLUMNS, depth, out, COLUMNS)
        row += min(left, 6)


@parallel_kernel("21q")
def _code_linear(args):
    """Work items: see kernels/cpu/linear/places.py."""
    x, codes, tables, out, bias = (
        simd.pointer_i32(args[2]), simd.pointer_i32(args[3]), simd.pointer_i32(args[4]), simd.pointer_bf16(args[5]),
        simd.pointer_bf16(args[6]),
    )  # fmt: skip
    scales, offsets, num_rows, x_stride = simd.pointer_f32(args[7]), simd.pointer_f32(args[8]), args[9], args[10]
    words, out_features, kind, group, form, num_groups = args[11], args[12], args[13], args[14], args[15], args[16]
    decoded_from, num_runs, part, pair_words = args[17], args[18], args[19], args[20]
    num_panels, table = args[21], simd.pointer_i64(args[22])
    may_decode, is_grouped = num_rows >= decoded_from, simd.address(table) != 0
    has_offsets = simd.address(offsets) != 0
    most_rows = min(ROWS_PER_ITEM, num_rows)
    floats = np.empty((most_rows + 2) * COLUMNS + WIDTH, np.float32)
    sums = simd.pointer_f32((floats.ctypes.data + 63) // 64 * 64)
    factors = advance(sums, most_rows * COLUMNS)
    scratch = np.empty(COLUMNS * max(DEPTH if may_decode else PART, part) + WIDTH, np.int32)
    weights = simd.pointer_i32((scratch.ctypes.data + 63) // 64 * 64)
    totals = np.empty(most_rows * num_groups if has_offsets else 1, np.float32)
    x_sums, prepared = simd.pointer_f32(totals.ctypes.data), np.int64(-1)  # x_sums has those of rows `prepared` on
    in_tiles, tiles = amx.multiplies(words), np.zeros(amx.STATE, np.int64)
    most, state = TILE_DEPTH if in_tiles else DEPTH, simd.pointer_i64(tiles.ctypes.data)
    widens = not HAS_BF16_DOT and (is_grouped or not may_decode)
    floats_of_x = np.empty(2 * words * most_rows if widens else 1, np.float32)
    wide_x = simd.pointer_f32(floats_of_x.ctypes.data)
    items = count_items(args[1], table, num_panels)
    item = next_item(args)
    while item < items:
        matrix, place, begin, rows = place_of(item, items, table, num_rows, num_panels, num_runs, ROWS_PER_ITEM)
        panel, column, terms = matrix * num_panels + place, place * COLUMNS, bias
        if simd.address(bias) != 0:
            terms = advance(bias, matrix * out_features)
        at, a = panel * num_groups * COLUMNS, advance(x, begin * x_stride)
        panel_codes = advance(codes, panel * words * pair_words)
        for i in range(0, rows * COLUMNS, WIDTH):
            store(sums, i, splat(ZERO))
        if may_decode and (rows >= decoded_from or not is_grouped):
            for k in range(0, words, most):
                depth = min(most, words - k)
                decode_pairs(kind, panel_codes, pair_words, tables, group, k, depth, weights, factors, scales, offsets,
                             form, at)  # fmt: skip
                if in_tiles:
                    amx.multiply_panel(state, advance(a, k), x_stride, weights, depth, rows, sums, weights, 0, k > 0)
                else:
                    _multiply_decoded(advance(a, k), x_stride, weights, depth, rows, sums)
        else:
            if prepared != begin:
                numbers = simd.pointer_bf16(simd.address(a))
                if has_offsets:
                    sum_groups(numbers, 2 * x_stride, 2 * group, num_groups, rows, x_sums)
                if widens:
                    widen_pairs(numbers, x_stride, words, rows, wide_x)
                prepared = begin
            inputs, stride = a, x_stride
            if widens:
                inputs, stride = simd.pointer_i32(simd.address(wide_x)), 2 * words
            _multiply_codes(kind, rows, inputs, stride, panel_codes, pair_words, part, group // part, num_groups,
                            tables, weights, scales, offsets, form, at, x_sums, sums)  # fmt: skip
        store_outputs(sums, terms, out, out_features, rows, begin, column)
        item = next_item(args)
    give_out_rest(args)
    if in_tiles:
        amx.release()
    simd.keep(tiles)
    simd.keep(floats)
    simd.keep(scratch)
    simd.keep(totals)
    simd.keep(floats_of_x)


def _part_of(group: int) -> int:
    """The pairs of a part of a group of so many pairs: all parts are equal, and the looked up pairs of one stay in L1
    where its size has a divisor for that."""
    part = next(size for size in range(min(group, PART), 0, -1) if group % size == 0)
    return group if part < LEAST_PART else part


class PackedCodes:
    """A quantised matrix in panels of 64 outputs: `code_linear` multiplies with it, `rows` reads rows back. Or those of
    experts, one below the other."""

    def __init__(self, weight: QuantizedWeight) -> None:
        """weight [out, in], or [experts, out, in] with whole panels; its `permutation` is left to the caller. See
        supports_codes."""
        matrices = [weight] if len(weight.shape) == 2 else [weight.expert(i) for i in range(weight.shape[0])]
        self.out_features, self.in_features = len(matrices) * weight.shape[-2], weight.shape[-1]
        self.group_size = weight.group_size
        self.part = _part_of(self.group_size // 2)
        self.kind = kind_of(weight)
        self.tables = tables_of(weight, self.kind)
        self.least = int(self.tables[0, 0]) if TABLES[self.kind] else 0  # the meaning of code 0 of integers
        self.codes = pack_codes(matrices, self.kind)
        self._meanings = meanings_of(self.kind, self.tables)
        parameters = [weight.scales] if weight.offsets is None else [weight.scales, weight.offsets]
        self.form, packed = pack_scales([values.reshape(-1, values.shape[-1]) for values in parameters])
        self.scales, self.offsets = packed[0], packed[1] if len(packed) > 1 else None

    @property
    def num_bytes(self) -> int:
        """Bytes in memory."""
        tensors = (self.codes, self.scales, self.offsets)
        return sum(tensor.numel() * tensor.itemsize for tensor in tensors if tensor is not None)

    def rows(self, indices: Tensor) -> Tensor:
        """Rows of the matrix: int64 [n] -> fp32 [n, in]."""
        return code_rows(
            indices, self.codes, self._meanings, self.scales, self.offsets, kind=self.kind, form=self.form,
            group_size=self.group_size,
        )  # fmt: skip


def supports_codes(weight: QuantizedWeight, dtype: torch.dtype) -> bool:
    """True for matrices with groups of an even number of inputs, for inputs in bf16; in fp32 only for one matrix of
    codes that bf16 holds exactly."""
    exact = weight.codebook is None or all(_in_bf16(value) for value in weight.codebook)
    served = dtype == torch.bfloat16 or (dtype == torch.float32 and exact and len(weight.shape) == 2)
    whole = len(weight.shape) == 2 or weight.shape[1] % COLUMNS == 0
    return MULTIPLIES_PAIRS and served and whole and weight.group_size % 2 == 0


def _in_bf16(value: float) -> bool:
    return float(torch.tensor(value).bfloat16()) == value


def code_linear(x: Tensor, weight: PackedCodes, bias: Tensor | None) -> Tensor:
    """x bf16 [num_rows, in_features], whose rows may be strided, and a bias bf16 [out_features] -> bf16 [num_rows,
    out_features]."""
    return _launch(x, weight, bias)


def supports_gated_code_linear(weight: QuantizedWeight) -> bool:
    """True for a weight [gate | up] in W8A8, with whole panels."""
    return weight.shape[0] % COLUMNS == 0 and supports_w8a8(weight)


def gated_code_linear(x: Tensor, weight: PackedCodes, bias: Tensor | None, gate: tuple[int, float, float]) -> Tensor:
    """code_linear, then kernels.elementwise.activation.gated_activation of its sums in fp32: bf16 [num_rows,
    out_features / 2]. The rows of `weight` and `bias` are those of panels.interleave, see supports_gated_code_linear;
    gate: Gate.arguments."""
    return w8a8_linear(x, weight.codes, weight.scales, weight.form, bias, weight.out_features, gate=gate)


def grouped_code_linear(x: Tensor, weights: PackedCodes, biases: Tensor | None, groups: RowGroups) -> Tensor:
    """`code_linear` of rows sorted by expert, each with its expert's matrix. weights: of all experts, one below the
    other, of whole panels each; biases bf16 [num_experts, out_features of one]."""
    return _launch(x, weights, biases, groups)


def _launch(x: Tensor, weight: PackedCodes, bias: Tensor | None, groups: RowGroups | None = None) -> Tensor:
    if weight.kind == W8A8:
        return w8a8_linear(x, weight.codes, weight.scales, weight.form, bias, weight.out_features, groups)
    row_stride, stride = x.stride()
    if stride != 1 or row_stride % 2:
        x, row_stride = x.contiguous(), x.shape[1]
    num_rows, in_features = x.shape
    num_groups, offsets = in_features // weight.group_size, weight.offsets
    num_panels, out_features = len(weight.codes), weight.out_features
    blocks, table = -(-num_rows // ROWS_PER_ITEM), 0
    if groups is not None:
        num_panels, out_features = num_panels // groups.num_experts, out_features // groups.num_experts
        blocks, table = groups.most_blocks, groups.table.data_ptr()
    out = empty((num_rows, out_features), torch.bfloat16)
    decoded_from = DECODED_FROM[weight.kind]
    rows_of_matrix = num_rows if groups is None else num_rows // groups.num_experts
    if weight.kind in INTEGERS and rows_of_matrix < decoded_from:
        rounding = in_features // 2, weight.part, num_groups, weight.least
        is_rounded = num_rows > ROUNDED_APART
        if is_rounded:
            x = round_rows(x, row_stride, *rounding)
        integer_linear(
            num_panels * blocks,
            x.data_ptr(), weight.codes.data_ptr(), out.data_ptr(), 0 if bias is None else bias.data_ptr(),
            weight.scales.data_ptr(), 0 if offsets is None else offsets.data_ptr(),
            num_rows, row_stride, out_features, weight.kind, weight.form, torch.get_num_threads(),
            PAIR_WORDS[weight.kind], num_panels, table, is_rounded, *rounding,
        )  # fmt: skip
        return out
    _code_linear(
        num_panels * blocks,
        x.data_ptr(), weight.codes.data_ptr(), weight.tables.data_ptr(), out.data_ptr(),
        0 if bias is None else bias.data_ptr(), weight.scales.data_ptr(), 0 if offsets is None else offsets.data_ptr(),
        num_rows, row_stride // 2, in_features // 2, out_features,
        weight.kind, weight.group_size // 2, weight.form, num_groups,
        0 if weight.kind in INTEGERS else decoded_from, torch.get_num_threads(), weight.part, PAIR_WORDS[weight.kind],
        num_panels, table,
    )  # fmt: skip
    return out
