"""Triton functions that give 4-bit and 8-bit codes their values, in the registers of a kernel that reads them packed.

int4, int8 and e4m3 have no number that bf16 or fp16 cannot hold, so decoding rounds nothing. int4 and, in bf16, int8
and e4m3 are decoded four bytes at a time, in PTX: the bits of a code are moved to where a float has its mantissa
(int4: 128 + code in bf16, 1024 + code in fp16; int8: 2^23 + 128 + code in fp32) or its exponent (e4m3), and a
subtraction or a multiplication makes the value. By count that is 1.5 to 2.75 instructions per weight; through fp32 it
is 5 to 9, more than an H100 has in the time that it reads the codes.
"""

from typing import Any

from kernels.dispatch import HAS_TRITON, INTERPRET, tl, triton

# Kinds of codes: signed integers of 4 bits, a codebook of 16 values, int8, e4m3.
INT4_CODES, CODEBOOK, INT8_CODES, FP8_CODES = 0, 1, 2, 3

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
_BF16 = {"magic": "0x43004300", "one": "0x3F803F80", "less": "0xC308C308", "type": "bf16x2"}  # 128, 1, -136
_FP16 = {"magic": "0x64006400", "one": "0x3C003C00", "less": "0xE408E408", "type": "f16x2"}  # 1024, 1, -1032
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


def _constant(value: Any) -> Any:
    return tl.constexpr(value) if HAS_TRITON else value


IN_PAIRS = _constant(not INTERPRET)  # the interpreter runs no PTX
LOW_BF16, HIGH_BF16 = (_constant(_INT4_PAIRS.format(shift=shift, **_BF16)) for shift in ("", _SHIFT))
LOW_FP16, HIGH_FP16 = (_constant(_INT4_PAIRS.format(shift=shift, **_FP16)) for shift in ("", _SHIFT))
INT8_BF16, E4M3_BF16 = _constant(_INT8_PAIRS), _constant(_E4M3_PAIRS)


@triton.jit
def low_values(codes, table_ptr, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Values of the low halves of bytes: uint8 -> DTYPE of the same shape."""
    if KIND == 1:
        return tl.load(table_ptr + (codes & 15).to(tl.int32)).to(DTYPE)
    elif IN_PAIRS and DTYPE == tl.bfloat16:
        return tl.inline_asm_elementwise(LOW_BF16, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
    elif IN_PAIRS and DTYPE == tl.float16:
        return tl.inline_asm_elementwise(LOW_FP16, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)
    else:
        return ((codes & 15).to(tl.float32) - 8.0).to(DTYPE)


@triton.jit
def high_values(codes, table_ptr, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Values of the high halves of bytes: uint8 -> DTYPE of the same shape."""
    if KIND == 1:
        return tl.load(table_ptr + (codes >> 4).to(tl.int32)).to(DTYPE)
    elif IN_PAIRS and DTYPE == tl.bfloat16:
        return tl.inline_asm_elementwise(HIGH_BF16, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
    elif IN_PAIRS and DTYPE == tl.float16:
        return tl.inline_asm_elementwise(HIGH_FP16, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)
    else:
        return ((codes >> 4).to(tl.float32) - 8.0).to(DTYPE)


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
