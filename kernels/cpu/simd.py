"""SIMD vectors for numba: `Vec`, 16 floats in one value, and the few operations that the CPU kernels need.

numba compiles scalar loops, and LLVM may or may not vectorise them. With Vec values a kernel decides how many
accumulators it keeps in registers. LLVM splits a Vec if the machine's registers are narrower (AVX2, NEON). Pointers are
`CPointer(float32)` or `CPointer(uint16)`, where uint16 means bf16: load widens, store rounds to nearest even. Codes of
a quantised cache have their own pointers (kernels/cpu/codes.py), which load and load_pair decode. No function checks
bounds.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu import codes
from kernels.cpu.codes import WIDTH, F32Pointer, Vec
from kernels.cpu.features import HAS_BF16_DOT, instruction

_F32, _F64, _I16, _I32, _I64 = ir.FloatType(), ir.DoubleType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_F32V, _I16V, _I32V = (ir.VectorType(scalar, WIDTH) for scalar in (_F32, _I16, _I32))
_FAST = ("reassoc", "contract", "nsz", "arcp")


BF16Pointer = types.CPointer(types.uint16)
I32Pointer = types.CPointer(types.int32)
I64Pointer = types.CPointer(types.int64)
F64Pointer = types.CPointer(types.float64)


def _splat_constant(element, value):
    return ir.Constant(ir.VectorType(element, WIDTH), [value] * WIDTH)


def call(builder, name, result, *args):
    """Call an LLVM intrinsic by its mangled name."""
    function_type = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), args)


def vector_at(builder, pointer, index, vector_type):
    """pointer + index, as a pointer to a vector. For code generation, as all functions that take a builder."""
    return builder.bitcast(builder.gep(pointer, [index]), vector_type.as_pointer())


def broadcast(builder, value):
    """A vector of equal elements."""
    vector = ir.VectorType(value.type, WIDTH)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, one, ir.Constant(_I32V, [0] * WIDTH))


def _is_bf16(pointer_type):
    return pointer_type.dtype == types.uint16


@intrinsic
def pointer_f32(typingctx, address):
    """An int64 address as a pointer to float32."""
    return F32Pointer(types.int64), lambda context, builder, sig, args: builder.inttoptr(args[0], _F32.as_pointer())


@intrinsic
def pointer_bf16(typingctx, address):
    """An int64 address as a pointer to bf16 values."""
    return BF16Pointer(types.int64), lambda context, builder, sig, args: builder.inttoptr(args[0], _I16.as_pointer())


@intrinsic
def pointer_as(typingctx, pointer, address):
    """An int64 address as a pointer of the type of `pointer`."""

    def codegen(context, builder, sig, args):
        return builder.inttoptr(args[1], context.get_value_type(pointer))

    return pointer(pointer, types.int64), codegen


@intrinsic
def keep(typingctx, array):
    """Keep `array` alive until here, because numba frees an array after its last use. Compiles to no code."""
    return types.void(array), lambda context, builder, sig, args: context.get_dummy_value()


@intrinsic
def pointer_i32(typingctx, address):
    """An int64 address as a pointer to int32."""
    return I32Pointer(types.int64), lambda context, builder, sig, args: builder.inttoptr(args[0], _I32.as_pointer())


@intrinsic
def pointer_i64(typingctx, address):
    """An int64 address as a pointer to int64."""
    return I64Pointer(types.int64), lambda context, builder, sig, args: builder.inttoptr(args[0], _I64.as_pointer())


@intrinsic
def pointer_f64(typingctx, address):
    """An int64 address as a pointer to float64."""
    return F64Pointer(types.int64), lambda context, builder, sig, args: builder.inttoptr(args[0], _F64.as_pointer())


@intrinsic
def advance(typingctx, pointer, elements):
    """pointer + elements, as in C."""
    return pointer(pointer, types.int64), lambda context, builder, sig, args: builder.gep(args[0], [args[1]])


@intrinsic
def fetch_add(typingctx, pointer, value):
    """Atomically add to an int64 that threads share; returns its old value."""

    def codegen(context, builder, sig, args):
        return builder.atomic_rmw("add", args[0], args[1], "monotonic")

    return types.int64(I64Pointer, types.int64), codegen


def _load_vector(builder, pointer, index, bf16):
    """pointer[index : index + 16], widened to float32."""
    vector = builder.load(vector_at(builder, pointer, index, _I16V if bf16 else _F32V), align=2 if bf16 else 4)
    if not bf16:
        return vector
    return builder.bitcast(builder.shl(builder.zext(vector, _I32V), _splat_constant(_I32, 16)), _F32V)


def _store_vector(builder, pointer, index, vector, bf16):
    """pointer[index : index + 16] = vector, rounded to bf16 where `bf16`."""
    vector = round_to_bf16(builder, vector) if bf16 else vector
    builder.store(vector, vector_at(builder, pointer, index, vector.type), align=2 if bf16 else 4)


@intrinsic
def load(typingctx, pointer, index):
    """pointer[index : index + 16], widened to float32."""
    bf16 = _is_bf16(pointer)

    def codegen(context, builder, sig, args):
        if pointer.dtype in codes.FORMATS:
            return codes.load16(builder, pointer.dtype, *args)
        return _load_vector(builder, *args, bf16)

    return Vec(pointer, types.int64), codegen


@intrinsic
def store(typingctx, pointer, index, value):
    """pointer[index : index + 16] = value, rounded to the pointer's dtype."""
    bf16 = _is_bf16(pointer)

    def codegen(context, builder, sig, args):
        _store_vector(builder, *args, bf16)
        return context.get_dummy_value()

    return types.void(pointer, types.int64, Vec), codegen


@intrinsic
def store_both(typingctx, pointer, index, first, second):
    """pointer[index : index + 32] = the numbers of both, rounded to the pointer's dtype: bf16 fills a cache line by one
    store."""
    bf16 = _is_bf16(pointer)

    def codegen(context, builder, sig, args):
        pointer, index, *halves = args
        if bf16:
            halves = [round_to_bf16(builder, half) for half in halves]
        both = builder.shuffle_vector(*halves, ir.Constant(ir.VectorType(_I32, 2 * WIDTH), list(range(2 * WIDTH))))
        builder.store(both, vector_at(builder, pointer, index, both.type), align=2 if bf16 else 4)
        return context.get_dummy_value()

    return types.void(pointer, types.int64, Vec, Vec), codegen


def _room(builder, element):
    """Memory for 16 elements on the stack, as a pointer to the first."""
    return builder.bitcast(cgutils.alloca_once(builder, ir.VectorType(element, WIDTH)), element.as_pointer())


@intrinsic
def load_some(typingctx, pointer, index, count):
    """pointer[index : index + count], widened to float32, and zeros behind; count is at most 16."""
    bf16 = _is_bf16(pointer)
    element = _I16 if bf16 else _F32

    def codegen(context, builder, sig, args):
        room = _room(builder, element)
        cgutils.memset(builder, room, ir.Constant(_I64, WIDTH * (2 if bf16 else 4)), 0)
        cgutils.raw_memcpy(builder, room, builder.gep(args[0], [args[1]]), args[2], 2 if bf16 else 4)
        return _load_vector(builder, room, ir.Constant(_I64, 0), bf16)

    return Vec(pointer, types.int64, types.int64), codegen


@intrinsic
def store_some(typingctx, pointer, index, value, count):
    """pointer[index : index + count] = the first numbers of value, rounded to the pointer's dtype; count is at most
    16."""
    bf16 = _is_bf16(pointer)
    element = _I16 if bf16 else _F32

    def codegen(context, builder, sig, args):
        room = _room(builder, element)
        _store_vector(builder, room, ir.Constant(_I64, 0), args[2], bf16)
        cgutils.raw_memcpy(builder, builder.gep(args[0], [args[1]]), room, args[3], 2 if bf16 else 4)
        return context.get_dummy_value()

    return types.void(pointer, types.int64, Vec, types.int64), codegen


def _load_words(builder, pointer, index):
    """32 bf16 numbers as 32-bit words: the even ones, widened, and the odd ones."""
    words = builder.load(vector_at(builder, pointer, index, _I32V), align=2)
    pair = (builder.shl(words, _splat_constant(_I32, 16)), builder.and_(words, _splat_constant(_I32, -65536)))
    return [builder.bitcast(half, _F32V) for half in pair]


def _store_words(builder, pointer, index, even, odd):
    """The inverse of _load_words, rounded."""
    low, high = (builder.zext(round_to_bf16(builder, half), _I32V) for half in (even, odd))
    words = builder.or_(low, builder.shl(high, _splat_constant(_I32, 16)))
    builder.store(words, vector_at(builder, pointer, index, _I32V), align=2)


@intrinsic
def load_pair(typingctx, pointer, index):
    """pointer[index : index + 32] as two Vecs: for bf16 the even and the odd elements, for fp32 the two halves.

    To split 32-bit words into even and odd takes one instruction per Vec, half the cost of widening in order. A dot
    product does not depend on the order, and store_pair restores it. Codes have the order of their format.
    """
    bf16, code_type = _is_bf16(pointer), pointer.dtype

    def codegen(context, builder, sig, args):
        pointer, index = args
        if code_type in codes.FORMATS:
            pair = codes.load_pair(builder, code_type, pointer, index)
        elif bf16:
            pair = _load_words(builder, pointer, index)
        else:
            second = builder.add(index, ir.Constant(_I64, WIDTH))
            pair = [builder.load(vector_at(builder, pointer, i, _F32V), align=4) for i in (index, second)]
        return context.make_tuple(builder, sig.return_type, pair)

    return types.UniTuple(Vec, 2)(pointer, types.int64), codegen


@intrinsic
def store_pair(typingctx, pointer, index, a, b):
    """pointer[index : index + 32] = the pair in load_pair's order, rounded to the pointer's dtype."""
    bf16 = _is_bf16(pointer)

    def codegen(context, builder, sig, args):
        pointer, index, a, b = args
        if bf16:
            _store_words(builder, pointer, index, a, b)
        else:
            for half, i in ((a, index), (b, builder.add(index, ir.Constant(_I64, WIDTH)))):
                builder.store(half, vector_at(builder, pointer, i, _F32V), align=4)
        return context.get_dummy_value()

    return types.void(pointer, types.int64, Vec, Vec), codegen


@intrinsic
def load_even_odd(typingctx, pointer, index):
    """pointer[index : index + 32], fp32 or bf16, as two Vecs: the even and the odd elements."""
    bf16 = _is_bf16(pointer)

    def codegen(context, builder, sig, args):
        pointer, index = args
        if bf16:
            pair = _load_words(builder, pointer, index)
        else:
            second = builder.add(index, ir.Constant(_I64, WIDTH))
            halves = [builder.load(vector_at(builder, pointer, i, _F32V), align=4) for i in (index, second)]
            pair = [
                builder.shuffle_vector(*halves, ir.Constant(_I32V, list(range(odd, 2 * WIDTH, 2)))) for odd in (0, 1)
            ]
        return context.make_tuple(builder, sig.return_type, pair)

    return types.UniTuple(Vec, 2)(pointer, types.int64), codegen


@intrinsic
def store_even_odd(typingctx, pointer, index, even, odd):
    """The inverse of load_even_odd, rounded to the pointer's dtype."""
    bf16 = _is_bf16(pointer)

    def codegen(context, builder, sig, args):
        pointer, index, *pair = args
        if bf16:
            _store_words(builder, pointer, index, *pair)
        else:
            for first in (0, WIDTH // 2):
                lanes = [lane + odd for lane in range(first, first + WIDTH // 2) for odd in (0, WIDTH)]
                half = builder.shuffle_vector(*pair, ir.Constant(_I32V, lanes))
                at = builder.add(index, ir.Constant(_I64, 2 * first))
                builder.store(half, vector_at(builder, pointer, at, _F32V), align=4)
        return context.get_dummy_value()

    return types.void(pointer, types.int64, Vec, Vec), codegen


def round_to_bf16(builder, vector):
    """Round to nearest even: add half of the last kept bit, minus one ulp of the rest if that bit is 0. One instruction
    does it where there is one; it makes zeros of numbers below 1.2e-38."""
    if HAS_BF16_DOT:
        return instruction(builder, "vcvtneps2bf16 $1, $0", "=v,v", _I16V, vector)
    bits = builder.bitcast(vector, _I32V)
    odd = builder.and_(builder.lshr(bits, _splat_constant(_I32, 16)), _splat_constant(_I32, 1))
    rounded = builder.add(bits, builder.add(odd, _splat_constant(_I32, 0x7FFF)))
    is_nan = builder.fcmp_unordered("uno", vector, vector)
    rounded = builder.select(is_nan, _splat_constant(_I32, 0x7FC00000), rounded)
    return builder.trunc(builder.lshr(rounded, _splat_constant(_I32, 16)), _I16V)


@intrinsic
def is_bf16(typingctx, pointer):
    """True for a pointer to bf16; known to the compiler."""
    return types.boolean(pointer), lambda *_: ir.Constant(ir.IntType(1), _is_bf16(pointer))


@intrinsic
def round_to(typingctx, pointer, value):
    """`value` as a store through `pointer` and a load would give it: rounded to bf16, or unchanged for fp32."""
    bf16 = _is_bf16(pointer)

    def codegen(context, builder, sig, args):
        if not bf16:
            return args[1]
        wide = builder.zext(round_to_bf16(builder, args[1]), _I32V)
        return builder.bitcast(builder.shl(wide, _splat_constant(_I32, 16)), _F32V)

    return Vec(pointer, Vec), codegen


@intrinsic
def splat(typingctx, value):
    """Sixteen copies of one float32."""
    return Vec(types.float32), lambda context, builder, sig, args: broadcast(builder, *args)


def _binary(operation, doc):
    def typing(typingctx, a, b):
        return Vec(Vec, Vec), lambda context, builder, sig, args: getattr(builder, operation)(*args, flags=_FAST)

    typing.__doc__ = doc
    typing.__name__ = operation
    return intrinsic(typing)


add = _binary("fadd", "a + b")
sub = _binary("fsub", "a - b")
mul = _binary("fmul", "a * b")
div = _binary("fdiv", "a / b")


@intrinsic
def distance(typingctx, a, b, scale):
    """(a - b) / scale, rounded twice: the same bits wherever it is compiled."""
    codegen = lambda context, builder, sig, args: builder.fdiv(builder.fsub(*args[:2]), args[2])  # noqa: E731
    return Vec(Vec, Vec, Vec), codegen


@intrinsic
def fma(typingctx, a, b, c):
    """a * b + c"""
    codegen = lambda context, builder, sig, args: call(builder, "llvm.fma.v16f32", _F32V, *args)  # noqa: E731
    return Vec(Vec, Vec, Vec), codegen


@intrinsic
def maximum(typingctx, a, b):
    """The larger element of each pair."""
    codegen = lambda context, builder, sig, args: call(builder, "llvm.maxnum.v16f32", _F32V, *args)  # noqa: E731
    return Vec(Vec, Vec), codegen


def larger_of(builder, x, y):
    """The larger element of each pair; y where either is NaN."""
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


@intrinsic
def larger(typingctx, a, b):
    """The larger element of each pair; b where either is NaN. One instruction; `maximum` takes three."""
    return Vec(Vec, Vec), lambda context, builder, sig, args: larger_of(builder, *args)


@intrinsic
def smaller(typingctx, a, b):
    """The smaller element of each pair; b where either is NaN."""

    def codegen(context, builder, sig, args):
        return builder.select(builder.fcmp_ordered("<", *args), *args)

    return Vec(Vec, Vec), codegen


@intrinsic
def at_least(typingctx, a, bound, values):
    """`values` in the lanes where a >= bound, 0 in the others."""

    def codegen(context, builder, sig, args):
        a, bound, values = args
        return builder.select(builder.fcmp_ordered(">=", a, bound), values, _splat_constant(_F32, 0.0))

    return Vec(Vec, Vec, Vec), codegen


@intrinsic
def choose(typingctx, a, bound, above, below):
    """`above` in the lanes where a >= bound, `below` in the others."""

    def codegen(context, builder, sig, args):
        a, bound, above, below = args
        return builder.select(builder.fcmp_ordered(">=", a, bound), above, below)

    return Vec(Vec, Vec, Vec, Vec), codegen


@intrinsic
def keep_nan(typingctx, a, b):
    """`a`, with NaN in the lanes where `b` is NaN."""

    def codegen(context, builder, sig, args):
        return builder.select(builder.fcmp_unordered("uno", args[1], args[1]), args[1], args[0])

    return Vec(Vec, Vec), codegen


def _spread(combine, lanes, doc):
    """An intrinsic that reduces a Vec in log2(16 / lanes) steps: rotate, combine, halve the distance."""

    def codegen(context, builder, sig, args):
        (vector,), step = args, WIDTH // 2
        while step >= lanes:
            rotation = ir.Constant(_I32V, [(i + step) % WIDTH for i in range(WIDTH)])
            vector = combine(builder, vector, builder.shuffle_vector(vector, vector, rotation))
            step //= 2
        return vector

    def typing(typingctx, a):
        return Vec(Vec), codegen

    typing.__doc__ = doc
    return intrinsic(typing)


def _add(builder, x, y):
    return builder.fadd(x, y)


spread_add1 = _spread(_add, 1, "Every lane becomes the sum of all sixteen.")
spread_add4 = _spread(_add, 4, "Lane i becomes the sum of the four lanes congruent to i modulo 4.")
spread_max1 = _spread(larger_of, 1, "Every lane becomes the largest of all sixteen.")
spread_max4 = _spread(larger_of, 4, "Lane i becomes the largest of the four lanes congruent to i modulo 4.")


@intrinsic
def store_sums4(typingctx, pointer, index, a, b, c, d):
    """pointer[index : index + 4] = the sums of a, b, c and d: one shuffle tree costs less than four reductions."""

    def codegen(context, builder, sig, args):
        pointer, index, *vectors = args
        vector = sums4(builder, *vectors)
        where = vector_at(builder, pointer, index, vector.type)
        builder.store(vector, where, align=4)
        return context.get_dummy_value()

    return types.void(F32Pointer, types.int64, Vec, Vec, Vec, Vec), codegen


def sums4(builder, a, b, c, d):
    """The sums of four vectors, as a vector of four."""
    vector = _interleave_add(builder, _interleave_add(builder, a, b), _interleave_add(builder, c, d))
    width = WIDTH
    while width > 4:
        width //= 2
        halves = (ir.Constant(ir.VectorType(_I32, width), list(range(s, s + width))) for s in (0, width))
        vector = builder.fadd(*(builder.shuffle_vector(vector, vector, half) for half in halves))
    return vector


def _interleave_add(builder, x, y):
    """Per four lanes: [x0 + x1, x2 + x3, y0 + y1, y2 + y3]."""
    evens = [lane + i for lane in range(0, WIDTH, 4) for i in (0, 2, WIDTH, WIDTH + 2)]
    shuffles = (ir.Constant(_I32V, [i + odd for i in evens]) for odd in (0, 1))
    return builder.fadd(*(builder.shuffle_vector(x, y, shuffle) for shuffle in shuffles))


# e ** r on |r| <= ln(2) / 2 as 1 + r + r * r * p(r): the coefficients of Cephes' expf, about 1 ulp.
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


@intrinsic
def exp(typingctx, x):
    """e ** x for x <= 88; below -87 the result is 0. About 1 ulp."""

    def codegen(context, builder, sig, args):
        x = call(builder, "llvm.maxnum.v16f32", _F32V, args[0], _splat_constant(_F32, -87.3))
        scaled = builder.fmul(x, _splat_constant(_F32, 1.4426950408889634))
        whole = call(builder, "llvm.rint.v16f32", _F32V, scaled)
        # x - whole * ln 2 in two parts: exact for large x too
        rest = call(builder, "llvm.fma.v16f32", _F32V, whole, _splat_constant(_F32, -0.693359375), x)
        rest = call(builder, "llvm.fma.v16f32", _F32V, whole, _splat_constant(_F32, 2.12194440e-4), rest)
        result = _splat_constant(_F32, _EXP[0])
        for coefficient in _EXP[1:]:
            result = call(builder, "llvm.fma.v16f32", _F32V, result, rest, _splat_constant(_F32, coefficient))
        square = builder.fmul(rest, rest)
        result = call(builder, "llvm.fma.v16f32", _F32V, result, square, rest)
        result = builder.fadd(result, _splat_constant(_F32, 1.0))
        exponent = builder.shl(builder.fptosi(whole, _I32V), _splat_constant(_I32, 23))
        result = builder.bitcast(builder.add(builder.bitcast(result, _I32V), exponent), _F32V)
        return builder.select(builder.fcmp_ordered("<", args[0], _splat_constant(_F32, -87.0)),
                              _splat_constant(_F32, 0.0), result)  # fmt: skip

    return Vec(Vec), codegen


@intrinsic
def as_float(typingctx, bits):
    """The float64 with the bits of an int64."""
    return types.float64(types.int64), lambda context, builder, sig, args: builder.bitcast(args[0], ir.DoubleType())


@intrinsic
def float_of(typingctx, bits):
    """The float32 with the low 32 bits of an int64."""
    codegen = lambda context, builder, sig, args: builder.bitcast(builder.trunc(args[0], _I32), _F32)  # noqa: E731
    return types.float32(types.int64), codegen


@intrinsic
def read(typingctx, pointer, index):
    """pointer[index]; a float is widened to float32."""
    bf16 = _is_bf16(pointer)

    def codegen(context, builder, sig, args):
        value = builder.load(builder.gep(args[0], [args[1]]))
        if not bf16:
            return value
        return builder.bitcast(builder.shl(builder.zext(value, _I32), ir.Constant(_I32, 16)), _F32)

    return (types.float32 if bf16 else pointer.dtype)(pointer, types.int64), codegen


@intrinsic
def write(typingctx, pointer, index, value):
    """pointer[index] = value, for any pointer except one to bf16."""

    def codegen(context, builder, sig, args):
        builder.store(args[2], builder.gep(args[0], [args[1]]))
        return context.get_dummy_value()

    return types.void(pointer, types.int64, pointer.dtype), codegen


@intrinsic
def address(typingctx, pointer):
    """A pointer as an int64; 0 is null."""
    return types.int64(pointer), lambda context, builder, sig, args: builder.ptrtoint(args[0], _I64)


def prefetch(builder, where):
    """Prefetch the cache line at a pointer for reading, into L2, which has more misses in flight than L1."""
    hints = [ir.Constant(_I32, hint) for hint in (0, 2, 1)]
    where = builder.bitcast(where, ir.IntType(8).as_pointer())
    call(builder, "llvm.prefetch.p0i8", ir.VoidType(), where, *hints)


@intrinsic
def prefetch_pair(typingctx, pointer, index):
    """Prefetch the cache lines of pointer[index : index + 32]: two for fp32, else one. Any address is safe."""
    offsets = (0, 16) if pointer.dtype == types.float32 else (0,)
    code_type = pointer.dtype

    def codegen(context, builder, sig, args):
        start = codes.byte_offset(builder, code_type, args[1])
        for offset in offsets:
            prefetch(builder, builder.gep(args[0], [builder.add(start, ir.Constant(_I64, offset))]))
        return context.get_dummy_value()

    return types.void(pointer, types.int64), codegen


@intrinsic
def first(typingctx, a):
    """Lane 0 as a float32."""
    codegen = lambda context, builder, sig, args: builder.extract_element(args[0], ir.Constant(_I32, 0))  # noqa: E731
    return types.float32(Vec), codegen


@intrinsic
def copy_bytes(typingctx, target, source, count):
    """memcpy between two int64 addresses."""

    def codegen(context, builder, sig, args):
        target, source = (builder.inttoptr(arg, ir.IntType(8).as_pointer()) for arg in args[:2])
        cgutils.raw_memcpy(builder, target, source, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen
