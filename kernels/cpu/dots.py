"""Products of bf16 pairs for numba: sixteen 32-bit words with sixteen, summed in fp32.

A word is two neighbouring numbers of one sum. AVX512-BF16 has an instruction for it; other processors widen the numbers
(widened_dots.py). Holds helpers for codegen, and the microkernel of the CPU's matrix products.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu import simd, widened_dots
from kernels.cpu.codes import WIDTH, F32Pointer, Vec, constant
from kernels.cpu.features import HAS_AVX512, HAS_BF16_DOT, instruction
from kernels.cpu.parallel import jit
from kernels.cpu.simd import I32Pointer, broadcast, vector_at

_F32V, _I32V = (ir.VectorType(scalar, WIDTH) for scalar in (ir.FloatType(), ir.IntType(32)))
_I32, _I64 = ir.IntType(32), ir.IntType(64)
LANES = ir.VectorType(ir.IntType(16), 2 * WIDTH)


@jit
def words_at(pointer):
    """Pairs of bf16 as 32-bit words. Called from numba's code; the functions below generate code."""
    return simd.pointer_i32(simd.address(pointer))


def dot(builder, total, a, b):
    """total[i] + a[2i] * b[2i] + a[2i + 1] * b[2i + 1]"""
    if not HAS_BF16_DOT:
        return widened_dots.dot(builder, total, a, b)
    return instruction(builder, "vdpbf16ps $2, $1, $0", "=v,v,v,0", _F32V, a, b, total)


def add_products(builder, totals, inputs, factor):
    """Raise each of the totals, places in memory, by the dot of its input and a common factor."""
    if HAS_BF16_DOT:
        for total, x in zip(totals, inputs, strict=True):
            builder.store(dot(builder, builder.load(total), x, factor), total)
        return
    pairs = [widened_dots.halves(builder, x) for x in inputs]
    for i, half in enumerate(widened_dots.halves(builder, factor)):  # one after the other, to need few registers
        for total, x in zip(totals, pairs, strict=True):
            builder.store(widened_dots.fma(builder, x[i], half, builder.load(total)), total)


@jit
def never(*arguments):
    """In the place of kernels that this processor does not call."""


def by_rows(kernels):
    """A function (num_rows, *arguments) for numba's code that calls the kernel for so many rows, from one to six; those
    that `kernels` lacks are never asked for."""
    if not kernels:
        return never
    rows1, rows2, rows3, rows4, rows5, rows6 = [*kernels, *kernels[-1:] * (6 - len(kernels))]

    @jit
    def call(num_rows, *arguments):
        if num_rows == 6:
            rows6(*arguments)
        elif num_rows == 5:
            rows5(*arguments)
        elif num_rows == 4:
            rows4(*arguments)
        elif num_rows == 3:
            rows3(*arguments)
        elif num_rows == 2:
            rows2(*arguments)
        else:
            rows1(*arguments)

    return call


def lanes(value):
    """The same integer in every lane of 16 bits."""
    return ir.Constant(LANES, [value] * (2 * WIDTH))


def look_up(builder, codes, table):
    """table[code % 16] for 32 codes of 16 bits; table: 16 values, twice."""
    if not HAS_AVX512:
        return widened_dots.look_up(builder, codes, table)
    return instruction(builder, "vpermw $2, $1, $0", "=v,v,v", LANES, codes, table)


# 2 ** r on 0 <= r < 1 as 1 + r * p(r). Off by 9e-5 of it at most for bf16, whose rounding is off by 2e-3, and by 7e-8
# for fp32.
_EXP2_BF16 = (0.07706717, 0.22764485, 0.69511682)
_EXP2_FP32 = (2.16129149e-4, 1.24678458e-3, 9.67545155e-3, 5.54852821e-2, 2.40229309e-1, 6.93147063e-1)


def power_of_two(builder, x, for_bf16=True):
    """2 ** x as exactly as bf16 or else fp32 can hold it. -inf gives 0."""
    if HAS_AVX512:
        rest = instruction(builder, "vreduceps $$9, $1, $0", "=v,v", _F32V, x)  # x - floor(x)
    else:
        whole, rest = widened_dots.whole_and_rest(builder, x)
    coefficients = (*(_EXP2_BF16 if for_bf16 else _EXP2_FP32), 1.0)
    result, *others = (ir.Constant(_F32V, [coefficient] * WIDTH) for coefficient in coefficients)
    for coefficient in others:
        result = simd.call(builder, "llvm.fma.v16f32", _F32V, result, rest, coefficient)
    if not HAS_AVX512:
        return widened_dots.scale(builder, result, whole)
    return instruction(builder, "vscalefps $2, $1, $0", "=v,v,v", _F32V, result, x)  # result * 2 ** floor(x)


@intrinsic
def exp2(typingctx, x):
    """2 ** x for numbers that are rounded to bf16: power_of_two, for numba's code."""
    return Vec(Vec), lambda context, builder, sig, args: power_of_two(builder, *args)


@intrinsic
def exp2_fp32(typingctx, x):
    """2 ** x, off by 7e-8 of it."""
    return Vec(Vec), lambda context, builder, sig, args: power_of_two(builder, *args, for_bf16=False)


@intrinsic
def inverse(typingctx, x):
    """1 / x, off by 6e-5 of it at most: for numbers that are rounded to bf16."""

    def codegen(context, builder, sig, args):
        if not HAS_AVX512:
            return builder.fdiv(constant(ir.FloatType(), 1.0), *args)
        return instruction(builder, "vrcp14ps $1, $0", "=v,v", _F32V, *args)

    return Vec(Vec), codegen


def multiply(rows, vectors, doc, lines=0, adds=True):
    """An intrinsic: out[r, :] += a[r, :] @ b for `rows` rows and 16 * `vectors` columns, all in registers; not `adds`:
    out[r, :] = a[r, :] @ b.

    a and b point to words, or both to floats. Strides and `depth` are in words, or in floats. With `lines`, a last
    argument points to memory that is needed soon: each row of b prefetches `lines` cache lines there, one after the
    other.
    """
    cells = [(r, c) for r in range(rows) for c in range(vectors)]

    def codegen(context, builder, sig, args):
        if sig.args[0] == F32Pointer or not HAS_BF16_DOT:
            multiply = widened_dots.multiply_floats if sig.args[0] == F32Pointer else widened_dots.multiply
            multiply(builder, rows, vectors, lines, adds, args)
            return context.get_dummy_value()
        a, a_stride, b, b_stride, depth, out, out_stride, *soon = args
        totals, targets = {}, {}
        for r, c in cells:
            index = builder.add(builder.mul(out_stride, ir.Constant(_I64, r)), ir.Constant(_I64, WIDTH * c))
            targets[r, c] = vector_at(builder, out, index, _F32V)
            start = builder.load(targets[r, c], align=4) if adds else ir.Constant(_F32V, [0.0] * WIDTH)
            totals[r, c] = cgutils.alloca_once(builder, _F32V)
            builder.store(start, totals[r, c])
        with cgutils.for_range(builder, depth) as loop:
            b_row = builder.gep(b, [builder.mul(loop.index, b_stride)])
            for line in range(lines):
                index = builder.add(
                    builder.mul(loop.index, ir.Constant(_I64, lines * WIDTH)), ir.Constant(_I64, line * WIDTH)
                )
                simd.prefetch(builder, builder.gep(soon[0], [index]))
            places = [vector_at(builder, b_row, ir.Constant(_I64, WIDTH * c), _I32V) for c in range(vectors)]
            columns = [builder.load(place, align=4) for place in places]
            for r, c in cells:
                if c == 0:
                    index = builder.add(builder.mul(a_stride, ir.Constant(_I64, r)), loop.index)
                    pair = broadcast(builder, builder.load(builder.gep(a, [index])))
                builder.store(dot(builder, builder.load(totals[r, c]), pair, columns[c]), totals[r, c])
        for cell in cells:
            builder.store(builder.load(totals[cell]), targets[cell], align=4)
        return context.get_dummy_value()

    i64 = types.int64

    def typing(typingctx, a, a_stride, b, b_stride, depth, out, out_stride):
        return types.void(a, i64, a, i64, i64, F32Pointer, i64), codegen

    def typing_with_soon(typingctx, a, a_stride, b, b_stride, depth, out, out_stride, soon):
        return types.void(a, i64, a, i64, i64, F32Pointer, i64, I32Pointer), codegen

    chosen = typing_with_soon if lines else typing
    chosen.__doc__ = doc
    return intrinsic(chosen)
