"""Triton functions that give 4-bit and 8-bit codes their values, in the registers of a kernel that reads them packed.

int4, int8 and e4m3 have no number that bf16 or fp16 cannot hold, so decoding rounds nothing. int4 and, in bf16, int8
and e4m3 are decoded four bytes at a time, in PTX: the bits of a code are moved to where a float has its mantissa
(int4: 128 + code in bf16, 1024 + code in fp16; int8: 2^23 + 128 + code in fp32) or its exponent (e4m3), and a
subtraction or a multiplication makes the value. By count that is 1.5 to 2.75 instructions per weight; through fp32 it
is 5 to 9, more than an H100 has in the time that it reads the codes.
"""

from typing import Any

from kernels.dispatch import HAS_TRITON, INTERPRET, tl, triton

# Kinds of codes: 4 bits that mean -8 to 7, a codebook of 16 values, int8, e4m3, 4 bits that mean 0 to 15.
INT4_CODES, CODEBOOK, INT8_CODES, FP8_CODES, UINT4_CODES = 0, 1, 2, 3, 4

# lop3 with the table 0xEA is (first & second) | third.
_INT4_PAIRS = """{{
.reg .b32 a, b, one, less;
prmt.b32 a, $2, 0, 0x4140;
prmt.b32 b, $2, 0, 0x4342;
{shift}
lop3.b32 a, a, 0x000F000F, {magic}, 0xEA;
lop3.b32 b, b, 0x000F000F, {magic}, 0xEA;
mov.b32 one, {one};
mov.b32 less, {less};
fma.rn.{type} $0, a, one, less;
fma.rn.{type} $1, b, one, less;
}}"""
_SHIFT = "shr.u32 a, a, 4;\nshr.u32 b, b, 4;"
_BF16 = {"magic": "0x43004300", "one": "0x3F803F80", "type": "bf16x2"}  # 128, 1
_FP16 = {"magic": "0x64006400", "one": "0x3C003C00", "type": "f16x2"}  # 1024, 1
_SIGNED_BF16, _UNSIGNED_BF16 = "0xC308C308", "0xC300C300"  # -136, -128
_SIGNED_FP16, _UNSIGNED_FP16 = "0xE408E408", "0xE400E400"  # -1032, -1024
# A byte in the mantissa of 2^23: 2^23 + 128 + code, as fp32
_INT8_PAIRS = """{
.reg .b32 a, b, c, d, w;
.reg .f32 e, f, g, h;
xor.b32 w, $2, 0x80808080;
prmt.b32 a, w, 0x4B000000, 0x7440;
prmt.b32 b, w, 0x4B000000, 0x7441;
prmt.b32 c, w, 0x4B000000, 0x7442;
prmt.b32 d, w, 0x4B000000, 0x7443;
mov.b32 e, a;
mov.b32 f, b;
mov.b32 g, c;
mov.b32 h, d;
sub.f32 e, e, 0f4B000080;
sub.f32 f, f, 0f4B000080;
sub.f32 g, g, 0f4B000080;
sub.f32 h, h, 0f4B000080;
cvt.rn.bf16x2.f32 $0, f, e;
cvt.rn.bf16x2.f32 $1, h, g;
}"""
# The exponent of e4m3 is 2^120 too small for bf16's bias.
_E4M3_PAIRS = """{
.reg .b32 a, b, s, t, much, none;
prmt.b32 a, $2, 0, 0x1404;
prmt.b32 b, $2, 0, 0x3424;
and.b32 s, a, 0x80008000;
and.b32 t, b, 0x80008000;
shr.u32 a, a, 4;
shr.u32 b, b, 4;
lop3.b32 a, a, 0x07F007F0, s, 0xEA;
lop3.b32 b, b, 0x07F007F0, t, 0xEA;
mov.b32 much, 0x7B807B80;
mov.b32 none, 0x80008000;
fma.rn.bf16x2 $0, a, much, none;
fma.rn.bf16x2 $1, b, much, none;
}"""

_SCALE_PAIR = "fma.rn.{type}x2 $0, $1, $2, $3;"


def _constant(value: Any) -> Any:
    return tl.constexpr(value) if HAS_TRITON else value


IN_PAIRS = _constant(not INTERPRET)  # the interpreter runs no PTX
LOW_BF16, HIGH_BF16, UNSIGNED_LOW_BF16, UNSIGNED_HIGH_BF16 = (
    _constant(_INT4_PAIRS.format(shift=shift, less=less, **_BF16))
    for less in (_SIGNED_BF16, _UNSIGNED_BF16) for shift in ("", _SHIFT)
)  # fmt: skip
LOW_FP16, HIGH_FP16, UNSIGNED_LOW_FP16, UNSIGNED_HIGH_FP16 = (
    _constant(_INT4_PAIRS.format(shift=shift, less=less, **_FP16))
    for less in (_SIGNED_FP16, _UNSIGNED_FP16) for shift in ("", _SHIFT)
)  # fmt: skip
SCALE_BF16, SCALE_FP16 = (_constant(_SCALE_PAIR.format(type=name)) for name in ("bf16", "f16"))
INT8_BF16, E4M3_BF16 = _constant(_INT8_PAIRS), _constant(_E4M3_PAIRS)


@triton.jit
def low_values(codes, table_ptr, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Values of the low halves of bytes: uint8 -> DTYPE of the same shape."""
    if KIND == 1:
        return tl.load(table_ptr + (codes & 15).to(tl.int32)).to(DTYPE)
    elif IN_PAIRS and DTYPE == tl.bfloat16:
        pairs: tl.constexpr = LOW_BF16 if KIND == 0 else UNSIGNED_LOW_BF16
        return tl.inline_asm_elementwise(pairs, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
    elif IN_PAIRS and DTYPE == tl.float16:
        pairs: tl.constexpr = LOW_FP16 if KIND == 0 else UNSIGNED_LOW_FP16
        return tl.inline_asm_elementwise(pairs, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)
    else:
        return ((codes & 15).to(tl.float32) - (8.0 if KIND == 0 else 0.0)).to(DTYPE)


@triton.jit
def high_values(codes, table_ptr, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Values of the high halves of bytes: uint8 -> DTYPE of the same shape."""
    if KIND == 1:
        return tl.load(table_ptr + (codes >> 4).to(tl.int32)).to(DTYPE)
    elif IN_PAIRS and DTYPE == tl.bfloat16:
        pairs: tl.constexpr = HIGH_BF16 if KIND == 0 else UNSIGNED_HIGH_BF16
        return tl.inline_asm_elementwise(pairs, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
    elif IN_PAIRS and DTYPE == tl.float16:
        pairs: tl.constexpr = HIGH_FP16 if KIND == 0 else UNSIGNED_HIGH_FP16
        return tl.inline_asm_elementwise(pairs, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)
    else:
        return ((codes >> 4).to(tl.float32) - (8.0 if KIND == 0 else 0.0)).to(DTYPE)


@triton.jit
def byte_values(codes, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Values of bytes of int8 or e4m3: uint8 -> DTYPE of the same shape."""
    if KIND == 2 and IN_PAIRS and DTYPE == tl.bfloat16:
        return tl.inline_asm_elementwise(INT8_BF16, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
    elif KIND == 2:
        # 2^23 + (code + 128) as fp32, for which no conversion is needed
        magic = (codes ^ 128).to(tl.int32) | 0x4B000000
        return (magic.to(tl.float32, bitcast=True) - 8388736.0).to(DTYPE)
    elif IN_PAIRS and DTYPE == tl.bfloat16:
        return tl.inline_asm_elementwise(E4M3_BF16, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        # e4m3 in the upper bits of fp16 is 2^-8 of its value, subnormal numbers too
        wide = codes.to(tl.uint16)
        half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        return (half.to(tl.float16, bitcast=True) * 256.0).to(DTYPE)


@triton.jit
def scaled(values, scale, offset, DTYPE: tl.constexpr):
    """values * scale + offset, DTYPE of one shape: two numbers per instruction, which Triton itself does not do."""
    if IN_PAIRS and DTYPE == tl.bfloat16:
        return tl.inline_asm_elementwise(
            SCALE_BF16, "=r,r,r,r", [values, scale, offset], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    elif IN_PAIRS and DTYPE == tl.float16:
        return tl.inline_asm_elementwise(
            SCALE_FP16, "=r,r,r,r", [values, scale, offset], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        return values * scale + offset
