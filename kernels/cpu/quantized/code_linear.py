"""The linear layer over 4-bit and 8-bit codes of a CPU that multiplies bf16 pairs; codes are read packed.

Codes lie in panels of 64 outputs. A line of 64 bytes holds the 4-bit codes of two neighbouring inputs for all outputs
of a panel. One instruction looks 32 codes up in a table of bf16 values (vpermw), and vdpbf16ps multiplies them with the
pair of inputs. Values that bf16 does not hold exactly (nf4) are the sum of two tables that share a line. int8 codes
become bf16 numbers by conversion, FP8 codes (e4m3) by integer arithmetic; 128 bytes hold two neighbouring inputs of 64
outputs. Sums of a group are fp32 and stay in registers; the group's scale multiplies the sum, and its offset the sum of
the group's inputs, so no weight is rounded. With many rows, each panel is decoded to bf16 weights first, which all rows
share.
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
from kernels.cpu.codes import WIDTH, F32Pointer, constant
from kernels.cpu.dots import LANES, broadcast, dot, lanes, look_up, multiply, vector_at
from kernels.cpu.features import HAS_BF16_DOT
from kernels.cpu.parallel import empty, in_runs, jit, next_item, parallel_kernel
from kernels.cpu.quantized.code_rows import LINE, code_rows, sum_groups
from kernels.cpu.quantized.scales import COLUMNS, FACTORED, FP16, FP32, factorize, load_scales, scales_at
from kernels.cpu.simd import I32Pointer, advance, load, splat, store
from kernels.quantized.weight import QuantizedWeight, unpack_4bit

VECTORS = COLUMNS // WIDTH
AHEAD = 48  # lines to prefetch ahead of one row, 3 KiB
DECODED_FROM = (0, 28, 48, 17, 20)  # by kind of codes: rows from which panels are decoded first
ROWS_PER_ITEM = 192
DEPTH = 512  # pairs of inputs that are decoded at a time: 128 KiB, which stay in L2
INT4, INT8, FP8, SPLIT4 = 1, 2, 3, 4  # kinds of codes; SPLIT4: 4-bit codes with two tables
LINES = (0, 1, 2, 2, 1)  # by kind: lines per pair of inputs
TABLES = (0, 1, 0, 0, 2)
ZERO = np.float32(0)

_F32, _I8, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_F32V, _I8V, _I32V = ir.VectorType(_F32, WIDTH), ir.VectorType(_I8, WIDTH), ir.VectorType(_I32, WIDTH)


def _load_lines(builder, pointer, offset, count):
    """`count` lines of codes from word `offset` on."""
    places = [builder.add(offset, ir.Constant(_I64, i * LINE)) for i in range(count)]
    return [builder.load(vector_at(builder, pointer, place, LANES), align=4) for place in places]


def _codes_of(builder, line, vector):
    """The codes of outputs 16 * vector to 16 * vector + 15, in the low four bits of each lane."""
    return builder.lshr(line, lanes(4 * vector)) if vector else line


def _halves(builder, words):
    """The even and the odd bf16 numbers of 32-bit words, as floats."""
    pair = builder.shl(words, constant(_I32, 16)), builder.and_(words, constant(_I32, -65536))
    return [builder.bitcast(half, _F32V) for half in pair]


def _values_of_fp8(builder, codes):
    """32 e4m3 codes in the low bytes of 16-bit lanes -> bf16 numbers. Normal numbers get the bias of bf16; those below
    2^-6 are looked up."""
    magnitude = builder.and_(codes, lanes(0x7F))
    normal = builder.add(builder.shl(magnitude, lanes(4)), lanes(120 << 7))
    small = look_up(builder, magnitude, ir.Constant(LANES, [_bf16_bits(i % 8 / 512) for i in range(2 * WIDTH)]))
    is_small = builder.icmp_unsigned("<", magnitude, lanes(8))
    sign = builder.shl(builder.and_(codes, lanes(0x80)), lanes(8))
    return builder.or_(builder.select(is_small, small, normal), sign)


def _values_of_int8(builder, codes, at, v, line):
    """Sixteen int8 codes as the bits of floats: bf16 holds them exactly, so the low halves are 0."""
    place = builder.add(at, ir.Constant(_I64, line * LINE + v * LINE // VECTORS))
    octets = builder.load(vector_at(builder, codes, place, _I8V), align=4)
    return builder.bitcast(builder.sitofp(builder.sext(octets, _I32V), _F32V), _I32V)


def _bf16_bits(value: float) -> int:
    """The bits of a number that bf16 holds exactly, as a signed 16-bit integer."""
    return int(torch.tensor(value, dtype=torch.bfloat16).view(torch.int16))


def _words(builder, kind, codes, at, v, lines, table):
    """bf16 pairs of 16 outputs, one vector for each factor of the inputs; `at`: word of the first line."""
    if kind == FP8:
        place = builder.add(at, ir.Constant(_I64, v * LINE // 2))
        packed = ir.VectorType(_I8, 2 * WIDTH)
        wide = builder.zext(builder.load(vector_at(builder, codes, place, packed), align=4), LANES)
        return [builder.bitcast(_values_of_fp8(builder, wide), _I32V)]
    if kind == INT8:
        even, odd = (_values_of_int8(builder, codes, at, v, line) for line in (0, 1))
        return [builder.or_(builder.lshr(even, constant(_I32, 16)), odd)]
    lines = lines * (TABLES[kind] // len(lines))
    found = [look_up(builder, _codes_of(builder, line, v), values) for line, values in zip(lines, table, strict=True)]
    return [builder.bitcast(values, _I32V) for values in found]


def _load_scales(builder, scales, form, first):
    """Scales first to first + 63, as four vectors."""
    targets = [cgutils.alloca_once(builder, _F32V) for _ in range(VECTORS)]
    with builder.if_else(builder.icmp_signed("==", form, ir.Constant(_I64, FP16))) as (is_half, other):
        with is_half:
            _store_scales(builder, scales, FP16, first, targets)
        with other, builder.if_else(builder.icmp_signed("==", form, ir.Constant(_I64, FP32))) as (single, factored):
            with single:
                _store_scales(builder, scales, FP32, first, targets)
            with factored:
                _store_scales(builder, scales, FACTORED, first, targets)
    return [builder.load(target) for target in targets]


def _store_scales(builder, scales, form, first, targets):
    for v, target in enumerate(targets):
        builder.store(scales_at(builder, scales, form, builder.add(first, ir.Constant(_I64, v * WIDTH))), target)


def _multiply(rows, kind):
    """An intrinsic: sums[r, :] += x[r, :] @ panel for `rows` rows and 64 outputs: the sum of each of `groups` groups of
    `depth` pairs of inputs, times the group's scale. `tables`: see tables_of. `at`: index of the panel's first scale.
    """
    cells = [(r, v) for r in range(rows) for v in range(VECTORS)]
    num_lines = LINES[kind]
    shared = 0 if kind in (INT8, FP8) else num_lines  # lines of which each holds codes of all outputs

    def add_pair(builder, x, x_stride, codes, index, table, totals):
        at = builder.mul(index, ir.Constant(_I64, num_lines * LINE))
        for line in range(num_lines):
            ahead = ir.Constant(_I64, (AHEAD * num_lines + line) * LINE)
            simd.prefetch(builder, builder.gep(codes, [builder.add(at, ahead)]))
        lines = _load_lines(builder, codes, at, shared)
        pairs = []
        for r in range(rows):
            place = builder.add(builder.mul(x_stride, ir.Constant(_I64, r)), index)
            pairs.append(broadcast(builder, builder.load(builder.gep(x, [place]))))
        for v in range(VECTORS):
            for words in _words(builder, kind, codes, at, v, lines, table):
                for r in range(rows):
                    builder.store(dot(builder, builder.load(totals[r, v]), pairs[r], words), totals[r, v])

    def codegen(context, builder, sig, args):
        x, x_stride, codes, depth, groups, tables, scales, form, first, sums = args
        table = _load_lines(builder, tables, ir.Constant(_I64, 0), TABLES[kind])
        totals = {cell: cgutils.alloca_once(builder, _F32V) for cell in cells}
        with cgutils.for_range(builder, groups) as group:
            for total in totals.values():
                builder.store(ir.Constant(_F32V, [0.0] * WIDTH), total)
            begin = builder.mul(group.index, depth)
            with cgutils.for_range(builder, depth) as loop:
                add_pair(builder, x, x_stride, codes, builder.add(begin, loop.index), table, totals)
            place = builder.add(first, builder.mul(group.index, ir.Constant(_I64, COLUMNS)))
            factors = _load_scales(builder, scales, form, place)
            for r, v in cells:
                target = vector_at(builder, sums, ir.Constant(_I64, r * COLUMNS + v * WIDTH), _F32V)
                scaled = builder.fmul(builder.load(totals[r, v]), factors[v], flags=("contract",))
                total = builder.fadd(builder.load(target, align=4), scaled, flags=("contract",))
                builder.store(total, target, align=4)
        return context.get_dummy_value()

    i64 = types.int64
    arguments = I32Pointer, i64, I32Pointer, i64, i64, I32Pointer, F32Pointer, i64, i64, F32Pointer

    def typing(typingctx, x, x_stride, codes, depth, groups, tables, scales, form, first, sums):
        return types.void(*arguments), codegen

    typing.__doc__ = f"Products of {rows} rows with codes."
    return intrinsic(typing)


def _microkernel(kind):
    rows1, rows2, rows3, rows4, rows5, rows6 = (_multiply(rows, kind) for rows in range(1, 7))

    @jit
    def microkernel(num_rows, x, x_stride, codes, depth, groups, tables, scales, form, first, sums):
        if num_rows == 6:
            rows6(x, x_stride, codes, depth, groups, tables, scales, form, first, sums)
        elif num_rows == 5:
            rows5(x, x_stride, codes, depth, groups, tables, scales, form, first, sums)
        elif num_rows == 4:
            rows4(x, x_stride, codes, depth, groups, tables, scales, form, first, sums)
        elif num_rows == 3:
            rows3(x, x_stride, codes, depth, groups, tables, scales, form, first, sums)
        elif num_rows == 2:
            rows2(x, x_stride, codes, depth, groups, tables, scales, form, first, sums)
        else:
            rows1(x, x_stride, codes, depth, groups, tables, scales, form, first, sums)

    return microkernel


_multiply4, _multiply8, _multiply_fp8, _multiply_split4 = (_microkernel(kind) for kind in (INT4, INT8, FP8, SPLIT4))
_rows6, _rows5, _rows4, _rows3, _rows2, _rows1 = (
    multiply(rows, VECTORS, f"{rows} rows of a decoded panel's columns.") for rows in (6, 5, 4, 3, 2, 1)
)


def _decode(kind):
    """An intrinsic: weights[k, :] = bf16 pairs of scale * meaning + offset, for the 64 outputs of a panel."""
    shared = 0 if kind in (INT8, FP8) else LINES[kind]

    def decoded(builder, parts, factor, term):
        meanings = parts[0] if len(parts) == 1 else [builder.fadd(*both) for both in zip(*parts, strict=True)]
        fused = ("contract",)
        even, odd = (
            builder.bitcast(builder.fadd(builder.fmul(value, factor, flags=fused), term, flags=fused), _I32V)
            for value in meanings
        )
        half = constant(_I32, 0x8000)  # rounds to nearest, ties away from zero
        low = builder.lshr(builder.add(even, half), constant(_I32, 16))
        return builder.or_(low, builder.and_(builder.add(odd, half), constant(_I32, -65536)))

    def codegen(context, builder, sig, args):
        codes, depth, tables, weights, *parameters = args
        table = _load_lines(builder, tables, ir.Constant(_I64, 0), TABLES[kind])
        places = [ir.Constant(_I64, v * WIDTH) for v in range(VECTORS)]
        factors, terms = (
            [builder.load(vector_at(builder, pointer, place, _F32V), align=4) for place in places]
            for pointer in parameters
        )
        with cgutils.for_range(builder, depth) as loop:
            at = builder.mul(loop.index, ir.Constant(_I64, LINES[kind] * LINE))
            for line in range(LINES[kind]):
                ahead = ir.Constant(_I64, (AHEAD * LINES[kind] + line) * LINE)
                simd.prefetch(builder, builder.gep(codes, [builder.add(at, ahead)]))
            lines = _load_lines(builder, codes, at, shared)
            for v, place in enumerate(places):
                parts = [_halves(builder, words) for words in _words(builder, kind, codes, at, v, lines, table)]
                index = builder.add(builder.mul(loop.index, ir.Constant(_I64, COLUMNS)), place)
                target = vector_at(builder, weights, index, _I32V)
                builder.store(decoded(builder, parts, factors[v], terms[v]), target, align=4)
        return context.get_dummy_value()

    arguments = I32Pointer, types.int64, I32Pointer, I32Pointer, F32Pointer, F32Pointer

    def typing(typingctx, codes, depth, tables, weights, scale, offset):
        return types.void(*arguments), codegen

    typing.__doc__ = "Decode the codes of a group for 64 outputs."
    return intrinsic(typing)


_decode4, _decode8, _decode_fp8, _decode_split4 = (_decode(kind) for kind in (INT4, INT8, FP8, SPLIT4))


@jit
def _add_offsets(num_rows, sums, offsets, form, at, x_sums, num_groups):
    """sums += offset * sum of the group's inputs, for each group. `at`: index of the panel's first offset."""
    for g in range(num_groups):
        for c in range(0, COLUMNS, WIDTH):
            offset = load_scales(offsets, form, at + g * COLUMNS + c)
            for r in range(num_rows):
                x_sum = splat(simd.read(x_sums, r * num_groups + g))
                store(sums, r * COLUMNS + c, simd.fma(offset, x_sum, load(sums, r * COLUMNS + c)))


@jit
def _multiply_direct(kind, x, x_stride, codes, tables, group, num_rows, sums, scales, form, at, num_groups):
    """sums[r, :] += x[r, :] @ panel without its offsets, in groups of up to six rows of nearly equal size."""
    blocks, row = (num_rows + 5) // 6, 0
    for block in range(blocks):
        count = (num_rows - row + blocks - block - 1) // (blocks - block)
        part, out = advance(x, row * x_stride), advance(sums, row * COLUMNS)
        if kind == INT4:
            _multiply4(count, part, x_stride, codes, group, num_groups, tables, scales, form, at, out)
        elif kind == SPLIT4:
            _multiply_split4(count, part, x_stride, codes, group, num_groups, tables, scales, form, at, out)
        elif kind == INT8:
            _multiply8(count, part, x_stride, codes, group, num_groups, tables, scales, form, at, out)
        else:
            _multiply_fp8(count, part, x_stride, codes, group, num_groups, tables, scales, form, at, out)
        row += count


@jit
def _decode_part(kind, codes, tables, group, first, depth, weights, factors, scales, offsets, form, at):
    """Pairs `first` to first + depth of a panel as bf16 weights; `factors`: room for the scales of a group."""
    terms = advance(factors, COLUMNS)
    k = first
    while k < first + depth:
        g = k // group
        count = min((g + 1) * group, first + depth) - k
        for c in range(0, COLUMNS, WIDTH):
            store(factors, c, load_scales(scales, form, at + g * COLUMNS + c))
            if simd.address(offsets) != 0:
                store(terms, c, load_scales(offsets, form, at + g * COLUMNS + c))
            else:
                store(terms, c, splat(ZERO))
        target = advance(weights, (k - first) * COLUMNS)
        if kind == INT4:
            _decode4(advance(codes, k * LINE), count, tables, target, factors, terms)
        elif kind == SPLIT4:
            _decode_split4(advance(codes, k * LINE), count, tables, target, factors, terms)
        elif kind == INT8:
            _decode8(advance(codes, 2 * k * LINE), count, tables, target, factors, terms)
        else:
            _decode_fp8(advance(codes, 2 * k * LINE), count, tables, target, factors, terms)
        k += count


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


@parallel_kernel("19q")
def _code_linear(args):
    """Work items are (panel, rows), so that consecutive items read the same panel."""
    x, codes, tables, out, bias = (
        simd.pointer_i32(args[2]), simd.pointer_i32(args[3]), simd.pointer_i32(args[4]), simd.pointer_bf16(args[5]),
        simd.pointer_bf16(args[6]),
    )  # fmt: skip
    scales, offsets, x_sums = simd.pointer_f32(args[7]), simd.pointer_f32(args[8]), simd.pointer_f32(args[9])
    num_rows, x_stride, words, out_features = args[10], args[11], args[12], args[13]
    kind, group, form, num_groups = args[14], args[15], args[16], args[17]
    decodes, wide, num_runs = args[18], simd.pointer_f32(args[19]), args[20]
    floats = np.empty((ROWS_PER_ITEM + 8) * COLUMNS, np.float32)
    sums = simd.pointer_f32(floats.ctypes.data)
    products = advance(sums, ROWS_PER_ITEM * COLUMNS)
    scratch = np.empty(DEPTH * COLUMNS if decodes else 1, np.int32)
    weights = simd.pointer_i32(scratch.ctypes.data)
    panel_words = words * LINE if kind == INT4 or kind == SPLIT4 else 2 * words * LINE
    items_per_panel = (num_rows + ROWS_PER_ITEM - 1) // ROWS_PER_ITEM
    item = next_item(args)
    while item < args[1]:
        panel = in_runs(item // items_per_panel, args[1] // items_per_panel, num_runs)
        begin = item % items_per_panel * ROWS_PER_ITEM
        rows, column = min(ROWS_PER_ITEM, num_rows - begin), panel * COLUMNS
        at = panel * num_groups * COLUMNS
        part = advance(codes, panel * panel_words)
        for i in range(0, rows * COLUMNS, WIDTH):
            store(sums, i, splat(ZERO))
        if decodes:
            for k in range(0, words, DEPTH):
                depth = min(DEPTH, words - k)
                _decode_part(kind, part, tables, group, k, depth, weights, products, scales, offsets, form, at)
                _multiply_decoded(advance(x, begin * x_stride + k), x_stride, weights, depth, rows, sums)
        else:
            _multiply_direct(kind, advance(x, begin * x_stride), x_stride, part, tables, group, rows, sums, scales,
                             form, at, num_groups)  # fmt: skip
            if simd.address(offsets) != 0:
                _add_offsets(rows, sums, offsets, form, at, advance(x_sums, begin * num_groups), num_groups)
        for c in range(0, min(COLUMNS, out_features - column), WIDTH):
            term = load(bias, column + c) if simd.address(bias) != 0 else splat(ZERO)
            for r in range(rows):
                value, place = load(sums, r * COLUMNS + c), (begin + r) * out_features + column + c
                if simd.address(wide) != 0:
                    store(wide, place, value)
                else:
                    store(out, place, simd.add(value, term))
        item = next_item(args)
    simd.keep(floats)
    simd.keep(scratch)


class PackedCodes:
    """A quantised matrix in panels of 64 outputs: `code_linear` multiplies with it, `rows` reads rows back."""

    def __init__(self, weight: QuantizedWeight) -> None:
        """weight [out, in]; its `permutation` is left to the caller. See supports_codes."""
        self.out_features, self.in_features = weight.shape
        self.group_size = weight.group_size
        self.kind, planes, tables = _planes(weight)
        self.codes = _pack_bytes(planes[0], self.kind) if self.kind in (INT8, FP8) else _pack_nibbles(planes)
        self.tables = torch.tensor([values * 2 for values in tables], dtype=torch.bfloat16)
        self.values = _values_of(self.kind) if self.kind in (INT8, FP8) else self.tables[:, :WIDTH].float().contiguous()
        parameters = [weight.scales] if weight.offsets is None else [weight.scales, weight.offsets]
        self.form, packed = _store(parameters)
        self.scales, self.offsets = packed[0], packed[1] if len(packed) > 1 else None

    @property
    def num_bytes(self) -> int:
        """Bytes in memory."""
        tensors = (self.codes, self.scales, self.offsets)
        return sum(tensor.numel() * tensor.itemsize for tensor in tensors if tensor is not None)

    def rows(self, indices: Tensor) -> Tensor:
        """Rows of the matrix: int64 [n] -> fp32 [n, in]."""
        planes = 0 if self.kind in (INT8, FP8) else self.codes.shape[2]
        steps = (1, COLUMNS) if self.kind == INT8 else (2, 1)
        return code_rows(
            indices, self.codes, self.values, self.scales, self.offsets, form=self.form, group_size=self.group_size,
            planes=planes, steps=steps,
        )  # fmt: skip


def supports_codes(weight: QuantizedWeight, dtype: torch.dtype) -> bool:
    """True for a matrix with groups of an even number of inputs, on CPUs with vdpbf16ps, for inputs in bf16; in fp32
    only for codes that bf16 holds exactly."""
    exact = weight.codebook is None or all(_in_bf16(value) for value in weight.codebook)
    served = dtype == torch.bfloat16 or (dtype == torch.float32 and exact)
    return HAS_BF16_DOT and served and len(weight.shape) == 2 and weight.group_size % 2 == 0


def _in_bf16(value: float) -> bool:
    return float(torch.tensor(value).bfloat16()) == value


def pad_bias(bias: Tensor | None) -> Tensor | None:
    """A bias bf16 [out] as code_linear reads it: in whole vectors."""
    return None if bias is None else F.pad(bias, (0, -len(bias) % WIDTH))


def _planes(weight: QuantizedWeight) -> tuple[int, list[Tensor], list[tuple[float, ...]]]:
    """(kind of codes, uint8 [out, in] of each plane, sixteen values of each table)."""
    if weight.codes.dtype == torch.float8_e4m3fn:
        return FP8, [weight.codes.view(torch.uint8)], []
    if weight.codebook is None:
        return INT8, [weight.codes.view(torch.uint8)], []
    values = torch.tensor(weight.codebook)
    rounded = values.bfloat16().float()
    codes, first = unpack_4bit(weight.codes), tuple(rounded.tolist())
    if torch.equal(values, rounded):
        return INT4, [codes], [first]
    return SPLIT4, [codes], [first, tuple((values - rounded).tolist())]


def _values_of(kind: int) -> Tensor:
    """The meaning of each byte: fp32 [1, 256]."""
    octets = torch.arange(256, dtype=torch.uint8)
    return octets.view(torch.int8 if kind == INT8 else torch.float8_e4m3fn).float().unsqueeze(0)


def _pack_nibbles(planes: list[Tensor]) -> Tensor:
    """Codes 0 to 15 of one or two planes, uint8 [out, in] each -> int16 [panels, in / 2, planes, 32].

    Lane 2 * o + i of a line holds input i of the pair for outputs o, 16 + o, 32 + o and 48 + o, from its lowest bits
    on.
    """
    lines = []
    for plane in planes:
        codes = _padded(plane).view(-1, VECTORS, WIDTH, plane.shape[1] // 2, 2)
        line = sum(codes[:, v].short() << 4 * v for v in range(VECTORS))  # [panels, 16, in / 2, 2]
        lines.append(line.transpose(1, 2).flatten(2))
    return torch.stack(lines, 2).contiguous()


def _pack_bytes(codes: Tensor, kind: int) -> Tensor:
    """8-bit codes, uint8 [out, in] -> uint8 [panels, in / 2, 64, 2]; int8 [panels, in / 2, 2, 64]."""
    order = (0, 2, 3, 1) if kind == INT8 else (0, 2, 1, 3)
    return _padded(codes).view(-1, COLUMNS, codes.shape[1] // 2, 2).permute(order).contiguous()


def _store(parameters: list[Tensor]) -> tuple[int, list[Tensor]]:
    """(form, scales or offsets [out, groups] in it): the smallest form that holds all of them exactly."""
    wide = [_pack_parameters(values.float()) for values in parameters]
    if all(torch.equal(values.half().float(), values) for values in wide):
        return FP16, [values.half() for values in wide]
    blocks = [factorize(values) for values in wide]
    return (FACTORED, blocks) if all(values is not None for values in blocks) else (FP32, wide)


def _pack_parameters(values: Tensor) -> Tensor:
    """Scales or offsets [out, groups] -> [panels, groups, 64]."""
    return _padded(values).view(-1, COLUMNS, values.shape[1]).transpose(1, 2).contiguous()


def _padded(rows: Tensor) -> Tensor:
    return F.pad(rows, (0, 0, 0, -len(rows) % COLUMNS))


def code_linear(x: Tensor, weight: PackedCodes, bias: Tensor | None) -> Tensor:
    """x bf16 [num_rows, in_features], whose rows may be strided -> bf16 [num_rows, out_features]. bias: of pad_bias."""
    return _launch(x, weight, bias, torch.bfloat16, len(x) >= DECODED_FROM[weight.kind])


def code_linear_f32(x: Tensor, weight: PackedCodes, bias: Tensor | None) -> Tensor:
    """x fp32 [num_rows, in_features] -> fp32 [num_rows, out_features]. bias: fp32 [out_features].

    A number of x is the sum of three of bf16, whose products with codes are exact; each row is multiplied as three.
    """
    high = x.bfloat16()
    rest = x - high
    middle = rest.bfloat16()
    rows = torch.stack((high, middle, (rest - middle).bfloat16()), 1).flatten(0, 1)
    out = _launch(rows, weight, None, torch.float32, False).unflatten(0, (-1, 3)).sum(1)
    return out if bias is None else out.add_(bias)


def _launch(x: Tensor, weight: PackedCodes, bias: Tensor | None, dtype: torch.dtype, decodes: bool) -> Tensor:
    row_stride, stride = x.stride()
    if stride != 1 or row_stride % 2:
        x, row_stride = x.contiguous(), x.shape[1]
    num_rows, in_features = x.shape
    num_groups, offsets, x_sums = in_features // weight.group_size, weight.offsets, None
    if offsets is not None and not decodes:
        x_sums = sum_groups(x, weight.group_size)
    width = -(-weight.out_features // WIDTH) * WIDTH
    out = empty((num_rows, width), dtype)
    _code_linear(
        len(weight.codes) * -(-num_rows // ROWS_PER_ITEM),
        x.data_ptr(), weight.codes.data_ptr(), weight.tables.data_ptr(), out.data_ptr(),
        0 if bias is None else bias.data_ptr(), weight.scales.data_ptr(), 0 if offsets is None else offsets.data_ptr(),
        0 if x_sums is None else x_sums.data_ptr(), num_rows, row_stride // 2, in_features // 2, width,
        weight.kind, weight.group_size // 2, weight.form, num_groups,
        decodes, out.data_ptr() if dtype == torch.float32 else 0, torch.get_num_threads(),
    )  # fmt: skip
    return out if width == weight.out_features else out[:, : weight.out_features].contiguous()
