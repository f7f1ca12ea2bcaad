"""Codes in panels of 64 outputs, and the pairs of bf16 numbers that they mean.

A panel has its codes pair by pair of neighbouring inputs. A pair of 4-bit codes takes a line of 64 bytes, and one
instruction looks 32 codes up in a table of bf16 values (vpermw). Values that bf16 does not hold exactly (nf4) are the
sum of two tables that share a line. A pair of 6-bit codes takes a line of their low four bits and half a line of their
high two; their table has two registers (vpermi2w). int8 codes become bf16 numbers by conversion, FP8 codes (e4m3) by
integer arithmetic; 128 bytes hold a pair. Processors without an instruction for bf16 pairs multiply integer codes as
integers (integer_linear.py). They make floats (widened_dots.py) of 4-bit codes at once: by arithmetic if the codes are
integers, else from a table of floats.
"""

from collections.abc import Sequence

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from kernels import huge_pages
from kernels.cpu import simd
from kernels.cpu.codes import WIDTH, constant
from kernels.cpu.dots import LANES, lanes, look_up, vector_at
from kernels.cpu.features import HAS_AVX512, HAS_BF16_DOT, HAS_INT8_DOT, instruction
from kernels.cpu.quantized.scales import COLUMNS, padded_rows
from kernels.cpu.simd import I32Pointer
from kernels.cpu.widened_dots import as_words, float_table, pair, permute
from kernels.quantized.weight import INT4 as INT4_CODEBOOK
from kernels.quantized.weight import UINT4 as UINT4_CODEBOOK
from kernels.quantized.weight import QuantizedWeight, unpack_4bit

VECTORS = COLUMNS // WIDTH
LINE = 16  # 32-bit words of 64 bytes
AHEAD = 48  # pairs to prefetch ahead of one row: 3 KiB of 4-bit codes
# Kinds of codes. WORDS: the bf16 pairs themselves; SPLIT4: 4-bit codes with two tables; INT6: -32 to 31. INT4: 4-bit
# codes with one table, which holds neighbouring integers where INTEGERS has the kind.
WORDS, INT4, INT8, FP8, SPLIT4, INT6 = KINDS = range(6)
W8A8 = len(KINDS)  # int8 codes for inputs in int8, quad by quad of inputs: see w8a8.py, which alone multiplies them
PAIR_WORDS = (COLUMNS, LINE, 2 * LINE, 2 * LINE, LINE, LINE + LINE // 2, 2 * LINE)  # by kind: words of a pair of inputs
TABLES = (0, 1, 0, 0, 2, 2, 0)  # by kind: registers
MIDDLE = 128  # codes of W8A8 are stored as their value + 128
LEAST6 = -32  # the least 6-bit code
# Kinds that rows multiply as integers: 8-bit codes as they are, the others from the first number of the table on.
INTEGERS = () if HAS_BF16_DOT else (INT4, INT8, INT6)
# Bytes of an 8-bit code of a pair: from input to input, and from output to output.
PLACES8 = (COLUMNS, 1) if HAS_BF16_DOT else (1, 2)

_F32, _I8, _I32, _I64 = ir.FloatType(), ir.IntType(8), ir.IntType(32), ir.IntType(64)
_F32V, _I8V, _I32V = ir.VectorType(_F32, WIDTH), ir.VectorType(_I8, WIDTH), ir.VectorType(_I32, WIDTH)
_I8_LANES = ir.VectorType(_I8, 2 * WIDTH)


def load_tables(builder, tables, kind):
    """The tables of a kind in registers."""
    places = [ir.Constant(_I64, i * LINE) for i in range(TABLES[kind])]
    loaded = [builder.load(vector_at(builder, tables, place, LANES), align=4) for place in places]
    return [float_table(builder, *loaded)] if kind in (INT4, SPLIT4) and not HAS_BF16_DOT else loaded


def load_pairs(builder, kind, codes, index, tables):
    """Yields, for each 16 outputs of a panel, bf16 pairs of the inputs 2 * index and 2 * index + 1: the factors of the
    inputs, which are to be added."""
    at = builder.mul(index, ir.Constant(_I64, PAIR_WORDS[kind]))
    return _LOADS[kind](builder, codes, at, tables)


def prefetch_pair(builder, kind, codes, index):
    """Prefetch the codes of a later pair."""
    at = builder.mul(builder.add(index, ir.Constant(_I64, AHEAD)), ir.Constant(_I64, PAIR_WORDS[kind]))
    for word in range(0, PAIR_WORDS[kind], LINE):
        simd.prefetch(builder, builder.gep(codes, [builder.add(at, ir.Constant(_I64, word))]))


def _load(builder, codes, at, word, vector):
    """A vector from word `at` + word on."""
    return builder.load(vector_at(builder, codes, builder.add(at, ir.Constant(_I64, word)), vector), align=4)


def _load_words(builder, codes, at, tables):
    for v in range(VECTORS):
        yield [_load(builder, codes, at, v * WIDTH, _I32V)]


def _load_int4(builder, codes, at, tables):
    """Outputs 16 * v to 16 * v + 15 have bits 4 * v to 4 * v + 3 of each lane."""
    line = _load(builder, codes, at, 0, LANES)
    for v in range(VECTORS):
        shifted = builder.lshr(line, lanes(4 * v)) if v else line
        yield [builder.bitcast(look_up(builder, shifted, table), _I32V) for table in tables]


def _load_int6(builder, codes, at, tables):
    """As _load_int4, and a byte for each lane with the high bits of v from bit 2 * v on."""
    low = _load(builder, codes, at, 0, LANES)
    high = builder.zext(_load(builder, codes, at, LINE, _I8_LANES), LANES)
    for v in range(VECTORS):
        shifted = builder.lshr(low, lanes(4 * v)) if v else low
        index = builder.or_(builder.and_(shifted, lanes(15)), _high_bits(builder, high, v))
        if not HAS_AVX512:
            yield [_less_32(builder, builder.bitcast(index, _I32V))]
            continue
        looked_up = instruction(builder, "vpermi2w $3, $2, $0", "=v,0,v,v", LANES, index, *tables)  # six bits of index
        yield [builder.bitcast(looked_up, _I32V)]


def _less_32(builder, places):
    """The pairs of the 6-bit codes in both halves of 32-bit words, where no instruction looks them up."""
    codes = (builder.and_(half, constant(_I32, 63)) for half in (places, builder.lshr(places, constant(_I32, 16))))
    return pair(builder, *(builder.sitofp(builder.add(code, constant(_I32, LEAST6)), _F32V) for code in codes))


def _load_int4_integers(builder, codes, at, tables):
    """As _load_int4 for integers, by arithmetic: a code becomes the last bits of a float whose last bit is worth 1,
    less that float."""
    least = builder.shuffle_vector(tables[0], tables[0], constant(_I32, 0))
    low = _load(builder, codes, at, 0, _I32V)
    halves = low, builder.lshr(low, constant(_I32, 16))
    for v in range(VECTORS):
        exponent = 23 - 4 * v  # bit 4 * v of a float of 2 ** exponent is worth 1
        place, start = constant(_I32, 15 << 4 * v), constant(_I32, (127 + exponent) << 23)
        floats = (builder.bitcast(builder.or_(builder.and_(half, place), start), _F32V) for half in halves)
        yield [tuple(builder.fadd(builder.fsub(value, constant(_F32, 2.0**exponent)), least) for value in floats)]


def load_integers(builder, kind, codes, index, block):
    """Yields, for the vectors v of `block`, the pairs of codes of the inputs 2 * index and 2 * index + 1 as integers of
    16 bits; those of tables from 0 on."""
    at = builder.mul(index, ir.Constant(_I64, PAIR_WORDS[kind]))
    if kind == INT8:
        yield from (_load_int8_lanes(builder, codes, at, v) for v in block)
        return
    low = _load(builder, codes, at, 0, LANES)
    if kind == INT6:
        high = builder.zext(_load(builder, codes, at, LINE, _I8_LANES), LANES)
    for v in block:
        shifted = builder.lshr(low, lanes(4 * v)) if v else low
        code = builder.and_(shifted, lanes(15)) if v < VECTORS - 1 else shifted
        yield builder.or_(code, _high_bits(builder, high, v)) if kind == INT6 else code


def _high_bits(builder, high, v):
    """Bits 4 and 5 of the 6-bit codes of vector v."""
    left = 4 - 2 * v  # from bit 2 * v to bit 4
    moved = builder.shl(high, lanes(left)) if left >= 0 else builder.lshr(high, lanes(-left))
    return builder.and_(moved, lanes(0x30))


def _load_int4_floats(builder, codes, at, tables):
    """As _load_int4 with a table of floats."""
    low = _load(builder, codes, at, 0, _I32V)
    halves = low, builder.lshr(low, constant(_I32, 16))
    for v in range(VECTORS):
        yield [tuple(permute(builder, builder.lshr(half, constant(_I32, 4 * v)), tables[0]) for half in halves)]


def _load_int8(builder, codes, at, tables):
    """Sixteen codes at a time become floats."""
    for v in range(VECTORS):
        octets = (_load(builder, codes, at, i * LINE + v * LINE // VECTORS, _I8V) for i in range(2))
        yield [pair(builder, *(builder.sitofp(builder.sext(half, _I32V), _F32V) for half in octets))]


def _load_int8_neighbours(builder, codes, at, tables):
    """As _load_int8 where the codes of a pair are neighbours, which load_integers needs."""
    for v in range(VECTORS):
        words = builder.bitcast(_load_int8_lanes(builder, codes, at, v), _I32V)
        halves = builder.shl(words, constant(_I32, 16)), words
        yield [pair(builder, *(builder.sitofp(builder.ashr(half, constant(_I32, 16)), _F32V) for half in halves))]


def _load_int8_lanes(builder, codes, at, v):
    return builder.sext(_load(builder, codes, at, v * LINE // 2, _I8_LANES), LANES)


def _load_fp8(builder, codes, at, tables):
    """Normal numbers get the bias of bf16; those below 2^-6 are looked up."""
    for v in range(VECTORS):
        wide = builder.zext(_load(builder, codes, at, v * LINE // 2, _I8_LANES), LANES)
        magnitude = builder.and_(wide, lanes(0x7F))
        normal = builder.add(builder.shl(magnitude, lanes(4)), lanes(120 << 7))
        small = look_up(builder, magnitude, ir.Constant(LANES, [_bf16_bits(i % 8 / 512) for i in range(2 * WIDTH)]))
        is_small = builder.icmp_unsigned("<", magnitude, lanes(8))
        sign = builder.shl(builder.and_(wide, lanes(0x80)), lanes(8))
        yield [builder.bitcast(builder.or_(builder.select(is_small, small, normal), sign), _I32V)]


_LOADS = [_load_words, _load_int4, _load_int8, _load_fp8, _load_int4, _load_int6]
if not HAS_BF16_DOT:  # floats are not made from words
    # one instruction of AVX-512 looks up sixteen floats, which takes less time than arithmetic
    _LOADS[INT4] = _load_int4_floats if HAS_AVX512 else _load_int4_integers
    _LOADS[SPLIT4], _LOADS[INT8] = _load_int4_floats, _load_int8_neighbours


def _bf16_bits(value: float) -> int:
    """The bits of a number that bf16 holds exactly, as a signed 16-bit integer."""
    return int(torch.tensor(value, dtype=torch.bfloat16).view(torch.int16))


def word_decoder(kind):
    """An intrinsic: words[k, :] = bf16 pairs of `depth` pairs of inputs, for the 64 outputs of a panel."""

    def codegen(context, builder, sig, args):
        codes, depth, tables, words = args
        table = load_tables(builder, tables, kind)
        with cgutils.for_range(builder, depth) as loop:
            prefetch_pair(builder, kind, codes, loop.index)
            start = builder.mul(loop.index, ir.Constant(_I64, COLUMNS))
            for v, (factor,) in enumerate(load_pairs(builder, kind, codes, loop.index, table)):
                place = builder.add(start, ir.Constant(_I64, v * WIDTH))
                builder.store(as_words(builder, factor), vector_at(builder, words, place, _I32V), align=4)
        return context.get_dummy_value()

    def typing(typingctx, codes, depth, tables, words):
        return types.void(I32Pointer, types.int64, I32Pointer, I32Pointer), codegen

    typing.__doc__ = "Look the codes of a panel up, or convert them."
    return intrinsic(typing)


def kind_of(weight: QuantizedWeight) -> int:
    """The kind of codes that holds a weight [..., out, in]."""
    if weight.codes.dtype == torch.float8_e4m3fn:
        return FP8
    if supports_w8a8(weight):
        return W8A8
    if weight.codebook is None:
        low, high = (int(code) for code in weight.codes.aminmax())
        return INT6 if LEAST6 <= low and high < -LEAST6 else INT8
    if not HAS_BF16_DOT:
        return INT4 if weight.codebook in (INT4_CODEBOOK, UINT4_CODEBOOK) else SPLIT4
    values = torch.tensor(weight.codebook)
    return INT4 if torch.equal(values, values.bfloat16().float()) else SPLIT4


def supports_w8a8(weight: QuantizedWeight) -> bool:
    """True for a weight whose inputs are int8, too, with one scale per row and whole vectors of inputs."""
    plain = weight.codes.dtype == torch.int8 and weight.offsets is None and weight.group_size == weight.in_features
    return HAS_INT8_DOT and weight.int8_inputs and plain and weight.in_features % WIDTH == 0


def pack_codes(weights: Sequence[QuantizedWeight], kind: int) -> Tensor:
    """The codes of matrices [out, in] of one shape, one below the other -> [panels, in / 2, ...]."""
    first = _in_panels(weights[0], kind)
    packed = huge_pages.empty((len(weights) * len(first), *first.shape[1:]), first.dtype)
    for weight, target in zip(weights, packed.split(len(first)), strict=True):
        target.copy_(first if weight is weights[0] else _in_panels(weight, kind))
    return packed


def _in_panels(weight: QuantizedWeight, kind: int) -> Tensor:
    """The codes of a matrix [out, in] -> [panels, in / 2, ...]."""
    if kind == INT6:
        return _pack_int6(weight.codes)
    if kind == W8A8:
        return _pack_quads(weight.codes)
    if kind in (INT8, FP8):
        by_input = kind == INT8 and HAS_BF16_DOT
        return _pack_bytes(weight.codes.view(torch.uint8), (0, 2, 3, 1) if by_input else (0, 2, 1, 3))
    return _pack_nibbles(unpack_4bit(weight.codes))


def tables_of(weight: QuantizedWeight, kind: int) -> Tensor:
    """The tables of a kind, bf16 [registers, 32]."""
    if kind == INT6:
        codes = range(LEAST6, -LEAST6)
        return _tables([[*codes[:32]], [*codes[32:]]])
    if weight.codebook is None:
        return _tables([])
    values = torch.tensor(weight.codebook)
    rounded = values.bfloat16().float()
    first = rounded.tolist() * 2
    return _tables([first] if kind == INT4 else [first, (values - rounded).tolist() * 2])


def meanings_of(kind: int, tables: Tensor) -> Tensor:
    """The meaning of each code, fp32 [tables, codes]; those of two tables are added."""
    if kind == W8A8:
        return torch.arange(-MIDDLE, MIDDLE).float().unsqueeze(0)
    if kind in (INT8, FP8):
        octets = torch.arange(256, dtype=torch.uint8)
        return octets.view(torch.int8 if kind == INT8 else torch.float8_e4m3fn).float().unsqueeze(0)
    return tables.float().view(1, -1) if kind == INT6 else tables[:, :WIDTH].float().contiguous()


def _tables(registers: list[list[float]]) -> Tensor:
    return torch.tensor(registers, dtype=torch.bfloat16)


def _lanes_of(codes: Tensor) -> Tensor:
    """uint8 [out, in] -> [panels, in / 2, 4, 32]: lane 2 * o + i of vector v has input i of the pair for output
    16 * v + o of the panel."""
    parts = padded_rows(codes).view(-1, VECTORS, WIDTH, codes.shape[1] // 2, 2)
    return parts.permute(0, 3, 1, 2, 4).flatten(3)


def _pack_nibbles(codes: Tensor) -> Tensor:
    """Codes 0 to 15 -> int16 [panels, in / 2, 32], see _load_int4."""
    vectors = _lanes_of(codes).short().unbind(2)
    return sum(vector << 4 * v for v, vector in enumerate(vectors)).contiguous()  # type: ignore[union-attr]


def _pack_int6(codes: Tensor) -> Tensor:
    """Codes -32 to 31 -> uint8 [panels, in / 2, 96], see _load_int6."""
    places = (codes - LEAST6).view(torch.uint8)
    low = _pack_nibbles(places & 15).view(torch.uint8)
    vectors = _lanes_of(places >> 4).unbind(2)
    high = sum(vector << 2 * v for v, vector in enumerate(vectors))
    return torch.cat([low, high], -1)  # type: ignore[list-item]


def _pack_bytes(codes: Tensor, order: tuple[int, ...]) -> Tensor:
    """8-bit codes -> [panels, in / 2, 128]; order: of the axes panel, output, pair, input of the pair."""
    pairs = padded_rows(codes).view(-1, COLUMNS, codes.shape[1] // 2, 2)
    return pairs.permute(order).flatten(2).contiguous()


def _pack_quads(codes: Tensor) -> Tensor:
    """int8 [out, in] -> uint8 [panels, in / 2, 128]: four inputs of output 0, the same four of output 1, ..."""
    quads = padded_rows(codes.view(torch.uint8) ^ MIDDLE).view(-1, COLUMNS, codes.shape[1] // 4, 4)
    return quads.transpose(1, 2).reshape(len(quads), codes.shape[1] // 2, 2 * COLUMNS)
