"""Rows of a quantised KV cache: the arithmetic of kernels/kv_format.py in torch, and its Triton building blocks.

Every implementation makes the same fp32 operations in the same order, so that all write the same bytes. A row with NaN
or infinity gets NaN as its parameter: results computed from the row are NaN, and the request fails.
"""

import torch
from torch import Tensor

from kernels.dispatch import tl, triton
from kernels.kv_format import FP8, INT4, INT8, MIN_MAGNITUDE, PARAMETER_BYTES, KVFormat, kv_format_of

FP8_NATIVE = 4  # KV_FORMAT of readers on a GPU with instructions for e4m3


def read_code(kv_format: KVFormat | None, capability: int) -> int:
    """KV_FORMAT of a kernel that reads such a cache; 0 for plain floats. From sm_89 on one instruction converts two
    e4m3 numbers; sm_80 uses integer arithmetic."""
    if kv_format is FP8 and capability >= 89:
        return FP8_NATIVE
    return 0 if kv_format is None else kv_format.code


def split_pages(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Two views of a quantised cache [..., block_size, row_bytes + 4]: codes [..., block_size, row_bytes] in the
    cache's dtype, and parameters int32 [..., block_size]."""
    block_size, width = cache.shape[-2:]
    pages = cache.flatten(-2)  # a view, since pages are contiguous
    codes, parameters = pages.split([block_size * (width - PARAMETER_BYTES), block_size * PARAMETER_BYTES], dim=-1)
    return codes.unflatten(-1, (block_size, -1)), parameters.view(torch.int32)


def quantize_rows(x: Tensor, kv_format: KVFormat) -> tuple[Tensor, Tensor]:
    """Rows [..., head_dim] of any float dtype -> codes uint8 [..., row_bytes] and parameters int32 [...]."""
    x = x.float()
    bad = (x * 0).sum(-1)  # NaN if the row has NaN or infinity, else 0
    if kv_format is INT4:
        low, high = x.aminmax(dim=-1)
        scale = (high - low).clamp_min(MIN_MAGNITUDE).div(15).add(bad).bfloat16()
        low = low.add(bad).bfloat16()
        codes = ((x - low.float()[..., None]) * (1 / scale.float())[..., None]).round().clamp(0, 15).nan_to_num()
        first, second = codes.to(torch.uint8).chunk(2, dim=-1)
        return first | second << 4, torch.stack([scale, low], dim=-1).view(torch.int32).squeeze(-1)
    largest = x.abs().amax(-1).clamp_min(MIN_MAGNITUDE)
    scale = largest / (127 if kv_format is INT8 else 448) + bad
    scaled = (x * (1 / scale)[..., None]).nan_to_num()
    codes = scaled.round().to(torch.int8) if kv_format is INT8 else scaled.to(torch.float8_e4m3fn)
    return codes.view(torch.uint8), scale.view(torch.int32)


def dequantize_rows(codes: Tensor, parameters: Tensor, kv_format: KVFormat) -> Tensor:
    """codes [..., row_bytes] of any one-byte dtype, parameters int32 [...] -> fp32 [..., head_dim]."""
    if kv_format is INT4:
        packed, words = codes.view(torch.uint8), parameters[..., None]
        numbers = torch.cat([packed & 15, packed >> 4], dim=-1).float()
        return numbers * (words << 16).view(torch.float32) + (words & -65536).view(torch.float32)
    numbers = codes.view(getattr(torch, kv_format.dtype_name)).float()
    return numbers * parameters.view(torch.float32)[..., None]


def read_pages(cache: Tensor) -> Tensor:
    """Pages of a cache of any format [..., block_size, width] as fp32 rows [..., block_size, head_dim]."""
    kv_format = kv_format_of(cache)
    return cache.float() if kv_format is None else dequantize_rows(*split_pages(cache), kv_format)


def as_bytes(cache: Tensor) -> Tensor:
    """A view that Triton accepts on every device: fp8 as plain bytes, because sm_80 has no fp8 instructions."""
    return cache.view(torch.uint8) if kv_format_of(cache) is FP8 else cache


@triton.jit
def round_even(x):
    """The nearest integer, halves to even, for |x| < 2^22: after adding 1.5 * 2^23 no bit is left for a fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def encode_e4m3(x):
    """fp32 with |x| <= 448 -> the code of the nearest e4m3 (ties to even) as int32, by integer arithmetic."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960  # 8 * (127 - 7), the exponents' biases
    subnormal = round_even(tl.abs(x) * 512.0).to(tl.int32)
    return ((bits >> 24) & 0x80) | tl.where(magnitude < 0x3C800000, subnormal, normal)  # below 2^-6


@triton.jit
def bf16_bits(x):
    """fp32 -> the 16 bits of the nearest bf16, as int32. Uses integers, because the interpreter truncates."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
    return tl.where(x != x, 0x7FC0, rounded)


@triton.jit
def load_where(ptr, mask):
    """tl.load, with zeros where the mask is false; mask None loads everything."""
    if mask is None:
        return tl.load(ptr)
    else:
        return tl.load(ptr, mask=mask, other=0)


@triton.jit
def load_codes(ptr, page, offset, offs_d, mask, HEAD_DIM: tl.constexpr, KV_FORMAT: tl.constexpr, dtype: tl.constexpr):
    """Rows [BLOCK_N, BLOCK_D] of codes as numbers of `dtype`, exact in fp16, bf16 and fp32.

    page int64 [BLOCK_N]: offset of each row's page from ptr; offset [BLOCK_N]: the row in its page. With integer
    arithmetic (KV_FORMAT 2) the numbers of e4m3 are divided by 256, because its bits are those of an fp16 with another
    bias; load_parameters multiplies by 256.
    """
    if KV_FORMAT == 3:
        half = offs_d % (HEAD_DIM // 2)
        packed = load_where(ptr + ((offset * (HEAD_DIM // 2))[:, None] + half[None, :]) + page[:, None], mask)
        shift = tl.where(offs_d >= HEAD_DIM // 2, 4, 0)[None, :]
        if dtype == tl.float16:  # 1024 + code has the code as its last bits: a conversion takes four times as long
            bits = ((packed.to(tl.uint16) >> shift.to(tl.uint16)) & 15) | 0x6400
            return bits.to(tl.float16, bitcast=True) - 1024.0
        return ((packed.to(tl.int32) >> shift) & 15).to(dtype)
    codes = load_where(ptr + ((offset * HEAD_DIM)[:, None] + offs_d[None, :]) + page[:, None], mask)
    if KV_FORMAT == 4:
        return codes.to(tl.float8e4nv, bitcast=True).to(dtype)
    if KV_FORMAT == 2:
        bits = codes.to(tl.uint16)
        bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        return bits.to(tl.float16, bitcast=True).to(dtype)
    return codes.to(dtype)


@triton.jit
def load_parameters(ptr, page, offset, mask, ROWS_BYTES: tl.constexpr, KV_FORMAT: tl.constexpr):
    """fp32 [BLOCK_N] each: (factor of load_codes' numbers, minimum to add, which is 0 except for int4)."""
    words_ptr = (ptr + (ROWS_BYTES + 4 * offset) + page).to(tl.pointer_type(tl.int32))
    words = load_where(words_ptr, mask)
    if KV_FORMAT == 3:
        return (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)
    scale = words.to(tl.float32, bitcast=True)
    if KV_FORMAT == 2:
        scale *= 256.0
    return scale, tl.zeros_like(scale)
