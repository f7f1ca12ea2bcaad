"""Rows rounded to integers of 16 bits, in parts with a scale each, and their products with pairs of integer codes.

Sums of a part are exact: its terms are so small that they fit 32 bits.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.cpu import simd
from kernels.cpu.codes import WIDTH, Vec
from kernels.cpu.features import HAS_AVX512
from kernels.cpu.parallel import jit
from kernels.cpu.simd import I32Pointer, advance, load, read, splat, vector_at, write

MOST = 32767  # the largest magnitude of a rounded input
CODES = 256  # the most codes of a kind
LEAST_SCALE = np.float32(1e-30)
ZERO = np.float32(0)

_F32, _I8, _I16, _I32 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32)
_F32V, _I8V, _I16V, _I32V = (ir.VectorType(scalar, WIDTH) for scalar in (_F32, _I8, _I16, _I32))


def multiply_add(builder, total, codes, inputs):
    """total[i] + codes[2i] * inputs[2i] + codes[2i + 1] * inputs[2i + 1], 32 codes and inputs of 16 bits."""
    if HAS_AVX512:
        return builder.add(total, simd.call(builder, "llvm.x86.avx512.pmaddw.d.512", _I32V, codes, inputs))
    places = lambda first: ir.Constant(_I32V, list(range(first, first + WIDTH)))  # noqa: E731
    sums = []
    for first in (0, WIDTH):
        parts = (builder.shuffle_vector(x, x, places(first)) for x in (codes, inputs))
        sums.append(simd.call(builder, "llvm.x86.avx2.pmadd.wd", ir.VectorType(_I32, WIDTH // 2), *parts))
    return builder.add(total, builder.shuffle_vector(*sums, places(0)))


@intrinsic
def round_quotient(typingctx, x, inverse):
    """x * inverse, rounded to whole numbers."""

    def codegen(context, builder, sig, args):
        product = builder.fmul(*args)
        return simd.call(builder, "llvm.rint.v16f32", _F32V, product)

    return Vec(Vec, Vec), codegen


def _storer(vector, align):
    def codegen(context, builder, sig, args):
        pointer, index, x = args
        integers = builder.trunc(builder.fptosi(x, _I32V), vector)
        builder.store(integers, vector_at(builder, pointer, index, vector), align=align)
        return context.get_dummy_value()

    def typing(typingctx, pointer, index, x):
        return types.void(I32Pointer, types.int64, Vec), codegen

    typing.__doc__ = "Store sixteen whole numbers as integers of 8 or 16 bits, from word `index` on."
    return intrinsic(typing)


store_bytes, store_shorts = _storer(_I8V, 1), _storer(_I16V, 2)


SCALE, START, SUM = range(3)  # the order of the numbers behind the pairs of a rounded row: see round_row


@jit
def rounded_words(words, part, num_groups):
    """Words of a rounded row of `words` pairs."""
    return words + 2 * (words // part) + num_groups


@jit
def round_row(x, words, part, num_groups, least, out):
    """Round a row of `words` pairs of bf16 in parts of `part` pairs.

    `out` gets the pairs of integers. Behind them are, for each part, SCALE: its scale as fp32, START: `least` times the
    sum of its integers (the products with a code of 0, where the least code means `least`), then, for each group, SUM:
    the sum of its inputs as fp32. A part with NaN or an infinity gets NaN as its scale.
    """
    parts, step = words // part, WIDTH // 2
    most = np.float32(min(MOST, (1 << 30) // (CODES * part)))
    whole = part // step * step
    scales = simd.pointer_f32(simd.address(advance(out, words + SCALE * parts)))
    starts = advance(out, words + START * parts)
    sums = simd.pointer_f32(simd.address(advance(out, words + SUM * parts)))
    for g in range(num_groups):
        write(sums, g, ZERO)
    for p in range(parts):
        numbers, rounded = advance(x, 2 * p * part), advance(out, p * part)
        top, plain = splat(ZERO), splat(ZERO)
        for k in range(0, whole, step):
            values = load(numbers, 2 * k)
            top = simd.larger(simd.larger(values, simd.sub(splat(ZERO), values)), top)
            plain = simd.add(plain, values)
        largest, plain_sum = simd.first(simd.spread_max1(top)), simd.first(simd.spread_add1(plain))
        for k in range(2 * whole, 2 * part):
            largest, plain_sum = max(largest, abs(read(numbers, k))), plain_sum + read(numbers, k)
        scale = max(largest, LEAST_SCALE) / most
        inverse, total = np.float32(1) / scale, splat(ZERO)
        for k in range(0, whole, step):
            values = round_quotient(load(numbers, 2 * k), splat(inverse))
            total = simd.add(total, values)
            store_shorts(rounded, k, values)
        rest = simd.first(simd.spread_add1(total))
        for k in range(whole, part):
            even, odd = np.rint(read(numbers, 2 * k) * inverse), np.rint(read(numbers, 2 * k + 1) * inverse)
            rest += even + odd
            write(rounded, k, np.int32(np.int64(even) & 0xFFFF | np.int64(odd) << 16))
        write(scales, p, scale + plain_sum * ZERO)
        write(starts, p, np.int32(np.int64(rest) * least))
        group = p * num_groups // parts
        write(sums, group, read(sums, group) + plain_sum)
