"""Sums, factors and copies of rows on a CPU."""

import math

import numpy as np
import torch
from torch import Tensor

from kernels.cpu import simd
from kernels.cpu.elementwise.activations import tanh
from kernels.cpu.elementwise.work import CHUNK, DTYPES
from kernels.cpu.parallel import empty, jit, next_item, parallel_kernel
from kernels.cpu.simd import WIDTH, advance, load, load_some, mul, read, splat, store, store_some


@jit
def _combine_items(args, a, b, out):
    rows, size, a_stride, b_stride, per_item, is_product = args[5], args[6], args[7], args[8], args[9], args[10]
    item = next_item(args)
    while item < args[1]:
        for row in range(item * per_item, min(rows, (item + 1) * per_item)):
            left, right, target = advance(a, row * a_stride), advance(b, row * b_stride), advance(out, row * size)
            for i in range(0, size, WIDTH):
                x, y = load(left, i), load(right, i)
                store(target, i, mul(x, y) if is_product else simd.add(x, y))
        item = next_item(args)


@parallel_kernel("9q")
def _combine_bf16(args):
    _combine_items(args, simd.pointer_bf16(args[2]), simd.pointer_bf16(args[3]), simd.pointer_bf16(args[4]))


@parallel_kernel("9q")
def _combine_f32(args):
    _combine_items(args, simd.pointer_f32(args[2]), simd.pointer_f32(args[3]), simd.pointer_f32(args[4]))


def supports_combine(a: Tensor, b: Tensor) -> bool:
    """True for two of [rows, n] with rows of whole vectors."""
    return (
        a.dtype in DTYPES
        and b.dtype == a.dtype
        and a.ndim == 2
        and a.shape == b.shape
        and a.shape[1] % WIDTH == 0
        and a.stride(1) == b.stride(1) == 1
    )


def combine(a: Tensor, b: Tensor, is_product: bool) -> Tensor:
    """a * b or a + b, see kernels.elementwise.rows."""
    rows, size = a.shape
    out, per_item = empty(a.shape, a.dtype), max(1, CHUNK // size)
    kernel = _combine_bf16 if a.dtype == torch.bfloat16 else _combine_f32
    kernel(
        -(-rows // per_item), a.data_ptr(), b.data_ptr(), out.data_ptr(), rows, size, a.stride(0), b.stride(0),
        per_item, is_product,
    )  # fmt: skip
    return out


@jit
def _gate_row_items(args, x, gates, out):
    rows, size, stride, per_item = args[5], args[6], args[7], args[8]
    item = next_item(args)
    while item < args[1]:
        for row in range(item * per_item, min(rows, (item + 1) * per_item)):
            factor = splat(np.float32(1 / (1 + np.exp(-read(gates, row)))))
            source, target = advance(x, row * stride), advance(out, row * size)
            for i in range(0, size, WIDTH):
                store(target, i, mul(load(source, i), factor))
        item = next_item(args)


@parallel_kernel("7q")
def _gate_rows_bf16(args):
    _gate_row_items(args, simd.pointer_bf16(args[2]), simd.pointer_bf16(args[3]), simd.pointer_bf16(args[4]))


@parallel_kernel("7q")
def _gate_rows_f32(args):
    _gate_row_items(args, simd.pointer_f32(args[2]), simd.pointer_f32(args[3]), simd.pointer_f32(args[4]))


def supports_gates(x: Tensor, gates: Tensor) -> bool:
    """True for [rows, n] with rows of whole vectors, and dense gates [rows, 1]."""
    return (
        x.dtype in DTYPES
        and gates.dtype == x.dtype
        and x.ndim == 2
        and x.shape[1] % WIDTH == 0
        and x.stride(1) == 1
        and gates.shape == (len(x), 1)
        and gates.is_contiguous()
    )


def gate(x: Tensor, gates: Tensor) -> Tensor:
    """See kernels.elementwise.rows.gate_rows."""
    rows, size = x.shape
    out, per_item = empty(x.shape, x.dtype), max(1, CHUNK // size)
    kernel = _gate_rows_bf16 if x.dtype == torch.bfloat16 else _gate_rows_f32
    kernel(-(-rows // per_item), x.data_ptr(), gates.data_ptr(), out.data_ptr(), rows, size, x.stride(0), per_item)
    return out


@jit
def _limited(x, pointer, scale, cap):
    """A vector of `limit`. Each step is rounded, as torch rounds after each of its operators."""
    if scale != 1:
        x = simd.round_to(pointer, mul(x, splat(scale)))
    if cap != 0:
        x = simd.round_to(pointer, tanh(simd.round_to(pointer, simd.distance(x, splat(np.float32(0)), splat(cap)))))
        x = mul(x, splat(cap))
    return x


@jit
def _limit_items(args, x):
    size, per_item = args[3], args[4]
    scale, cap = np.float32(simd.as_float(args[5])), np.float32(simd.as_float(args[6]))
    item = next_item(args)
    while item < args[1]:
        begin, end = item * per_item, min(size, (item + 1) * per_item)
        whole = begin + (end - begin) // WIDTH * WIDTH
        for i in range(begin, whole, WIDTH):
            store(x, i, _limited(load(x, i), x, scale, cap))
        if whole < end:
            store_some(x, whole, _limited(load_some(x, whole, end - whole), x, scale, cap), end - whole)
        item = next_item(args)


@parallel_kernel("3q2d")
def _limit_bf16(args):
    _limit_items(args, simd.pointer_bf16(args[2]))


@parallel_kernel("3q2d")
def _limit_f32(args):
    _limit_items(args, simd.pointer_f32(args[2]))


def supports_limit(x: Tensor) -> bool:
    """True for any dense tensor."""
    return x.dtype in DTYPES and x.is_contiguous()


def limit(x: Tensor, scale: float, cap: float) -> None:
    """See kernels.elementwise.rows.limit."""
    kernel = _limit_bf16 if x.dtype == torch.bfloat16 else _limit_f32
    kernel(math.ceil(x.numel() / CHUNK), x.data_ptr(), x.numel(), CHUNK, scale, cap)


@parallel_kernel("5q")
def _copy_rows(args):
    source, target, row_bytes, source_stride, target_stride = args[2], args[3], args[4], args[5], args[6]
    item = next_item(args)
    while item < args[1]:
        simd.copy_bytes(target + item * target_stride, source + item * source_stride, row_bytes)
        item = next_item(args)


def concatenate(parts: list[Tensor]) -> Tensor:
    """torch.cat(parts, -1) for parts [rows, n] of one dtype with dense rows."""
    rows, size = len(parts[0]), parts[0].element_size()
    out = empty((rows, sum(part.shape[1] for part in parts)), parts[0].dtype)
    start = out.data_ptr()
    for part in parts:
        width = part.shape[1] * size
        _copy_rows(rows, part.data_ptr(), start, width, part.stride(0) * size, out.stride(0) * size)
        start += width
    return out


@parallel_kernel("5q")
def _take_columns_bf16(args):
    x, out, columns, size, stride = (
        simd.pointer_bf16(args[2]), simd.pointer_bf16(args[3]), simd.pointer_i32(args[4]), args[5], args[6]
    )  # fmt: skip
    item = next_item(args)
    while item < args[1]:
        for i in range(size):
            simd.copy_bytes(
                simd.address(advance(out, item * size + i)),
                simd.address(advance(x, item * stride + read(columns, i))),
                2,
            )
        item = next_item(args)


def take_columns(x: Tensor, columns: Tensor) -> Tensor:
    """x.index_select(1, columns) for bf16 [rows, n] with dense rows; columns int32."""
    out = empty((len(x), len(columns)), x.dtype)
    _take_columns_bf16(len(x), x.data_ptr(), out.data_ptr(), columns.data_ptr(), len(columns), x.stride(0))
    return out


@parallel_kernel("5q")
def _take_rows(args):
    source, target, indices, row_bytes, stride = args[2], args[3], simd.pointer_i64(args[4]), args[5], args[6]
    item = next_item(args)
    while item < args[1]:
        simd.copy_bytes(target + item * row_bytes, source + read(indices, item) * stride, row_bytes)
        item = next_item(args)


def supports_take_rows(x: Tensor, indices: Tensor) -> bool:
    """True for x whose rows are dense, and int64."""
    return x[:1].is_contiguous() and indices.dtype == torch.int64 and indices.is_contiguous()


def take_rows(x: Tensor, indices: Tensor) -> Tensor:
    """x.index_select(0, indices) for x [rows, ...]. No index is checked."""
    out, size = empty((len(indices), *x.shape[1:]), x.dtype), x.element_size()
    row_bytes = math.prod(x.shape[1:]) * size
    _take_rows(len(indices), x.data_ptr(), out.data_ptr(), indices.data_ptr(), row_bytes, x.stride(0) * size)
    return out
