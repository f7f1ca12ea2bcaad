"""Products of bf16 pairs for CPUs without an instruction for them (AVX2, AVX-512 without BF16): two products in fp32.

A bf16 number is the upper half of a float: a shift widens the first number of a 32-bit word, a mask the second. Inputs
are widened once for many columns, weights as they are read. kernels/cpu/dots.py calls these functions where the
processor lacks vdpbf16ps. Those that take a builder generate code.
"""

from llvmlite import ir
from numba.core import cgutils

from kernels.cpu import simd
from kernels.cpu.codes import WIDTH, constant
from kernels.cpu.features import HAS_AVX512, HAS_BF16_DOT, instruction
from kernels.cpu.parallel import jit
from kernels.cpu.simd import advance, broadcast, vector_at

DEPTH = 256  # words of up to six rows that are widened at a time: 12 KiB, which stay in L1
REGISTERS = 32 if HAS_AVX512 else 8  # for vectors of 16 floats; AVX2 needs two for each

_F32, _I8, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_F32V, _I16V, _I32V = (ir.VectorType(scalar, WIDTH) for scalar in (_F32, _I16, _I32))
_OCTETS = ir.VectorType(_I8, 2 * WIDTH)


def _number(value):
    return ir.Constant(_I64, value)


def _lanes(first, count):
    """Places for a shuffle."""
    return ir.Constant(ir.VectorType(_I32, count), list(range(first, first + count)))


def halves(builder, factor):
    """The even and the odd numbers of a factor of `dot`, as floats: of bf16 pairs in 32-bit words, or what `pair`
    made."""
    if isinstance(factor, tuple):
        return factor
    words = builder.shl(factor, constant(_I32, 16)), builder.and_(factor, constant(_I32, -65536))
    return tuple(builder.bitcast(half, _F32V) for half in words)


def pair(builder, even, odd):
    """A factor of `dot` from floats that bf16 holds exactly: words, or both vectors where `dot` would widen words."""
    return as_words(builder, (even, odd)) if HAS_BF16_DOT else (even, odd)


def as_words(builder, factor):
    """The bf16 pairs of a factor in 32-bit words."""
    if not isinstance(factor, tuple):
        return factor
    even, odd = (builder.bitcast(half, _I32V) for half in factor)
    return builder.or_(builder.lshr(even, constant(_I32, 16)), odd)


def column_blocks(rows, vectors, spare=0):
    """The vectors of columns that are multiplied together: ranges of equal size, whose sums of `rows` rows fit into the
    registers beside the columns and `spare` vectors for each of these. One row waits for memory, so it reads all
    columns at once."""
    if HAS_BF16_DOT:
        return [range(vectors)]
    sizes = [n for n in range(1, vectors + 1) if vectors % n == 0 and n * (rows + 2 + spare) <= REGISTERS]
    size = vectors if rows == 1 else max(sizes, default=1)
    return [range(first, first + size) for first in range(0, vectors, size)]


def fma(builder, a, b, total):
    return simd.call(builder, "llvm.fma.v16f32", _F32V, a, b, total)


def dot(builder, total, a, b):
    """See dots.dot."""
    for both in zip(halves(builder, a), halves(builder, b), strict=True):
        total = fma(builder, *both, total)
    return total


def look_up(builder, codes, table):
    """See dots.look_up. AVX2 looks up bytes (vpshufb), and an index of 128 or more gives 0: so one table fills the low
    bytes of the lanes, one the high bytes."""
    lane = lambda value: ir.Constant(_I16V, [value] * WIDTH)  # noqa: E731
    values = builder.shuffle_vector(table, table, _lanes(0, WIDTH))
    twice = ir.Constant(ir.VectorType(_I32, 2 * WIDTH), list(range(WIDTH)) * 2)
    octets = [builder.trunc(part, ir.VectorType(_I8, WIDTH)) for part in (values, builder.lshr(values, lane(8)))]
    low, high = (builder.shuffle_vector(half, half, twice) for half in octets)
    found = []
    for first in (0, WIDTH):
        index = builder.and_(builder.shuffle_vector(codes, codes, _lanes(first, WIDTH)), lane(15))
        indices = builder.or_(index, lane(0x8000)), builder.or_(builder.shl(index, lane(8)), lane(0x0080))
        parts = [
            simd.call(builder, "llvm.x86.avx2.pshuf.b", _OCTETS, half, builder.bitcast(where, _OCTETS))
            for half, where in zip((low, high), indices, strict=True)
        ]
        found.append(builder.bitcast(builder.or_(*parts), _I16V))
    return builder.shuffle_vector(*found, _lanes(0, 2 * WIDTH))


def float_table(builder, *tables):
    """Sixteen floats for `permute`: a table of dots.look_up, or the sums of two."""

    def widened(table):
        half = builder.zext(builder.shuffle_vector(table, table, _lanes(0, WIDTH)), _I32V)
        return builder.bitcast(builder.shl(half, constant(_I32, 16)), _F32V)

    first, *others = map(widened, tables)
    return builder.fadd(first, *others) if others else first


def permute(builder, indices, table):
    """table[indices % 16] for sixteen indices of 32 bits. AVX2 looks up eight floats (vpermps)."""
    if HAS_AVX512:
        return instruction(builder, "vpermps $2, $1, $0", "=v,v,v", _F32V, indices, table)
    low, high = (builder.shuffle_vector(table, table, _lanes(first, 8)) for first in (0, 8))
    found = []
    for first in (0, 8):
        part = builder.shuffle_vector(indices, indices, _lanes(first, 8))
        each = lambda value, part=part: ir.Constant(part.type, [value] * 8)  # noqa: E731
        below, above = (simd.call(builder, "llvm.x86.avx2.permps", half.type, half, part) for half in (low, high))
        is_above = builder.icmp_signed("<", builder.shl(part, each(28)), each(0))  # bit 3 becomes the sign
        found.append(builder.select(is_above, above, below))
    return builder.shuffle_vector(*found, _lanes(0, WIDTH))


def whole_and_rest(builder, x):
    """(floor(x), x - floor(x)); x is raised to -127."""
    least = constant(_F32, -127.0)
    x = builder.select(builder.fcmp_ordered("<", x, least), least, x)  # NaN remains
    whole = simd.call(builder, "llvm.floor.v16f32", _F32V, x)
    return whole, builder.fsub(x, whole)


def scale(builder, x, exponent):
    """x * 2 ** exponent for 1 <= x < 2 and whole exponents from -127 on; -127 gives almost 0."""
    moved = builder.shl(builder.fptosi(exponent, _I32V), constant(_I32, 23))
    return builder.bitcast(builder.add(builder.bitcast(x, _I32V), moved), _F32V)


@jit
def widen_pairs(x, x_stride, words, num_rows, out):
    """out[r] = the even and then the odd numbers of row r, as floats. x: bf16, rows of `words` pairs, with a stride in
    words."""
    whole = words // WIDTH * WIDTH
    for r in range(num_rows):
        row, even = advance(x, 2 * r * x_stride), advance(out, 2 * r * words)
        odd = advance(even, words)
        for k in range(0, whole, WIDTH):
            first, second = simd.load_even_odd(row, 2 * k)
            simd.store(even, k, first)
            simd.store(odd, k, second)
        for k in range(whole, words):
            simd.write(even, k, simd.read(row, 2 * k))
            simd.write(odd, k, simd.read(row, 2 * k + 1))


def _widen(builder, words, stride, count, rows, room):
    """room[r, :2 * count] = the numbers of `count` words of each row, in order, as floats; a row of room has
    2 * DEPTH."""
    step = WIDTH // 2
    whole = builder.and_(count, _number(-step))
    with cgutils.for_range(builder, _number(rows)) as row:
        source = builder.gep(words, [builder.mul(row.index, stride)])
        target = builder.gep(room, [builder.mul(row.index, _number(2 * DEPTH))])
        with cgutils.for_range_slice(builder, _number(0), whole, _number(step)) as (k, _):
            numbers = builder.load(vector_at(builder, source, k, _I16V), align=2)
            wide = builder.bitcast(builder.shl(builder.zext(numbers, _I32V), constant(_I32, 16)), _F32V)
            builder.store(wide, vector_at(builder, target, builder.shl(k, _number(1)), _F32V), align=4)
        with cgutils.for_range_slice(builder, whole, count, _number(1)) as (k, _):
            word = builder.load(builder.gep(source, [k]))
            both = builder.shl(word, ir.Constant(_I32, 16)), builder.and_(word, ir.Constant(_I32, -65536))
            for i, half in enumerate(both):
                place = builder.gep(target, [builder.add(builder.shl(k, _number(1)), _number(i))])
                builder.store(builder.bitcast(half, _F32), place)


def _forget(builder):
    """Without this, LLVM keeps the sums of all blocks of columns on the stack, and the innermost loop updates some of
    them there."""
    builder.call(ir.InlineAsm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", side_effect=True), [])


def accumulate(builder, rows, blocks, place_of, count, products, prefetch, zero_if=None):
    """Add `count` products to sums in memory, one block of columns after the other; a block's sums stay in registers.

    place_of(r, c): pointer to 16 sums. products(index, block) yields (function of r that gives row r's input in all
    lanes, vectors of the block's columns). prefetch(index, number of the block) is called before them. zero_if: the
    sums start from 0 where it is true.
    """
    for number, block in enumerate(blocks):
        _forget(builder)
        targets = {(r, c): place_of(r, c) for r in range(rows) for c in block}
        totals = {cell: cgutils.alloca_once(builder, _F32V) for cell in targets}
        for cell, target in targets.items():
            start = builder.load(target, align=4)
            start = start if zero_if is None else builder.select(zero_if, constant(_F32, 0.0), start)
            builder.store(start, totals[cell])
        with cgutils.for_range(builder, count) as loop:
            prefetch(loop.index, number)
            for input_of, columns in products(loop.index, block):
                for r in range(rows):
                    x = input_of(r)
                    for c, column in zip(block, columns, strict=True):
                        builder.store(fma(builder, x, column, builder.load(totals[r, c])), totals[r, c])
        for cell, target in targets.items():
            builder.store(builder.load(totals[cell]), target, align=4)


def prefetcher(builder, lines, blocks, soon, begin, count):
    """The `prefetch` of `accumulate`, for `lines` cache lines of `soon` per product: the first blocks share them.
    begin: products before."""
    share = max(1, lines // len(blocks))

    def prefetch(index, number):
        if number * share >= lines:
            return
        first = builder.add(builder.mul(begin, _number(lines)), builder.mul(count, _number(number * share)))
        first = builder.add(first, builder.mul(index, _number(share)))
        for line in range(share):
            word = builder.mul(builder.add(first, _number(line)), _number(WIDTH))
            simd.prefetch(builder, builder.gep(soon, [word]))

    return prefetch


def multiply(builder, rows, vectors, lines, adds, args):
    """The code of dots.multiply: DEPTH words of the rows at a time."""
    a, a_stride, b, b_stride, depth, out, out_stride, *soon = args
    room = cgutils.alloca_once(builder, _F32, ir.Constant(_I32, rows * 2 * DEPTH))
    blocks = column_blocks(rows, vectors)

    def place_of(r, c):
        index = builder.add(builder.mul(out_stride, _number(r)), _number(WIDTH * c))
        return vector_at(builder, out, index, _F32V)

    with cgutils.for_range_slice(builder, _number(0), depth, _number(DEPTH)) as (begin, _):
        left = builder.sub(depth, begin)
        count = builder.select(builder.icmp_signed("<", left, _number(DEPTH)), left, _number(DEPTH))
        _widen(builder, builder.gep(a, [begin]), a_stride, count, rows, room)

        def products(index, block, begin=begin):
            row = builder.gep(b, [builder.mul(builder.add(begin, index), b_stride)])
            words = [builder.load(vector_at(builder, row, _number(WIDTH * c), _I32V), align=4) for c in block]
            for i, columns in enumerate(zip(*(halves(builder, word) for word in words), strict=True)):
                number = builder.add(builder.shl(index, _number(1)), _number(i))

                def input_of(r, number=number):
                    place = builder.add(number, _number(r * 2 * DEPTH))
                    return broadcast(builder, builder.load(builder.gep(room, [place])))

                yield input_of, columns

        prefetch = prefetcher(builder, lines, blocks, soon[0] if soon else None, begin, count)
        zero_if = None if adds else builder.icmp_signed("==", begin, _number(0))
        accumulate(builder, rows, blocks, place_of, count, products, prefetch, zero_if)


def multiply_floats(builder, rows, vectors, lines, adds, args):
    """The code of dots.multiply for floats."""
    a, a_stride, b, b_stride, depth, out, out_stride, *soon = args
    blocks = column_blocks(rows, vectors)

    def place_of(r, c):
        index = builder.add(builder.mul(out_stride, _number(r)), _number(WIDTH * c))
        return vector_at(builder, out, index, _F32V)

    def products(index, block):
        row = builder.gep(b, [builder.mul(index, b_stride)])

        def input_of(r):
            place = builder.add(builder.mul(a_stride, _number(r)), index)
            return broadcast(builder, builder.load(builder.gep(a, [place])))

        yield input_of, [builder.load(vector_at(builder, row, _number(WIDTH * c), _F32V), align=4) for c in block]

    prefetch = prefetcher(builder, lines, blocks, soon[0] if soon else None, _number(0), depth)
    zero_if = None if adds else ir.Constant(ir.IntType(1), 1)
    accumulate(builder, rows, blocks, place_of, depth, products, prefetch, zero_if)
