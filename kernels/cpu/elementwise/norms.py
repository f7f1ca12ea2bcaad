"""RMSNorm and LayerNorm of a CPU, with the residual addition before them, in one pass over memory."""

import numpy as np
import torch
from torch import Tensor

from kernels.cpu import simd
from kernels.cpu.elementwise.work import CHUNK, DTYPES
from kernels.cpu.parallel import ParallelKernel, empty, empty_rows, jit, next_item, parallel_kernel
from kernels.cpu.simd import WIDTH, advance, load, splat, store


@jit
def _rms_norm_row(x, residual, weight, has_residual, size, eps, offset, out, out_residual):
    """RMSNorm of one row. Rounds like LLaMA: the sum, the normed value, and (offset 0) the product with the weight."""
    total = splat(np.float32(0))
    for i in range(0, size, WIDTH):
        v = load(x, i)
        if has_residual:
            v = simd.round_to(out, simd.add(v, load(residual, i)))
            store(out_residual, i, v)
        total = simd.fma(v, v, total)
    mean = simd.first(simd.spread_add1(total)) / np.float32(size)
    inverse = splat(np.float32(1) / np.sqrt(mean + eps))
    source = out_residual if has_residual else x
    for i in range(0, size, WIDTH):
        v, w = simd.mul(load(source, i), inverse), load(weight, i)
        v = simd.mul(v, simd.add(w, splat(offset))) if offset != 0 else simd.mul(simd.round_to(out, v), w)
        store(out, i, v)


@jit
def _rms_norm_items(args, x, residual, weight, out, out_residual):
    rows, size, inner, outer_stride, inner_stride, per_item = args[7], args[8], args[9], args[10], args[11], args[12]
    out_stride, residual_stride = args[13], args[14]
    eps, offset = np.float32(simd.as_float(args[15])), np.float32(simd.as_float(args[16]))
    item = next_item(args)
    while item < args[1]:
        for row in range(item * per_item, min(rows, (item + 1) * per_item)):
            source = advance(x, row // inner * outer_stride + row % inner * inner_stride)
            before = advance(residual, row * residual_stride)
            _rms_norm_row(source, before, weight, simd.address(residual) != 0, size, eps, offset,
                          advance(out, row * out_stride), advance(out_residual, row * size))  # fmt: skip
        item = next_item(args)


@parallel_kernel("13q2d")
def _rms_norm_bf16(args):
    pointer = simd.pointer_bf16
    _rms_norm_items(args, pointer(args[2]), pointer(args[3]), pointer(args[4]), pointer(args[5]), pointer(args[6]))


@parallel_kernel("13q2d")
def _rms_norm_f32(args):
    pointer = simd.pointer_f32
    _rms_norm_items(args, pointer(args[2]), pointer(args[3]), pointer(args[4]), pointer(args[5]), pointer(args[6]))


def supports_rms_norm(x: Tensor, weight: Tensor, residual: Tensor | None) -> bool:
    """True for rows of whole vectors, with at most two strided axes before them, and a residual of dense rows."""
    return _supports_rows(x, residual) and weight.dtype == x.dtype and weight.is_contiguous()


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, offset: float
) -> Tensor | tuple[Tensor, Tensor]:
    """See kernels.elementwise.rms_norm."""
    kernel = _rms_norm_bf16 if x.dtype == torch.bfloat16 else _rms_norm_f32
    return _run(kernel, x, residual, (weight.data_ptr(),), (eps, offset))


@jit
def _layer_norm_row(x, residual, weight, bias, has_residual, size, eps, out, out_residual):
    """LayerNorm of one row, with the variance of centred numbers; the sum with the residual and the result are
    rounded."""
    total = splat(np.float32(0))
    for i in range(0, size, WIDTH):
        v = load(x, i)
        if has_residual:
            v = simd.round_to(out, simd.add(v, load(residual, i)))
            store(out_residual, i, v)
        total = simd.add(v, total)
    source = out_residual if has_residual else x
    mean = splat(simd.first(simd.spread_add1(total)) / np.float32(size))
    squares = splat(np.float32(0))
    for i in range(0, size, WIDTH):
        v = simd.sub(load(source, i), mean)
        squares = simd.fma(v, v, squares)
    variance = simd.first(simd.spread_add1(squares)) / np.float32(size)
    inverse = splat(np.float32(1) / np.sqrt(variance + eps))
    for i in range(0, size, WIDTH):
        v = simd.mul(simd.sub(load(source, i), mean), inverse)
        if simd.address(weight) != 0:
            v = simd.mul(v, load(weight, i))
        if simd.address(bias) != 0:
            v = simd.add(v, load(bias, i))
        store(out, i, v)


@jit
def _layer_norm_items(args, x, residual, weight, bias, out, out_residual):
    rows, size, inner, outer_stride, inner_stride, per_item = args[8], args[9], args[10], args[11], args[12], args[13]
    out_stride, residual_stride, eps = args[14], args[15], np.float32(simd.as_float(args[16]))
    item = next_item(args)
    while item < args[1]:
        for row in range(item * per_item, min(rows, (item + 1) * per_item)):
            source = advance(x, row // inner * outer_stride + row % inner * inner_stride)
            before = advance(residual, row * residual_stride)
            _layer_norm_row(source, before, weight, bias, simd.address(residual) != 0, size, eps,
                            advance(out, row * out_stride), advance(out_residual, row * size))  # fmt: skip
        item = next_item(args)


@parallel_kernel("14qd")
def _layer_norm_bf16(args):
    pointer = simd.pointer_bf16
    _layer_norm_items(args, pointer(args[2]), pointer(args[3]), pointer(args[4]), pointer(args[5]), pointer(args[6]),
                      pointer(args[7]))  # fmt: skip


@parallel_kernel("14qd")
def _layer_norm_f32(args):
    pointer = simd.pointer_f32
    _layer_norm_items(args, pointer(args[2]), pointer(args[3]), pointer(args[4]), pointer(args[5]), pointer(args[6]),
                      pointer(args[7]))  # fmt: skip


def supports_layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None) -> bool:
    """As supports_rms_norm; weight and bias may be absent."""
    parameters = [tensor for tensor in (weight, bias) if tensor is not None]
    return _supports_rows(x, residual) and all(
        tensor.dtype == x.dtype and tensor.shape == x.shape[-1:] and tensor.is_contiguous() for tensor in parameters
    )


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, residual: Tensor | None
) -> Tensor | tuple[Tensor, Tensor]:
    """See kernels.elementwise.layer_norm."""
    kernel = _layer_norm_bf16 if x.dtype == torch.bfloat16 else _layer_norm_f32
    return _run(kernel, x, residual, (_address(weight), _address(bias)), (eps,))


def _supports_rows(x: Tensor, residual: Tensor | None) -> bool:
    """True for rows of whole vectors, with at most two strided axes before them, and a residual of dense rows."""
    return (
        x.dtype in DTYPES
        and 2 <= x.ndim <= 3
        and x.shape[-1] % WIDTH == 0
        and x.stride(-1) == 1
        and (residual is None or (residual.dtype == x.dtype and _has_dense_rows(residual)))
    )


def _has_dense_rows(residual: Tensor) -> bool:
    """True for [rows, n] with any stride between rows, and for any dense tensor."""
    return residual.stride(-1) == 1 if residual.ndim == 2 else residual.is_contiguous()


def _run(
    kernel: ParallelKernel, x: Tensor, residual: Tensor | None, weights: tuple[int, ...], numbers: tuple[float, ...]
) -> Tensor | tuple[Tensor, Tensor]:
    """Run the kernel of a norm over all rows of x; weights: addresses."""
    size, inner = x.shape[-1], x.shape[1] if x.ndim == 3 else 1
    rows = x.shape[0] * inner
    out = empty_rows(x.shape, x.dtype) if x.ndim == 2 else empty(x.shape, x.dtype)
    new_residual = None if residual is None else empty(x.shape, x.dtype)
    per_item = max(1, CHUNK // size)
    kernel(
        -(-rows // per_item), x.data_ptr(), _address(residual), *weights, out.data_ptr(), _address(new_residual),
        rows, size, inner, x.stride(0), x.stride(1) if x.ndim == 3 else 0, per_item,
        out.stride(-2), 0 if residual is None else residual.stride(-2), *numbers,
    )  # fmt: skip
    return out if new_residual is None else (out, new_residual)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
