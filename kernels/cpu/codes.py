"""The codes of a quantised KV cache (kernels/kv_format.py) as SIMD vectors, for numba.

A pointer to codes is a `CPointer` to an element type that names the format. `simd.advance` moves the pointer in bytes,
and loads take the index of a number in its row. `simd.load` and `simd.load_pair` decode with `load16` and `load_pair`
of this file. A pair is 32 numbers: in 8-bit formats the next 32 in order; in int4 16 of the row's first half and the 16
of the second half that share their bytes. Queries are put into the same order before they are multiplied with pairs.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

WIDTH = 16

_F32, _I8, _I32, _I64 = ir.FloatType(), ir.IntType(8), ir.IntType(32), ir.IntType(64)
_F32V, _I8V, _I32V = (ir.VectorType(scalar, WIDTH) for scalar in (_F32, _I8, _I32))


class CodeType(types.Type):
    """The numba type of one byte of codes, named after the format."""


class VecType(types.Type):
    """The numba type of a Vec: 16 float32."""

    def __init__(self) -> None:
        super().__init__(name="Vec")


@register_model(CodeType)
class _CodeModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, _I8)


@register_model(VecType)
class _VecModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, _F32V)


Vec = VecType()
INT8, FP8, INT4 = (CodeType(name) for name in ("int8", "fp8", "int4"))
FORMATS = (INT8, FP8, INT4)
F32Pointer = types.CPointer(types.float32)


def constant(element, value):
    """A vector of equal integers or floats."""
    return ir.Constant(ir.VectorType(element, WIDTH), [value] * WIDTH)


def _load(builder, pointer, index, count):
    vector = ir.VectorType(_I8, count)
    return builder.load(builder.bitcast(builder.gep(pointer, [index]), vector.as_pointer()), align=1)


def byte_offset(builder, code_type, index):
    """Offset of number `index` of a row, in bytes."""
    return builder.lshr(index, ir.Constant(_I64, 1)) if code_type is INT4 else index


def _decode(builder, code_type, codes):
    """Sixteen bytes, each one code of an 8-bit format, as floats."""
    wide = builder.sext(codes, _I32V)
    if code_type is INT8:
        return builder.sitofp(wide, _F32V)
    # Move the sign to its place and the other seven bits to the low end of the exponent: 2^120 too small, then scaled
    # exactly.
    bits = builder.and_(builder.shl(wide, constant(_I32, 20)), constant(_I32, 0x87F00000 - (1 << 32)))
    return builder.fmul(builder.bitcast(bits, _F32V), constant(_F32, 2.0**120))


def _nibbles(builder, packed):
    """The low and the high halves of packed bytes, as <n x float> each."""
    count = packed.type.count
    wide = builder.zext(packed, ir.VectorType(_I32, count))
    low = builder.and_(wide, ir.Constant(wide.type, [15] * count))
    high = builder.lshr(wide, ir.Constant(wide.type, [4] * count))
    return [builder.sitofp(half, ir.VectorType(_F32, count)) for half in (low, high)]


def load16(builder, code_type, pointer, index):
    """Numbers index : index + 16; in int4 the numbers in the last 8 bytes of a row, 8 of each half."""
    at = byte_offset(builder, code_type, index)
    if code_type is not INT4:
        return _decode(builder, code_type, _load(builder, pointer, at, WIDTH))
    low, high = _nibbles(builder, _load(builder, pointer, at, 8))
    return builder.shuffle_vector(low, high, ir.Constant(_I32V, list(range(WIDTH))))


def load_pair(builder, code_type, pointer, index):
    """The pair of 32 numbers that begins at `index`, as two vectors."""
    at = byte_offset(builder, code_type, index)
    if code_type is INT4:
        return _nibbles(builder, _load(builder, pointer, at, WIDTH))
    second = builder.add(at, ir.Constant(_I64, WIDTH))
    return [_decode(builder, code_type, _load(builder, pointer, i, WIDTH)) for i in (at, second)]


def _pointer_to(code_type, doc):
    def typing(typingctx, address):
        codegen = lambda context, builder, sig, args: builder.inttoptr(args[0], _I8.as_pointer())  # noqa: E731
        return types.CPointer(code_type)(types.int64), codegen

    typing.__doc__ = doc
    return intrinsic(typing)


pointer_int8 = _pointer_to(INT8, "An int64 address as a pointer to int8 codes.")
pointer_fp8 = _pointer_to(FP8, "An int64 address as a pointer to e4m3 codes.")
pointer_int4 = _pointer_to(INT4, "An int64 address as a pointer to int4 codes.")


@intrinsic
def bits(typingctx, pointer):
    """Bits per number of codes, a compile-time constant; 0 for a pointer to floats."""
    value = {INT8: 8, FP8: 8, INT4: 4}.get(pointer.dtype, 0)
    return types.int64(pointer), lambda context, builder, sig, args: ir.Constant(_I64, value)


@intrinsic
def is_int4(typingctx, pointer):
    """True if rows have a minimum and pairs come from both halves of a row (int4); a compile-time constant."""
    value = int(pointer.dtype is INT4)
    return types.boolean(pointer), lambda context, builder, sig, args: ir.Constant(ir.IntType(1), value)


def _parameters(lanes, tokens, doc):
    """An intrinsic (codes, words, t, count) -> (scales, minima) of tokens t to t + `tokens` - 1.

    A Vec has `lanes` lanes per token. Unused lanes get scale 1 and minimum 0, which change no number. Tokens from
    `count` on get 0 and 0, whatever their slots hold.
    """
    words_type = ir.VectorType(_I32, tokens)
    spread = ir.Constant(_I32V, [min(i // lanes, tokens) for i in range(WIDTH)])

    def fill(value):
        return ir.Constant(words_type, [value] * tokens)

    def codegen(context, builder, sig, args):
        _, words, t, count = args
        loaded = builder.load(builder.bitcast(builder.gep(words, [t]), words_type.as_pointer()), align=4)
        left = builder.trunc(builder.sub(count, t), _I32)
        left = builder.insert_element(ir.Constant(words_type, ir.Undefined), left, ir.Constant(_I32, 0))
        left = builder.shuffle_vector(left, left, fill(0))
        known = builder.icmp_signed("<", ir.Constant(words_type, list(range(tokens))), left)
        scales, minima = builder.select(known, loaded, fill(0)), fill(0)
        if sig.args[0].dtype is INT4:
            minima = builder.and_(scales, fill(-65536))
            scales = builder.shl(scales, fill(16))
        rest = fill(0x3F800000), fill(0)
        pair = [builder.shuffle_vector(x, more, spread) for x, more in zip((scales, minima), rest, strict=True)]
        return context.make_tuple(builder, sig.return_type, [builder.bitcast(x, _F32V) for x in pair])

    def typing(typingctx, pointer, words, t, count):
        return types.UniTuple(Vec, 2)(pointer, F32Pointer, types.int64, types.int64), codegen

    typing.__doc__ = doc
    return intrinsic(typing)


parameters_quad = _parameters(4, 4, "Scales and minima of four tokens, four lanes each.")
parameters_four = _parameters(1, 4, "Scales and minima of four tokens, one lane each.")
parameters_many = _parameters(1, WIDTH, "Scales and minima of sixteen tokens.")


def _call(builder, name, *args):
    function_type = ir.FunctionType(_F32V, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), args)


def _encode_e4m3(builder, x):
    """|x| <= 448 -> the nearest e4m3, ties to even. Numbers below 2^-6 are rounded as integers."""
    word = builder.bitcast(x, _I32V)
    magnitude = builder.and_(word, constant(_I32, 0x7FFFFFFF))
    odd = builder.and_(builder.lshr(magnitude, constant(_I32, 20)), constant(_I32, 1))
    rounded = builder.add(magnitude, builder.add(odd, constant(_I32, 0x7FFFF)))
    normal = builder.sub(builder.lshr(rounded, constant(_I32, 20)), constant(_I32, 960))
    small = builder.fmul(builder.bitcast(magnitude, _F32V), constant(_F32, 512.0))
    subnormal = builder.fptosi(_call(builder, "llvm.rint.v16f32", small), _I32V)
    is_small = builder.icmp_signed("<", magnitude, constant(_I32, 0x3C800000))
    sign = builder.and_(builder.lshr(word, constant(_I32, 24)), constant(_I32, 0x80))
    return builder.or_(sign, builder.select(is_small, subnormal, normal))


@intrinsic
def encode(typingctx, pointer, index, x):
    """Store sixteen scaled numbers as bytes from `index` on; for int4 as one byte each, 0 to 15, for pack()."""

    def codegen(context, builder, sig, args):
        target, index, x = args
        if sig.args[0].dtype is FP8:
            codes = _encode_e4m3(builder, x)
        else:
            codes = builder.fptosi(_call(builder, "llvm.rint.v16f32", x), _I32V)
        where = builder.bitcast(builder.gep(target, [index]), _I8V.as_pointer())
        builder.store(builder.trunc(codes, _I8V), where, align=1)
        return context.get_dummy_value()

    return types.void(pointer, types.int64, Vec), codegen


@intrinsic
def pack(typingctx, pointer, index, source, low, high):
    """Store bytes index : index + 8 of int4 codes, from eight codes at `low` and eight at `high` of `source`."""

    def codegen(context, builder, sig, args):
        target, index, source, low, high = args
        first, second = (_load(builder, source, i, 8) for i in (low, high))
        packed = builder.or_(first, builder.shl(second, ir.Constant(first.type, [4] * 8)))
        builder.store(packed, builder.bitcast(builder.gep(target, [index]), packed.type.as_pointer()), align=1)
        return context.get_dummy_value()

    integer = types.int64
    return types.void(pointer, integer, source, integer, integer), codegen
