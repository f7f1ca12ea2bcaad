"""The memory-bound operators of a decoder layer on a CPU, one pass each where torch needs four to ten."""

import math

import numpy as np
import torch
from torch import Tensor

from kernels.cpu import simd
from kernels.cpu.parallel import empty, jit, next_item, parallel_kernel
from kernels.cpu.simd import WIDTH, advance, load, read, splat, store

CHUNK = 8192  # minimum elements per work item: about 2 us, well above the cost of handing an item out
DTYPES = (torch.bfloat16, torch.float32)
GATES = {"silu": 0, "gelu_tanh": 1}  # the functions of `gated`
GELU_LINEAR = 2 * math.sqrt(2 / math.pi)


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
    eps, offset = np.float32(simd.as_float(args[13])), np.float32(simd.as_float(args[14]))
    item = next_item(args)
    while item < args[1]:
        for row in range(item * per_item, min(rows, (item + 1) * per_item)):
            source = advance(x, row // inner * outer_stride + row % inner * inner_stride)
            at = row * size
            _rms_norm_row(source, advance(residual, at), weight, simd.address(residual) != 0, size, eps, offset,
                          advance(out, at), advance(out_residual, at))  # fmt: skip
        item = next_item(args)


@parallel_kernel("11q2d")
def _rms_norm_bf16(args):
    pointer = simd.pointer_bf16
    _rms_norm_items(args, pointer(args[2]), pointer(args[3]), pointer(args[4]), pointer(args[5]), pointer(args[6]))


@parallel_kernel("11q2d")
def _rms_norm_f32(args):
    pointer = simd.pointer_f32
    _rms_norm_items(args, pointer(args[2]), pointer(args[3]), pointer(args[4]), pointer(args[5]), pointer(args[6]))


def supports_rms_norm(x: Tensor, weight: Tensor, residual: Tensor | None) -> bool:
    """True for rows of whole vectors, with at most two strided axes before them, and a dense residual."""
    return (
        x.dtype in DTYPES
        and weight.dtype == x.dtype
        and 2 <= x.ndim <= 3
        and x.shape[-1] % WIDTH == 0
        and x.stride(-1) == 1
        and weight.is_contiguous()
        and (residual is None or (residual.dtype == x.dtype and residual.is_contiguous()))
    )


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, offset: float
) -> Tensor | tuple[Tensor, Tensor]:
    """See kernels.elementwise.rms_norm."""
    size, inner = x.shape[-1], x.shape[1] if x.ndim == 3 else 1
    rows = x.shape[0] * inner
    out = empty(x.shape, x.dtype)
    new_residual = None if residual is None else empty(x.shape, x.dtype)
    per_item = max(1, CHUNK // size)
    kernel = _rms_norm_bf16 if x.dtype == torch.bfloat16 else _rms_norm_f32
    kernel(
        -(-rows // per_item), x.data_ptr(), 0 if residual is None else residual.data_ptr(), weight.data_ptr(),
        out.data_ptr(), 0 if new_residual is None else new_residual.data_ptr(),
        rows, size, inner, x.stride(0), x.stride(1) if x.ndim == 3 else 0, per_item, eps, offset,
    )  # fmt: skip
    return out if new_residual is None else (out, new_residual)


@jit
def gated(gate, up, is_gelu):
    """act(gate) * up of vectors, where act(g) = g * sigmoid(z): SiLU has z = g, GELU by tanh z = 2 sqrt(2 / pi) (g +
    0.044715 g^3) (Hendrycks & Gimpel 2016, section 2)."""
    zero, one, limit = splat(np.float32(0)), splat(np.float32(1)), splat(np.float32(-88))
    linear, cubic = splat(np.float32(GELU_LINEAR)), splat(np.float32(GELU_LINEAR * 0.044715))
    z = simd.mul(gate, simd.fma(cubic, simd.mul(gate, gate), linear)) if is_gelu else gate
    bounded = simd.maximum(z, limit)  # exp(88) is the largest that fits fp32
    sigmoid = simd.div(one, simd.add(one, simd.exp(simd.sub(zero, bounded))))
    return simd.mul(simd.mul(gate, sigmoid), up)


@jit
def _gate_items(args, x, out):
    rows, size, stride, per_item, is_gelu = args[4], args[5], args[6], args[7], args[8]
    item = next_item(args)
    while item < args[1]:
        for row in range(item * per_item, min(rows, (item + 1) * per_item)):
            gate, up, target = advance(x, row * stride), advance(x, row * stride + size), advance(out, row * size)
            for i in range(0, size, WIDTH):
                store(target, i, gated(load(gate, i), load(up, i), is_gelu))
        item = next_item(args)


@parallel_kernel("7q")
def _gate_bf16(args):
    _gate_items(args, simd.pointer_bf16(args[2]), simd.pointer_bf16(args[3]))


@parallel_kernel("7q")
def _gate_f32(args):
    _gate_items(args, simd.pointer_f32(args[2]), simd.pointer_f32(args[3]))


def supports_gate(x: Tensor, function: str) -> bool:
    """True for SiLU and GELU by tanh of [rows, 2n] with rows of whole vectors."""
    served = function in GATES and x.dtype in DTYPES
    return served and x.ndim == 2 and x.stride(1) == 1 and x.shape[1] % (2 * WIDTH) == 0


def gate(x: Tensor, function: str) -> Tensor:
    """act(gate) * up, see kernels.elementwise.activation.gated_activation."""
    rows, size = x.shape[0], x.shape[1] // 2
    out = empty((rows, size), x.dtype)
    per_item = max(1, CHUNK // size)
    kernel = _gate_bf16 if x.dtype == torch.bfloat16 else _gate_f32
    is_gelu = GATES[function]
    kernel(-(-rows // per_item), x.data_ptr(), out.data_ptr(), rows, size, x.stride(0), per_item, is_gelu)
    return out


@jit
def _rotate_heads(x, heads, head_stride, cos_sin, half):
    """Rotate [heads, head_dim] in place: (a, b) -> (a cos - b sin, b cos + a sin); b is rotary_dim / 2 after a."""
    for i in range(0, half, WIDTH):
        cos, sin = load(cos_sin, i), load(cos_sin, half + i)
        for h in range(heads):
            at = h * head_stride + i
            a, b = load(x, at), load(x, at + half)
            store(x, at, simd.sub(simd.mul(a, cos), simd.mul(b, sin)))
            store(x, at + half, simd.fma(a, sin, simd.mul(b, cos)))


@jit
def _rotate_neighbours(x, heads, head_stride, cos_sin, half):
    """_rotate_heads where b is the element after a."""
    for i in range(0, half, WIDTH):
        cos, sin = load(cos_sin, i), load(cos_sin, half + i)
        for h in range(heads):
            at = h * head_stride + 2 * i
            a, b = simd.load_even_odd(x, at)
            turned = simd.sub(simd.mul(a, cos), simd.mul(b, sin))
            simd.store_even_odd(x, at, turned, simd.fma(a, sin, simd.mul(b, cos)))


@jit
def _rotary_items(args, q, k):
    positions, cos_sin = simd.pointer_i64(args[4]), simd.pointer_f32(args[5])
    tokens, half, per_item, interleaved = args[6], args[7], args[8], args[15]
    item = next_item(args)
    while item < args[1]:
        for token in range(item * per_item, min(tokens, (item + 1) * per_item)):
            angles = advance(cos_sin, read(positions, token) * 2 * half)
            queries, keys = advance(q, token * args[9]), advance(k, token * args[10])
            if interleaved:
                _rotate_neighbours(queries, args[11], args[12], angles, half)
                _rotate_neighbours(keys, args[13], args[14], angles, half)
            else:
                _rotate_heads(queries, args[11], args[12], angles, half)
                _rotate_heads(keys, args[13], args[14], angles, half)
        item = next_item(args)


@parallel_kernel("14q")
def _rotary_bf16(args):
    _rotary_items(args, simd.pointer_bf16(args[2]), simd.pointer_bf16(args[3]))


@parallel_kernel("14q")
def _rotary_f32(args):
    _rotary_items(args, simd.pointer_f32(args[2]), simd.pointer_f32(args[3]))


def supports_rotary(positions: Tensor, q: Tensor, k: Tensor, cos_sin_cache: Tensor) -> bool:
    """True for halves of whole vectors; rows and heads may be strided."""
    return (
        q.dtype in DTYPES
        and k.dtype == q.dtype
        and positions.dtype == torch.int64
        and positions.is_contiguous()
        and cos_sin_cache.dtype == torch.float32
        and cos_sin_cache.is_contiguous()
        and cos_sin_cache.shape[-1] % (2 * WIDTH) == 0
        and q.stride(-1) == k.stride(-1) == 1
    )


def rotary_embedding(positions: Tensor, q: Tensor, k: Tensor, cos_sin_cache: Tensor, interleaved: bool) -> None:
    """See kernels.elementwise.rotary_embedding."""
    tokens, num_heads, head_dim = q.shape
    per_item = max(1, CHUNK // (num_heads * head_dim))
    kernel = _rotary_bf16 if q.dtype == torch.bfloat16 else _rotary_f32
    kernel(
        -(-tokens // per_item), q.data_ptr(), k.data_ptr(), positions.data_ptr(), cos_sin_cache.data_ptr(),
        tokens, cos_sin_cache.shape[-1] // 2, per_item, q.stride(0), k.stride(0),
        num_heads, q.stride(1), k.shape[1], k.stride(1), interleaved,
    )  # fmt: skip


@parallel_kernel("14q")
def _reshape_and_cache(args):
    key, value, k_cache, v_cache = args[2], args[3], args[4], args[5]  # byte addresses: the copy ignores the dtype
    slots = simd.pointer_i64(args[6])
    tokens, heads, block_size, head_bytes, per_item = args[7], args[8], args[9], args[10], args[11]
    item = next_item(args)
    while item < args[1]:
        for token in range(item * per_item, min(tokens, (item + 1) * per_item)):
            slot = read(slots, token)
            if slot >= 0:
                block, offset = slot // block_size, slot % block_size
                for h in range(heads):
                    at = ((block * heads + h) * block_size + offset) * head_bytes
                    simd.copy_bytes(k_cache + at, key + token * args[12] + h * args[13], head_bytes)
                    simd.copy_bytes(v_cache + at, value + token * args[14] + h * args[15], head_bytes)
        item = next_item(args)


def supports_reshape_and_cache(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> bool:
    """True for any dtype with dense heads and caches of the same dtype."""
    return (
        key.dtype == value.dtype == k_cache.dtype == v_cache.dtype
        and key.stride(2) == value.stride(2) == 1
        and k_cache.is_contiguous()
        and v_cache.is_contiguous()
        and slots.dtype == torch.int64
        and slots.is_contiguous()
    )


def reshape_and_cache(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """See kernels.cache.reshape_and_cache."""
    tokens, heads, head_dim = key.shape
    size = key.element_size()
    per_item = max(1, CHUNK // (2 * heads * head_dim))
    _reshape_and_cache(
        -(-tokens // per_item), key.data_ptr(), value.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(),
        slot_mapping.data_ptr(), tokens, heads, k_cache.shape[2], head_dim * size, per_item,
        key.stride(0) * size, key.stride(1) * size, value.stride(0) * size, value.stride(1) * size,
    )  # fmt: skip


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
