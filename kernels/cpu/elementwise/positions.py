"""Rotary embedding of a CPU, and the copies of keys and values to their blocks."""

import torch
from torch import Tensor

from kernels.cpu import simd
from kernels.cpu.elementwise.work import CHUNK, DTYPES
from kernels.cpu.parallel import jit, next_item, parallel_kernel
from kernels.cpu.simd import WIDTH, advance, load, load_some, read, store, store_some


@jit
def _turn(x, first, second, i, count, cos_sin, half):
    """(a, b) -> (a cos - b sin, b cos + a sin) for `count` numbers a from `first` on and b from `second` on, in place;
    the first is number i of its half."""
    cos, sin = load_some(cos_sin, i, count), load_some(cos_sin, half + i, count)
    a, b = load_some(x, first, count), load_some(x, second, count)
    store_some(x, first, simd.sub(simd.mul(a, cos), simd.mul(b, sin)), count)
    store_some(x, second, simd.fma(a, sin, simd.mul(b, cos)), count)


@jit
def _rotate_heads(x, heads, head_stride, cos_sin, half):
    """Rotate [heads, head_dim] in place: (a, b) -> (a cos - b sin, b cos + a sin); b is rotary_dim / 2 after a."""
    whole = half // WIDTH * WIDTH
    for i in range(0, whole, WIDTH):
        cos, sin = load(cos_sin, i), load(cos_sin, half + i)
        for h in range(heads):
            at = h * head_stride + i
            a, b = load(x, at), load(x, at + half)
            store(x, at, simd.sub(simd.mul(a, cos), simd.mul(b, sin)))
            store(x, at + half, simd.fma(a, sin, simd.mul(b, cos)))
    if whole < half:
        for h in range(heads):
            at = h * head_stride + whole
            _turn(x, at, at + half, whole, half - whole, cos_sin, half)


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


def supports_rotary(positions: Tensor, q: Tensor, k: Tensor, cos_sin_cache: Tensor, interleaved: bool) -> bool:
    """True for any halves, interleaved ones of whole vectors; rows and heads may be strided."""
    return (
        q.dtype in DTYPES
        and k.dtype == q.dtype
        and positions.dtype == torch.int64
        and positions.is_contiguous()
        and cos_sin_cache.dtype == torch.float32
        and cos_sin_cache.is_contiguous()
        and (not interleaved or cos_sin_cache.shape[-1] % (2 * WIDTH) == 0)
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
