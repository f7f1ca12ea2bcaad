"""Writes the keys and values of a step's tokens into their slots of the paged KV cache."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.aot_configuration import AotConfiguration, power_of_2
from kernels.cache.quantize import as_bytes, bf16_bits, encode_e4m3, quantize_rows, round_even, split_pages
from kernels.dispatch import cpu_kernels, tl, triton, use_triton
from kernels.kv_format import KV_FORMATS, KVFormat, kv_format_of


def reshape_and_cache(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store row t of key and value [num_tokens, num_kv_heads, head_dim] at slot_mapping[t] of the caches.

    Caches are [num_blocks, num_kv_heads, block_size, head_dim], or pages of a format of kernels/kv_format.py; then each
    row is quantised by itself. slot = block_id * block_size + offset, int64; -1 skips the row (padding).
    key and value may be views of a wider row whose last axis is contiguous.
    """
    if use_triton(key):
        _launch(key, value, k_cache, v_cache, slot_mapping)
        return
    cpu = cpu_kernels() if key.device.type == "cpu" else None
    if cpu and cpu.positions.supports_reshape_and_cache(key, value, k_cache, v_cache, slot_mapping):
        cpu.positions.reshape_and_cache(key, value, k_cache, v_cache, slot_mapping)
    elif cpu and cpu.quantize.supports_quantize_and_cache(key, value, k_cache, v_cache, slot_mapping):
        cpu.quantize.quantize_and_cache(key, value, k_cache, v_cache, slot_mapping)
    else:
        reshape_and_cache_reference(key, value, k_cache, v_cache, slot_mapping)


def _launch(key, value, k_cache, v_cache, slot_mapping):
    num_tokens, num_kv_heads, head_dim = key.shape
    kv_format = kv_format_of(k_cache)
    if num_tokens == 0:
        return
    if kv_format is not None:
        _launch_quantized(key, value, as_bytes(k_cache), as_bytes(v_cache), slot_mapping, kv_format)
        return
    reshape_and_cache_kernel[(num_tokens,)](
        key, value, k_cache, v_cache, slot_mapping, key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        **constants(num_kv_heads, head_dim, k_cache.shape[2]), num_warps=4,
    )  # fmt: skip


def _launch_quantized(key, value, k_cache, v_cache, slot_mapping, kv_format: KVFormat):
    num_tokens, num_kv_heads, head_dim = key.shape
    quantize_and_cache_kernel[(num_tokens, 2)](
        key, value, k_cache, v_cache, slot_mapping, key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        **quantize_constants(num_kv_heads, head_dim, k_cache.shape[2], kv_format), num_warps=4,
    )  # fmt: skip


def constants(num_kv_heads: int, head_dim: int, block_size: int) -> dict[str, int]:
    """The compile-time arguments of reshape_and_cache_kernel."""
    return {
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "BLOCK_H": power_of_2(num_kv_heads),
        "BLOCK_D": power_of_2(head_dim),
    }


def quantize_constants(num_kv_heads: int, head_dim: int, block_size: int, kv_format: KVFormat) -> dict[str, int]:
    """The compile-time arguments of quantize_and_cache_kernel. A program handles bytes, in int4 two numbers each."""
    width = kv_format.row_bytes(head_dim)
    return {
        "NUM_KV_HEADS": num_kv_heads,
        "ROW_BYTES": width,
        "BLOCK_SIZE": block_size,
        "BLOCK_H": 1 << (num_kv_heads - 1).bit_length(),
        "BLOCK_B": 1 << (width - 1).bit_length(),
        "KV_FORMAT": kv_format.code,
    }


@triton.jit
def reshape_and_cache_kernel(
    key_ptr,
    value_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_mapping_ptr,
    key_stride_row,
    key_stride_head,
    value_stride_row,
    value_stride_head,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (num_tokens,): writes all heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if slot < 0:
        return
    head, offs_d = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_D)[None, :]
    mask = (head < NUM_KV_HEADS) & (offs_d < HEAD_DIM)
    target = cache_row(slot, head, NUM_KV_HEADS, BLOCK_SIZE) * HEAD_DIM + offs_d
    key = tl.load(key_ptr + token * key_stride_row + head * key_stride_head + offs_d, mask=mask)
    value = tl.load(value_ptr + token * value_stride_row + head * value_stride_head + offs_d, mask=mask)
    tl.store(k_cache_ptr + target, key, mask=mask)
    tl.store(v_cache_ptr + target, value, mask=mask)


@triton.jit
def cache_row(slot, head, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """The row of a plain cache that holds `head` of the token in `slot`, int64 like slot."""
    return ((slot // BLOCK_SIZE) * NUM_KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE


@triton.jit
def quantize_and_cache_kernel(
    key_ptr,
    value_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_mapping_ptr,
    key_stride_row,
    key_stride_head,
    value_stride_row,
    value_stride_head,
    NUM_KV_HEADS: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_B: tl.constexpr,
    KV_FORMAT: tl.constexpr,
):
    """Grid (num_tokens, 2): quantises the keys, or the values, of all heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if slot < 0:
        return
    head = tl.arange(0, BLOCK_H)
    if tl.program_id(1) == 0:
        quantize_heads(
            key_ptr + token * key_stride_row, key_stride_head, head, k_cache_ptr, slot,
            NUM_KV_HEADS, ROW_BYTES, BLOCK_SIZE, BLOCK_B, KV_FORMAT,
        )  # fmt: skip
    else:
        quantize_heads(
            value_ptr + token * value_stride_row, value_stride_head, head, v_cache_ptr, slot,
            NUM_KV_HEADS, ROW_BYTES, BLOCK_SIZE, BLOCK_B, KV_FORMAT,
        )  # fmt: skip


@triton.jit
def quantize_heads(
    x_ptr,
    stride_head,
    head,
    cache_ptr,
    slot,
    NUM_KV_HEADS: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    KV_FORMAT: tl.constexpr,
):
    """Quantise the rows of heads `head` [BLOCK_H] of one token into their pages, like quantize_rows."""
    offs = tl.arange(0, BLOCK_B)
    head_mask = head < NUM_KV_HEADS
    mask = head_mask[:, None] & (offs < ROW_BYTES)[None, :]
    at = x_ptr + head[:, None] * stride_head + offs[None, :]
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    bad = tl.sum(x * 0.0, 1)  # NaN if the row has NaN or infinity
    if KV_FORMAT == 3:
        y = tl.load(at + ROW_BYTES, mask=mask, other=0.0).to(tl.float32)
        codes, words = pack_int4(x, y, bad + tl.sum(y * 0.0, 1), mask)
    else:
        inverse, words = row_scale(tl.max(tl.abs(x), 1), bad, KV_FORMAT)
        codes = encode(x, inverse, KV_FORMAT)
    page = page_start(slot, head, NUM_KV_HEADS, ROW_BYTES, BLOCK_SIZE)
    row = (page + (slot % BLOCK_SIZE) * ROW_BYTES)[:, None] + offs[None, :]
    tl.store(cache_ptr + row, codes.to(cache_ptr.dtype.element_ty), mask=mask)
    store_words(cache_ptr, page, slot % BLOCK_SIZE, words, head_mask, ROW_BYTES, BLOCK_SIZE)


@triton.jit
def page_start(
    slot, head, NUM_KV_HEADS: tl.constexpr, ROW_BYTES: tl.constexpr, BLOCK_SIZE: tl.constexpr
):  # fmt: skip
    """First byte of the page of each head, int64 like slot."""
    return ((slot // BLOCK_SIZE) * NUM_KV_HEADS + head) * (BLOCK_SIZE * (ROW_BYTES + 4))


@triton.jit
def store_words(
    cache_ptr, page, offset, words, mask, ROW_BYTES: tl.constexpr, BLOCK_SIZE: tl.constexpr
):  # fmt: skip
    """The address of the int32 parameter of one row of each page, behind the codes of all rows."""
    words_ptr = (cache_ptr + page + BLOCK_SIZE * ROW_BYTES).to(tl.pointer_type(tl.int32))
    tl.store(words_ptr + offset, words, mask=mask)


@triton.jit
def row_scale(largest, bad, KV_FORMAT: tl.constexpr):
    """int8 and fp8: largest |x| of each row -> (1 / scale, the bits of the scale). `bad` is 0 or NaN.

    The compiler may fuse a multiplication with the rounding after it, so a code next to a tie may differ by one from
    the reference.
    """
    limit: tl.constexpr = 127.0 if KV_FORMAT == 1 else 448.0
    scale = tl.div_rn(tl.maximum(largest, 1e-30), limit) + bad
    return tl.div_rn(1.0, scale), scale.to(tl.int32, bitcast=True)


@triton.jit
def encode(x, inverse, KV_FORMAT: tl.constexpr):
    """int8 and fp8: rows fp32 [BLOCK_H, n] -> codes int32."""
    scaled = x * inverse[:, None]
    scaled = tl.where(scaled == scaled, scaled, 0.0)  # NaN has no code; the scale carries it
    if KV_FORMAT == 1:
        return round_even(scaled).to(tl.int32)
    else:
        return encode_e4m3(scaled)


@triton.jit
def pack_int4(x, y, bad, mask):
    """int4: first and second half of each row, fp32 [BLOCK_H, n] -> (codes, two per byte; parameters [BLOCK_H])."""
    inf = float("inf")
    low = tl.min(tl.where(mask, tl.minimum(x, y), inf), 1)
    high = tl.max(tl.where(mask, tl.maximum(x, y), -inf), 1)
    scale_bits = bf16_bits(tl.div_rn(tl.maximum(high - low, 1e-30), 15.0) + bad)
    low_bits = bf16_bits(low + bad)
    inverse = tl.div_rn(1.0, (scale_bits << 16).to(tl.float32, bitcast=True))[:, None]
    low = (low_bits << 16).to(tl.float32, bitcast=True)[:, None]
    first = tl.minimum(tl.maximum(round_even((x - low) * inverse), 0.0), 15.0).to(tl.int32)
    second = tl.minimum(tl.maximum(round_even((y - low) * inverse), 0.0), 15.0).to(tl.int32)
    return first | (second << 4), scale_bits | (low_bits << 16)


def reshape_and_cache_reference(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """reshape_and_cache in torch."""
    keep = slot_mapping >= 0
    slots, block_size, kv_format = slot_mapping[keep], k_cache.shape[2], kv_format_of(k_cache)
    block_ids, offsets = slots // block_size, slots % block_size
    for rows, cache in ((key[keep], k_cache), (value[keep], v_cache)):
        if kv_format is None:
            cache[block_ids, :, offsets] = rows
        else:
            codes, parameters = split_pages(cache.view(torch.uint8))
            codes[block_ids, :, offsets], parameters[block_ids, :, offsets] = quantize_rows(rows, kv_format)


def aot_configurations(capability: int) -> Iterator[AotConfiguration]:
    """Yields few heads and many heads, a head size that fills its tile and one that does not."""
    strides = ("key_stride_row", "key_stride_head", "value_stride_row", "value_stride_head")
    for dtype, num_kv_heads, head_dim in (("bf16", 8, 128), ("fp16", 3, 80), ("fp32", 2, 64)):
        label, quick = f"{num_kv_heads} heads d {head_dim}", dtype == "bf16"
        yield AotConfiguration(
            reshape_and_cache_kernel, label, dtype, constants(num_kv_heads, head_dim, 16), num_warps=4,
            types={"slot_mapping_ptr": "*i64"}, multiples_of_16=strides, quick=quick,
        )  # fmt: skip
        for kv_format in KV_FORMATS.values():
            pages = "*i8" if kv_format.name == "int8" else "*u8"
            yield AotConfiguration(
                quantize_and_cache_kernel, f"{label} {kv_format.name}", dtype,
                quantize_constants(num_kv_heads, head_dim, 16, kv_format), num_warps=4,
                types={"slot_mapping_ptr": "*i64", "k_cache_ptr": pages, "v_cache_ptr": pages},
                multiples_of_16=strides, quick=quick,
            )  # fmt: skip
