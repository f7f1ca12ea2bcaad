"""Decodes codes of a panel (words.py) to weights: bf16 pairs, rounded, or floats."""

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu import simd
from kernels.cpu.codes import WIDTH, F32Pointer, constant
from kernels.cpu.parallel import jit
from kernels.cpu.quantized.scales import COLUMNS, load_scales
from kernels.cpu.quantized.words import (
    INT4,
    INT6,
    INT8,
    KINDS,
    SPLIT4,
    VECTORS,
    load_pairs,
    load_tables,
    prefetch_pair,
)
from kernels.cpu.simd import I32Pointer, advance, splat, store, vector_at
from kernels.cpu.widened_dots import fma, halves

ZERO = np.float32(0)
_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_F32V, _I32V = ir.VectorType(_F32, WIDTH), ir.VectorType(_I32, WIDTH)


def _rounded_pairs(builder, even, odd):
    """bf16 pairs in 32-bit words, rounded to nearest, ties away from zero."""
    half = constant(_I32, 0x8000)
    even, odd = (builder.add(builder.bitcast(value, _I32V), half) for value in (even, odd))
    return builder.or_(builder.lshr(even, constant(_I32, 16)), builder.and_(odd, constant(_I32, -65536)))


def _decoder(kind, floats):
    """An intrinsic: weights = scale * meaning + offset for `depth` pairs of inputs and 64 outputs. A pair takes one row
    of bf16 pairs, or two rows of floats: of the even input and of the odd one."""

    def codegen(context, builder, sig, args):
        codes, depth, tables, weights, *parameters = args
        table = load_tables(builder, tables, kind)
        places = [ir.Constant(_I64, v * WIDTH) for v in range(VECTORS)]
        factors, terms = (
            [builder.load(vector_at(builder, pointer, place, _F32V), align=4) for place in places]
            for pointer in parameters
        )
        with cgutils.for_range(builder, depth) as loop:
            prefetch_pair(builder, kind, codes, loop.index)
            row = builder.gep(weights, [builder.mul(loop.index, ir.Constant(_I64, (2 if floats else 1) * COLUMNS))])
            for v, vectors in enumerate(load_pairs(builder, kind, codes, loop.index, table)):
                parts = [halves(builder, words) for words in vectors]
                meanings = parts[0] if len(parts) == 1 else [builder.fadd(*both) for both in zip(*parts, strict=True)]
                values = [fma(builder, meaning, factors[v], terms[v]) for meaning in meanings]
                stored = values if floats else [_rounded_pairs(builder, *values)]
                for i, vector in enumerate(stored):
                    place = ir.Constant(_I64, i * COLUMNS + v * WIDTH)
                    builder.store(vector, vector_at(builder, row, place, vector.type), align=4)
        return context.get_dummy_value()

    arguments = I32Pointer, types.int64, I32Pointer, I32Pointer, F32Pointer, F32Pointer

    def typing(typingctx, codes, depth, tables, weights, scale, offset):
        return types.void(*arguments), codegen

    typing.__doc__ = "Decode the codes of a group for 64 outputs."
    return intrinsic(typing)


def _part_decoder(floats):
    decode4, decode8, decode_fp8, decode_split4, decode6 = (_decoder(kind, floats) for kind in KINDS[INT4:])
    row = 2 * COLUMNS if floats else COLUMNS  # words of a pair of inputs

    @jit
    def decode(kind, codes, pair_words, tables, group, first, depth, weights, factors, scales, offsets, form, at):
        """weights: pairs `first` to first + depth of a panel. factors: room for the scales and offsets of a group. at:
        index of the panel's first scale."""
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
            target = advance(weights, (k - first) * row)
            source = advance(codes, k * pair_words)
            if kind == INT4:
                decode4(source, count, tables, target, factors, terms)
            elif kind == INT6:
                decode6(source, count, tables, target, factors, terms)
            elif kind == SPLIT4:
                decode_split4(source, count, tables, target, factors, terms)
            elif kind == INT8:
                decode8(source, count, tables, target, factors, terms)
            else:
                decode_fp8(source, count, tables, target, factors, terms)
            k += count

    return decode


decode_pairs, decode_floats = _part_decoder(False), _part_decoder(True)
