"""Scales and offsets of panels of 64 outputs in memory: as fp32, as fp16, or as integers with common factors.

The K types of GGUF store the scale of a group as a small integer, and one factor in fp16 for eight or sixteen groups.
`factorize` finds both again in their exact products, so that a scale takes 10 bits instead of 32. A block of such
scales has the factors of eight groups for the 64 outputs, fp16, and then the integers, int8 [8, 64].
"""

import numpy as np
import torch
import torch.nn.functional as F
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from kernels import huge_pages
from kernels.cpu import simd
from kernels.cpu.codes import WIDTH, F32Pointer, Vec
from kernels.cpu.parallel import jit, next_item, parallel_kernel
from kernels.cpu.simd import advance, read, write

COLUMNS = 64  # outputs per panel
FP32, FP16, FACTORED = FORMS = 0, 1, 2
BYTES = (4, 2, 1.25)  # per scale, by form
GROUPS = 8  # in a block
BLOCK = COLUMNS // 2 + GROUPS * COLUMNS // 4  # words per block
LEAST = -128  # the least integer

_F32, _HALF, _I8, _I64 = ir.FloatType(), ir.HalfType(), ir.IntType(8), ir.IntType(64)


def _places(builder, index):
    """(fp16 number of the factor, byte of the integer) of a scale of the form FACTORED."""
    constant = lambda value: ir.Constant(_I64, value)  # noqa: E731
    block = builder.mul(builder.lshr(index, constant(9)), constant(BLOCK))
    integers = builder.shl(builder.add(block, constant(COLUMNS // 2)), constant(2))
    column = builder.and_(index, constant(COLUMNS - 1))
    return builder.add(builder.shl(block, constant(1)), column), builder.add(
        integers, builder.and_(index, constant(GROUPS * COLUMNS - 1))
    )


def scales_at(builder, values, form, index, count=WIDTH):
    """Scales index to index + count - 1 as a vector of fp32; count 1: as a number. values: a pointer to fp32. The
    compiler knows form and count."""

    def kind(element):
        return element if count == 1 else ir.VectorType(element, count)

    def load(element, place):
        first = builder.gep(builder.bitcast(values, element.as_pointer()), [place])
        return builder.load(builder.bitcast(first, kind(element).as_pointer()), align=1)

    if form == FP32:
        return load(_F32, index)
    if form == FP16:
        return builder.fpext(load(_HALF, index), kind(_F32))
    factor, integer = _places(builder, index)
    factors = builder.fpext(load(_HALF, factor), kind(_F32))
    return builder.fmul(factors, builder.sitofp(load(_I8, integer), kind(_F32)))


def load_by_form(builder, values, form, first, block):
    """Scales of the vectors v of `block` from index `first` on, by vector; they are at first + 16 * v. form: a number
    that the compiler does not know."""
    targets = {v: cgutils.alloca_once(builder, ir.VectorType(_F32, WIDTH)) for v in block}

    def load_as(known):
        for v, target in targets.items():
            place = builder.add(first, ir.Constant(_I64, v * WIDTH))
            builder.store(scales_at(builder, values, known, place), target)

    with builder.if_else(builder.icmp_signed("==", form, ir.Constant(_I64, FP16))) as (is_half, other):
        with is_half:
            load_as(FP16)
        with other, builder.if_else(builder.icmp_signed("==", form, ir.Constant(_I64, FP32))) as (single, factored):
            with single:
                load_as(FP32)
            with factored:
                load_as(FACTORED)
    return {v: builder.load(target) for v, target in targets.items()}


def _reader(result, form, count):
    def typing(typingctx, values, index):
        generate = lambda context, builder, sig, args: scales_at(builder, args[0], form, args[1], count)  # noqa: E731
        return result(F32Pointer, types.int64), generate

    typing.__doc__ = "One scale, or sixteen."
    return intrinsic(typing)


_load_fp32, _load_fp16, _load_factored = (_reader(Vec, form, WIDTH) for form in FORMS)
_read_fp32, _read_fp16, _read_factored = (_reader(types.float32, form, 1) for form in FORMS)


@jit
def load_scales(values, form, index):
    """Scales index to index + 15."""
    if form == FP16:
        return _load_fp16(values, index)
    return _load_fp32(values, index) if form == FP32 else _load_factored(values, index)


@jit
def read_scale(values, form, index):
    """Scale `index`."""
    if form == FP16:
        return _read_fp16(values, index)
    return _read_fp32(values, index) if form == FP32 else _read_factored(values, index)


@jit
def _is_half(value):
    """True if fp16 holds a number exactly: it has eleven bits from 2^-24 on."""
    size = abs(np.float64(value)) * 2.0**24
    if size == 0 or not (size <= 65504 * 2.0**24 and size == np.floor(size)):
        return size == 0
    number = np.int64(size)
    return number // (number & -number) < 2048


@jit
def _divides(factor, values, at):
    """True if fp16 holds the factor, and eight scales 64 apart are integers from -128 to 127 times the factor, exactly
    in fp32."""
    if not _is_half(factor):
        return False
    for g in range(GROUPS):
        value = read(values, at + g * COLUMNS)
        integer = np.rint(value / factor)
        if not (integer * factor == value and LEAST <= integer < -LEAST):
            return False
    return True


@jit
def _factor(values, at):
    """A factor that divides eight scales 64 apart; NaN if there is none. The largest scale becomes a negative integer,
    because types with signed integers use -128."""
    largest = np.float32(0)
    for g in range(GROUPS):
        value = read(values, at + g * COLUMNS)
        largest = value if abs(value) > abs(largest) else largest
    if largest == 0 and _divides(np.float32(1), values, at):
        return np.float32(1)
    for integer in range(LEAST, 0):
        factor = largest / np.float32(integer)
        if _divides(factor, values, at):
            return factor
    return np.float32(np.nan)


@parallel_kernel("4q")
def _factorize(args):
    """Work items are blocks. Writes 0 to found[0] where one has no factors."""
    values, factors, integers, found = (
        simd.pointer_f32(args[2]), simd.pointer_f32(args[3]), simd.pointer_i32(args[4]), simd.pointer_i32(args[5])
    )  # fmt: skip
    item = next_item(args)
    while item < args[1]:
        source = advance(values, item * GROUPS * COLUMNS)
        for column in range(COLUMNS):
            factor = _factor(source, column)
            if np.isnan(factor):
                write(found, 0, np.int32(0))
                factor = np.float32(1)
            write(factors, item * COLUMNS + column, factor)
            for g in range(GROUPS):
                integer = np.int64(np.rint(read(source, column + g * COLUMNS) / factor))
                place = ((item * GROUPS + g) * COLUMNS + column) // 4
                word = np.int64(read(integers, place)) | (integer & 255) << (column % 4 * 8)
                write(integers, place, np.int32(word))
        item = next_item(args)


def factorize(scales: Tensor) -> Tensor | None:
    """fp32 [panels, groups, 64] -> blocks, int32 [panels, groups / 8, 160], which hold the same numbers; None where
    there are no such factors."""
    panels, groups, _ = scales.shape
    if groups % GROUPS:
        return None
    shape, found = (panels, groups // GROUPS), torch.ones(1, dtype=torch.int32)
    factors, integers = torch.empty(*shape, COLUMNS), torch.zeros(*shape, GROUPS * COLUMNS // 4, dtype=torch.int32)
    _factorize(panels * groups // GROUPS, scales.data_ptr(), factors.data_ptr(), integers.data_ptr(), found.data_ptr())
    return torch.cat([factors.half().view(torch.int32), integers], -1) if found.item() else None


def padded_rows(rows: Tensor) -> Tensor:
    """[out, ...] with zeros up to whole panels."""
    return F.pad(rows, (0, 0, 0, -len(rows) % COLUMNS))


def pack_scales(parameters: list[Tensor]) -> tuple[int, list[Tensor]]:
    """Scales or offsets [out, groups] -> (form, each of them in panels): the smallest form that holds all exactly."""
    form, packed = _in_smallest_form([_in_panels(values.float()) for values in parameters])
    return form, [huge_pages.copy(values) for values in packed]


def _in_smallest_form(wide: list[Tensor]) -> tuple[int, list[Tensor]]:
    if all(torch.equal(values.half().float(), values) for values in wide):
        return FP16, [values.half() for values in wide]
    blocks = [factorize(values) for values in wide]
    return (FACTORED, blocks) if all(values is not None for values in blocks) else (FP32, wide)


def _in_panels(values: Tensor) -> Tensor:
    """[out, groups] -> [panels, groups, 64]."""
    return padded_rows(values).view(-1, COLUMNS, values.shape[1]).transpose(1, 2).contiguous()
