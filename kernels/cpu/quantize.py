"""Writes rows into a quantised KV cache on a CPU, with the same bytes as kernels.cache.quantize.quantize_rows."""

import numpy as np
import torch
from torch import Tensor

from kernels.cpu import codes, simd
from kernels.cpu.parallel import jit, next_item, parallel_kernel
from kernels.cpu.simd import WIDTH, advance, load, read, splat, store
from kernels.kv_format import MIN_MAGNITUDE, PARAMETER_BYTES, kv_format_of

ITEM = 2048  # minimum numbers per work item
NEG_INF, ZERO, ONE = np.float32(-np.inf), np.float32(0), np.float32(1)
_MIN_MAGNITUDE = np.float32(MIN_MAGNITUDE)


@jit
def _survey(x, n, row):
    """Widen x into row[:n]; returns (largest number, smallest number, 0 or, if x has NaN or infinity, NaN)."""
    top = bottom = splat(NEG_INF)
    bad = splat(ZERO)
    for d in range(0, n, WIDTH):
        v = load(x, d)
        store(row, d, v)
        top, bottom = simd.maximum(top, v), simd.maximum(bottom, simd.sub(splat(ZERO), v))
        bad = simd.fma(v, splat(ZERO), bad)
    high, low = simd.first(simd.spread_max1(top)), -simd.first(simd.spread_max1(bottom))
    return high, low, simd.first(simd.spread_add1(bad))


@jit
def _encode_8bit(x, n, largest_code, row, target, word):
    """Store one row of int8 or fp8: codes at `target`, the fp32 scale at address `word`."""
    high, low, bad = _survey(x, n, row)
    scale = np.float32(max(max(high, -low), _MIN_MAGNITUDE) / largest_code + bad)
    inverse = splat(np.float32(ONE / scale))
    for d in range(0, n, WIDTH):
        codes.encode(target, d, simd.mul(load(row, d), inverse))
    simd.write(simd.pointer_f32(word), 0, scale)


@jit
def _encode_int4(x, n, row, target, word):
    """Store one row of int4: packed codes at `target`, two bf16 (scale, minimum) at `word`. row has 3 * n numbers."""
    high, low, bad = _survey(x, n, row)
    rounded = simd.pointer_bf16(simd.address(advance(row, n)))
    scale = np.float32(max(np.float32(high - low), _MIN_MAGNITUDE) / np.float32(15) + bad)
    store(rounded, 0, splat(scale))
    store(rounded, WIDTH, splat(np.float32(low + bad)))
    inverse, least = splat(np.float32(ONE / read(rounded, 0))), splat(read(rounded, WIDTH))
    simd.copy_bytes(word, simd.address(rounded), 2)
    simd.copy_bytes(word + 2, simd.address(advance(rounded, WIDTH)), 2)
    single = codes.pointer_int4(simd.address(advance(row, 2 * n)))  # one byte per code
    limit = splat(np.float32(-15))
    for d in range(0, n, WIDTH):
        scaled = simd.maximum(simd.mul(simd.sub(load(row, d), least), inverse), splat(ZERO))
        capped = simd.maximum(simd.sub(splat(ZERO), scaled), limit)
        codes.encode(single, d, simd.sub(splat(ZERO), capped))
    for i in range(0, n // 2, 8):
        codes.pack(target, i, single, i, n // 2 + i)


@jit
def _encode_head(x, cache, row, slot, head, heads, block_size, head_dim, largest_code):
    """Quantise one row into the page of its block and head."""
    row_bytes = head_dim * codes.bits(cache) // 8
    page = (slot // block_size * heads + head) * block_size * (row_bytes + PARAMETER_BYTES)
    target = advance(cache, page + slot % block_size * row_bytes)
    word = simd.address(cache) + page + block_size * row_bytes + slot % block_size * PARAMETER_BYTES
    if codes.is_int4(cache):
        _encode_int4(x, head_dim, row, target, word)
    else:
        _encode_8bit(x, head_dim, largest_code, row, target, word)


@jit
def _quantize_items(args, key, value, k_cache, v_cache):
    slots = simd.pointer_i64(args[6])
    tokens, heads, block_size, head_dim, per_item = args[7], args[8], args[9], args[10], args[11]
    largest_code = np.float32(simd.as_float(args[16]))
    scratch = np.empty(3 * head_dim + WIDTH, np.float32)
    row = simd.pointer_f32(scratch.ctypes.data)
    item = next_item(args)
    while item < args[1]:
        for token in range(item * per_item, min(tokens, (item + 1) * per_item)):
            slot = read(slots, token)
            if slot >= 0:
                for h in range(heads):
                    x, y = (
                        advance(key, token * args[12] + h * args[13]),
                        advance(value, token * args[14] + h * args[15]),
                    )
                    _encode_head(x, k_cache, row, slot, h, heads, block_size, head_dim, largest_code)
                    _encode_head(y, v_cache, row, slot, h, heads, block_size, head_dim, largest_code)
        item = next_item(args)
    simd.keep(scratch)


@parallel_kernel("14qd")
def _quantize_bf16_int8(args):
    pointer, page = simd.pointer_bf16, codes.pointer_int8
    _quantize_items(args, pointer(args[2]), pointer(args[3]), page(args[4]), page(args[5]))


@parallel_kernel("14qd")
def _quantize_bf16_fp8(args):
    pointer, page = simd.pointer_bf16, codes.pointer_fp8
    _quantize_items(args, pointer(args[2]), pointer(args[3]), page(args[4]), page(args[5]))


@parallel_kernel("14qd")
def _quantize_bf16_int4(args):
    pointer, page = simd.pointer_bf16, codes.pointer_int4
    _quantize_items(args, pointer(args[2]), pointer(args[3]), page(args[4]), page(args[5]))


@parallel_kernel("14qd")
def _quantize_f32_int8(args):
    pointer, page = simd.pointer_f32, codes.pointer_int8
    _quantize_items(args, pointer(args[2]), pointer(args[3]), page(args[4]), page(args[5]))


@parallel_kernel("14qd")
def _quantize_f32_fp8(args):
    pointer, page = simd.pointer_f32, codes.pointer_fp8
    _quantize_items(args, pointer(args[2]), pointer(args[3]), page(args[4]), page(args[5]))


@parallel_kernel("14qd")
def _quantize_f32_int4(args):
    pointer, page = simd.pointer_f32, codes.pointer_int4
    _quantize_items(args, pointer(args[2]), pointer(args[3]), page(args[4]), page(args[5]))


_KERNELS = {
    (torch.bfloat16, "int8"): _quantize_bf16_int8,
    (torch.bfloat16, "fp8"): _quantize_bf16_fp8,
    (torch.bfloat16, "int4"): _quantize_bf16_int4,
    (torch.float32, "int8"): _quantize_f32_int8,
    (torch.float32, "fp8"): _quantize_f32_fp8,
    (torch.float32, "int4"): _quantize_f32_int4,
}


def supports_quantize_and_cache(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> bool:
    """True for dense bf16 or fp32 rows of whole vectors, and caches of one quantised format."""
    return (
        kv_format_of(k_cache) is not None
        and key.dtype == value.dtype
        and key.dtype in (torch.bfloat16, torch.float32)
        and k_cache.dtype == v_cache.dtype
        and key.shape[2] % WIDTH == 0
        and key.stride(2) == value.stride(2) == 1
        and k_cache.is_contiguous()
        and v_cache.is_contiguous()
        and slots.dtype == torch.int64
        and slots.is_contiguous()
    )


def quantize_and_cache(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """See kernels.cache.reshape_and_cache."""
    tokens, heads, head_dim = key.shape
    kv_format = kv_format_of(k_cache)
    assert kv_format is not None, "supports_quantize_and_cache said so"
    per_item = max(1, ITEM // (2 * heads * head_dim))
    _KERNELS[key.dtype, kv_format.name](
        -(-tokens // per_item), key.data_ptr(), value.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(),
        slot_mapping.data_ptr(), tokens, heads, k_cache.shape[2], head_dim, per_item,
        key.stride(0), key.stride(1), value.stride(0), value.stride(1), 127.0 if kv_format.name == "int8" else 448.0,
    )  # fmt: skip
