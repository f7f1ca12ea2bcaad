"""The bf16 linear layer over weights of 12 bits each, without loss: a step of few rows takes as long as memory does.

A bf16 number has 8 bits of exponent, but trained weights use few exponents: their entropy is 2.6 bits (Zhang et al.
2025, "70 % Size, 100 % Accuracy: Lossless LLM Compression for Efficient GPU Inference via Dynamic-Length Float",
section 2). So a panel of 64 outputs stores the sign and the mantissa of a weight, 8 bits, and 4 bits that name one of
the sixteen most frequent exponents of the panel. Every weight has the same length, so a panel is read in order: one
instruction looks 32 exponents up (vpermw), one puts the parts together (vpternlogd), and vdpbf16ps multiplies as in
kernels/cpu/linear/panels.py, in the same order of the same numbers. Results have the same bits. (Processors without
these instructions take several for each. With AMX, the words go through L1 to its tiles.)

Some weights have another exponent: of normally distributed weights one in 14,000. Their pair of inputs is stored plain
for all outputs of the panel. Above MAX_ROWS, decoding takes longer than reading plain weights, so both forms are kept.
"""

from dataclasses import dataclass

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from kernels import huge_pages
from kernels.cpu import amx, simd
from kernels.cpu.codes import WIDTH, F32Pointer
from kernels.cpu.dots import LANES, broadcast, by_rows, dot, lanes, look_up, never, vector_at
from kernels.cpu.elementwise.activations import Gate
from kernels.cpu.features import HAS_AVX512, HAS_BF16_DOT, HAS_BF16_TILES
from kernels.cpu.linear.panels import (
    COLUMNS,
    NO_GATE,
    ZERO,
    multiply_ahead,
    store_gated_outputs,
    store_outputs,
    word_rows,
)
from kernels.cpu.linear.places import RowGroups, count_items, give_out_rest, place_of
from kernels.cpu.parallel import empty, empty_rows, jit, next_item, parallel_kernel
from kernels.cpu.simd import I32Pointer, advance, read, splat, store, write

# 24 sums, 4 decoded words, a word of x and 3 constants fill the 32 registers. Without vdpbf16ps a row takes more
# arithmetic, and AVX2 has neither vpermw nor 32 registers: more rows take as long as with plain weights, or longer. AMX
# multiplies faster than memory is read.
MAX_ROWS = 128 if HAS_BF16_TILES else 6 if HAS_BF16_DOT else 4 if HAS_AVX512 else 2
# Words of a panel that are decoded at a time for more than 16 rows and AMX, 8 KiB. With 16 KiB L1 is too small.
DECODED = 2 * amx.DEPTH
VECTORS = COLUMNS // WIDTH
WORDS = 3 * WIDTH  # 32-bit words that hold a pair of inputs of 64 outputs: codes, and signs and mantissas twice
# Prefetch distance in words, 6 KiB, or 12 with AMX: as much as plain panels want reads a twentieth slower.
AHEAD = (64 if HAS_BF16_TILES else 32) * WORDS
EXPONENTS = 16
REST = 0x807F807F - (1 << 32)  # sign and mantissa of both numbers of a word
MAX_OTHER = 1 / 16  # most pairs of inputs stored plain: at 0.05, 1 row is 1.2 times as fast as plain, 6 rows 1.0

_F32V, _I32V = (ir.VectorType(scalar, WIDTH) for scalar in (ir.FloatType(), ir.IntType(32)))
_I64 = ir.IntType(64)


def _decoded(builder, panel, at, table):
    """The bf16 pairs of 64 outputs, as four vectors; `at`: word of the panel's line of codes.

    Lane 2 * o + i of the codes holds input i of the pair for outputs o, 16 + o, 32 + o and 48 + o, from its lowest bits
    on. A lane of a line of rests holds two numbers: sign and mantissa of the first are in place, those of the second
    are once its bytes are exchanged.
    """
    codes, *rests = (
        builder.load(vector_at(builder, panel, builder.add(at, ir.Constant(_I64, line * WIDTH)), LANES), align=4)
        for line in range(3)
    )
    found = []
    for v in range(VECTORS):
        exponents = look_up(builder, builder.lshr(codes, lanes(4 * v)) if v else codes, table)
        rest = rests[v // 2]
        if v % 2:
            rest = builder.or_(builder.shl(rest, lanes(8)), builder.lshr(rest, lanes(8)))
        words = builder.or_(builder.and_(rest, lanes(REST & 0xFFFF)), exponents)
        found.append(builder.bitcast(words, _I32V))
    return found


def _multiply(rows):
    """An intrinsic: sums[r, :] += x[r, :] @ panel for `rows` rows and 64 outputs over `depth` words of a row. table:
    the exponents, in their place, int16 [32]: sixteen, twice."""
    cells = [(r, v) for r in range(rows) for v in range(VECTORS)]

    def codegen(context, builder, sig, args):
        x, x_stride, panel, depth, table, sums = args
        exponents = builder.load(vector_at(builder, table, ir.Constant(_I64, 0), LANES), align=4)
        totals, targets = {}, {}
        for r, v in cells:
            targets[r, v] = vector_at(builder, sums, ir.Constant(_I64, r * COLUMNS + v * WIDTH), _F32V)
            totals[r, v] = cgutils.alloca_once(builder, _F32V)
            builder.store(builder.load(targets[r, v], align=4), totals[r, v])
        with cgutils.for_range(builder, depth) as loop:
            at = builder.mul(loop.index, ir.Constant(_I64, WORDS))
            for line in range(0, WORDS, WIDTH):
                simd.prefetch(builder, builder.gep(panel, [builder.add(at, ir.Constant(_I64, AHEAD + line))]))
            decoded = _decoded(builder, panel, at, exponents)
            for r in range(rows):
                place = builder.add(builder.mul(x_stride, ir.Constant(_I64, r)), loop.index)
                pair = broadcast(builder, builder.load(builder.gep(x, [place])))
                for v, words in enumerate(decoded):
                    builder.store(dot(builder, builder.load(totals[r, v]), pair, words), totals[r, v])
        for cell in cells:
            builder.store(builder.load(totals[cell]), targets[cell], align=4)
        return context.get_dummy_value()

    def typing(typingctx, x, x_stride, panel, depth, table, sums):
        i64 = types.int64
        return types.void(I32Pointer, i64, I32Pointer, i64, I32Pointer, F32Pointer), codegen

    typing.__doc__ = f"{rows} rows of a compressed panel's columns."
    return intrinsic(typing)


_multiply_coded = by_rows([] if HAS_BF16_TILES else [_multiply(rows) for rows in range(1, MAX_ROWS + 1)])


@jit
def _multiply_panel(num_rows, x, x_stride, panel, words, table, others, plain, other, last, sums):
    """sums[r, :] += x[r, :] @ panel. others[other : last]: the words that are read from `plain`, in order. Each
    prefetches the next."""
    word = 0
    while word < words:
        stop = np.int64(read(others, other)) if other < last else words
        if stop > word:
            part = advance(panel, word * WORDS)
            _multiply_coded(num_rows, advance(x, word), x_stride, part, stop - word, table, sums)
        if stop < words:
            line = advance(plain, other * COLUMNS)
            multiply_ahead(num_rows, advance(x, stop), x_stride, line, 1, sums, advance(line, COLUMNS))
            other += 1
        word = stop + 1


def _decode_words(builder, panel, first, count, exponents, target):
    """Code: target[word, :] = the bf16 pairs of 64 outputs, for the words first : first + count of a panel."""
    with cgutils.for_range(builder, count) as loop:
        word = builder.add(first, loop.index)
        at = builder.mul(word, ir.Constant(_I64, WORDS))
        for line in range(0, WORDS, WIDTH):
            simd.prefetch(builder, builder.gep(panel, [builder.add(at, ir.Constant(_I64, AHEAD + line))]))
        row = builder.mul(word, ir.Constant(_I64, COLUMNS))
        for v, words in enumerate(_decoded(builder, panel, at, exponents)):
            place = vector_at(builder, target, builder.add(row, ir.Constant(_I64, v * WIDTH)), _I32V)
            builder.store(words, place, align=4)


def _exponents_of(builder, table):
    return builder.load(vector_at(builder, table, ir.Constant(_I64, 0), LANES), align=4)


@intrinsic
def _decode(typingctx, panel, depth, table, target):
    """target[word, :] = the bf16 pairs of 64 outputs, for `depth` words of a panel."""

    def codegen(context, builder, sig, args):
        panel, depth, table, target = args
        _decode_words(builder, panel, ir.Constant(_I64, 0), depth, _exponents_of(builder, table), target)
        return context.get_dummy_value()

    return types.void(I32Pointer, types.int64, I32Pointer, I32Pointer), codegen


def _add_and_decode(builder, bands, columns, x, x_stride, decoded, steps, panel, num_words, share, table, target):
    """Code: amx.add_products over `steps` steps of `decoded`, and meanwhile decode num_words words from `panel` on to
    `target`: `share` of them after each column of tiles."""
    exponents = _exponents_of(builder, table)

    def meanwhile(piece):
        first = builder.mul(piece, share)
        left = builder.sub(num_words, first)
        count = builder.select(builder.icmp_signed("<", left, share), left, share)  # below 1: none
        _decode_words(builder, panel, first, count, exponents, target)

    stride = ir.Constant(_I64, COLUMNS)
    amx.add_products(builder, bands, columns, x, x_stride, decoded, stride, steps, meanwhile, columns)


@intrinsic
def _add_in_tiles(typingctx, x, x_stride, decoded, panel, num_words, share, table, target):
    """Raise the sums of up to 16 rows and 64 columns, in their tiles, by x @ decoded over DEPTH words; meanwhile
    decode: see _add_and_decode."""

    def codegen(context, builder, sig, args):
        x, x_stride, decoded, *rest = args
        _add_and_decode(builder, 1, 4, x, x_stride, decoded, ir.Constant(_I64, 1), *rest)
        return context.get_dummy_value()

    i64, i32 = types.int64, I32Pointer
    return types.void(i32, i64, i32, i32, i64, i64, i32, i32), codegen


@intrinsic
def _add_bands(typingctx, x, x_stride, decoded, steps, sums, panel, num_words, share, table, target):
    """sums[r, :] += x[r, :] @ decoded for 17 to 32 rows and 32 columns, over `steps` times DEPTH words; meanwhile
    decode: see _add_and_decode."""

    def codegen(context, builder, sig, args):
        x, x_stride, decoded, steps, sums, *rest = args
        stride = ir.Constant(_I64, COLUMNS)
        amx.for_sums(builder, amx.LOAD, 2, 2, sums, stride)
        _add_and_decode(builder, 2, 2, x, x_stride, decoded, steps, *rest)
        amx.for_sums(builder, amx.STORE, 2, 2, sums, stride)
        return context.get_dummy_value()

    i64, i32 = types.int64, I32Pointer
    return types.void(i32, i64, i32, i64, F32Pointer, i32, i64, i64, i32, i32), codegen


@jit
def _put_others(others, plain, other, last, first, depth, decoded):
    """Write the words first : first + depth that are stored plain to their places in `decoded`; returns the next of
    them."""
    while other < last and np.int64(read(others, other)) < first + depth:
        place = advance(decoded, (np.int64(read(others, other)) - first) * COLUMNS)
        simd.copy_bytes(simd.address(place), simd.address(advance(plain, other * COLUMNS)), 4 * COLUMNS)
        other += 1
    return other


@jit
def _multiply_few(state, num_rows, x, x_stride, panel, words, table, others, plain, other, last, rooms, sums):
    """As _multiply_decoded, for up to 16 rows: their sums stay in tiles."""
    amx.configure(state, num_rows)
    amx.zero_sums()
    _decode(panel, amx.DEPTH, table, rooms)
    other = _put_others(others, plain, other, last, 0, amx.DEPTH, rooms)
    now, later = rooms, advance(rooms, amx.DEPTH * COLUMNS)
    for first in range(0, words, amx.DEPTH):
        then = first + amx.DEPTH
        num_words = amx.DEPTH if then < words else 0
        _add_in_tiles(advance(x, first), x_stride, now, advance(panel, then * WORDS), num_words, amx.DEPTH // 4, table,
                      later)  # fmt: skip
        if num_words > 0:
            other = _put_others(others, plain, other, last, then, num_words, later)
        now, later = later, now
    amx.store4(sums, COLUMNS)


@jit
def _multiply_many(state, num_rows, x, x_stride, panel, words, table, others, plain, other, last, rooms, sums):
    """As _multiply_decoded, for more than 16 rows."""
    bands, size = amx.bands_of(num_rows)
    last_row, shared = num_rows - size, bands * size - num_rows
    share = (DECODED + 8 * bands - 1) // (8 * bands)  # a band has two steps of four columns of tiles
    amx.configure(state, size)
    for i in range(0, num_rows * COLUMNS, WIDTH):
        store(sums, i, splat(ZERO))
    _decode(panel, min(DECODED, words), table, rooms)
    other = _put_others(others, plain, other, last, 0, DECODED, rooms)
    now, later = rooms, advance(rooms, DECODED * COLUMNS)
    for first in range(0, words, DECODED):
        then = first + DECODED
        steps, num_words = min(DECODED, words - first) // amx.DEPTH, min(DECODED, words - then)
        rest, target = advance(panel, then * WORDS), later
        amx.hold_shared(state, sums, last_row, shared)
        for band in range(bands):
            if band == bands - 1:
                amx.restore_shared(state, sums, last_row, shared)
            row = min(band * size, last_row)
            a, out = advance(x, row * x_stride + first), advance(sums, row * COLUMNS)
            for column in range(0, COLUMNS, COLUMNS // 2):
                _add_bands(a, x_stride, advance(now, column), steps, advance(out, column), rest, num_words, share,
                           table, target)  # fmt: skip
                count = 2 * steps * share
                rest, target = advance(rest, count * WORDS), advance(target, count * COLUMNS)
                num_words -= count
        if then < words:
            other = _put_others(others, plain, other, last, then, DECODED, later)
        now, later = later, now


@jit
def _multiply_decoded(state, num_rows, x, x_stride, panel, words, table, others, plain, other, last, rooms, sums):
    """sums[r, :] = x[r, :] @ panel by AMX. rooms: for twice DECODED words of the panel, which stay in L1 between
    vectors and tiles: while some are multiplied, the next are decoded."""
    if num_rows <= amx.ROWS:
        _multiply_few(state, num_rows, x, x_stride, panel, words, table, others, plain, other, last, rooms, sums)
    else:
        _multiply_many(state, num_rows, x, x_stride, panel, words, table, others, plain, other, last, rooms, sums)


multiply_decoded = _multiply_decoded if HAS_BF16_TILES else never


@parallel_kernel("16q2d1q")
def _compressed_linear(args):
    """Work items are panels, with all rows or those of an expert: see places.py."""
    x, codes, tables, starts = (
        simd.pointer_i32(args[2]), simd.pointer_i32(args[3]), simd.pointer_i32(args[4]), simd.pointer_i32(args[5])
    )  # fmt: skip
    others, plain, out, bias = (
        simd.pointer_i32(args[6]), simd.pointer_i32(args[7]), simd.pointer_bf16(args[8]), simd.pointer_bf16(args[9])
    )  # fmt: skip
    num_rows, x_stride, words, out_features, num_runs = args[10], args[11], args[12], args[13], args[14]
    num_panels, table, function = args[15], simd.pointer_i64(args[16]), args[17]
    limit, slope = np.float32(simd.as_float(args[18])), np.float32(simd.as_float(args[19]))
    scratch, tiles = np.empty(MAX_ROWS * COLUMNS + WIDTH, np.float32), np.zeros(amx.STATE, np.int64)
    sums = simd.pointer_f32((scratch.ctypes.data + 63) // 64 * 64)
    state = simd.pointer_i64(tiles.ctypes.data)
    memory = np.empty(2 * DECODED * COLUMNS + WIDTH if HAS_BF16_TILES else 1, np.int32)
    rooms = simd.pointer_i32((memory.ctypes.data + 63) // 64 * 64)
    items = count_items(args[1], table, num_panels)
    item = next_item(args)
    while item < items:
        matrix, place, begin, rows = place_of(item, items, table, num_rows, num_panels, num_runs, MAX_ROWS)
        panel, column, terms = matrix * num_panels + place, place * COLUMNS, bias
        if simd.address(bias) != 0:
            terms = advance(bias, matrix * out_features)
        a, panel_codes, exponents = (
            advance(x, begin * x_stride), advance(codes, panel * words * WORDS), advance(tables, panel * WIDTH)
        )  # fmt: skip
        other, last = np.int64(read(starts, panel)), np.int64(read(starts, panel + 1))
        if HAS_BF16_TILES:
            multiply_decoded(state, rows, a, x_stride, panel_codes, words, exponents, others, plain, other, last,
                             rooms, sums)  # fmt: skip
        else:
            for i in range(0, rows * COLUMNS, WIDTH):
                store(sums, i, splat(ZERO))
            _multiply_panel(rows, a, x_stride, panel_codes, words, exponents, others, plain, other, last, sums)
        if function < 0:
            store_outputs(sums, terms, out, out_features, rows, begin, column)
        else:
            store_gated_outputs(sums, terms, out, args[20], rows, begin, column, function, limit, slope)
        item = next_item(args)
    give_out_rest(args)
    if HAS_BF16_TILES:
        amx.release()
    simd.keep(scratch)
    simd.keep(tiles)
    simd.keep(memory)


@jit
def _exponent(word, half):
    return (word >> (16 * half + 7)) & 0xFF


@jit
def _choose_exponents(counts, codes, table):
    """The sixteen most frequent exponents: their codes, others get EXPONENTS; and the table of them, in their place."""
    for exponent in range(256):
        codes[exponent] = EXPONENTS
    for code in range(EXPONENTS):
        best = 0
        for exponent in range(256):
            if counts[exponent] > counts[best]:
                best = exponent
        codes[best], counts[best] = code, -1
        write(table, code // 2, read(table, code // 2) | np.int32(best << (7 + 16 * (code % 2))))
    for i in range(EXPONENTS // 2):
        write(table, i + EXPONENTS // 2, read(table, i))


@parallel_kernel("5q")
def _compress(args):
    """Work items are panels. Marks the words of inputs with an exponent that has no code."""
    plain, packed, tables, marks = (
        simd.pointer_i32(args[2]), simd.pointer_i32(args[3]), simd.pointer_i32(args[4]), simd.pointer_i32(args[5])
    )  # fmt: skip
    words = args[6]
    counts, codes = np.empty(256, np.int64), np.empty(256, np.int64)
    item = next_item(args)
    while item < args[1]:
        source, target = advance(plain, item * words * COLUMNS), advance(packed, item * words * WORDS)
        counts[:] = 0
        for i in range(words * COLUMNS):
            word = np.int64(read(source, i))
            counts[_exponent(word, 0)] += 1
            counts[_exponent(word, 1)] += 1
        _choose_exponents(counts, codes, advance(tables, item * WIDTH))
        for k in range(words):
            has_other = False
            for o in range(WIDTH):
                line = np.int64(0)
                for v in range(VECTORS):
                    word = np.int64(read(source, k * COLUMNS + v * WIDTH + o))
                    first, second = codes[_exponent(word, 0)], codes[_exponent(word, 1)]
                    has_other |= first == EXPONENTS or second == EXPONENTS
                    line |= (first & 15) << (4 * v) | (second & 15) << (4 * v + 16)
                write(target, k * WORDS + o, np.int32(line))
                for pair in range(VECTORS // 2):
                    at = k * COLUMNS + 2 * pair * WIDTH + o
                    rest = np.int64(read(source, at + WIDTH)) & REST
                    rest = (rest & 0x00FF00FF) << 8 | (rest >> 8) & 0x00FF00FF
                    rest |= np.int64(read(source, at)) & REST
                    write(target, k * WORDS + (pair + 1) * WIDTH + o, np.int32(rest))
            write(marks, item * words + k, np.int32(has_other))
        item = next_item(args)


@dataclass(frozen=True, slots=True)
class CompressedPanels:
    """The weights of panels.pack in 12 bits each; `linear` and `gated_linear` give the same bits as those of panels.py.

    codes: int32 [panels, words, 48]. tables: int32 [panels, 16], the sixteen exponents of a panel, twice. others[
    starts[p] : starts[p + 1]]: the words of panel p with an exponent that is not in its table, in order; plain: these
    words for all outputs, int32 [others, 64].
    """

    codes: Tensor
    tables: Tensor
    starts: Tensor
    others: Tensor
    plain: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes in memory."""
        return sum(x.nbytes for x in (self.codes, self.tables, self.starts, self.others, self.plain))

    def takes(self, x: Tensor) -> bool:
        """True if x has few rows."""
        return 0 < len(x) <= MAX_ROWS

    def linear(self, x: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
        """x bf16 [num_rows, in_features], whose rows may be strided -> bf16 [num_rows, out_features]."""
        return self._run(x, bias, out_features, empty((x.shape[0], out_features), torch.bfloat16), NO_GATE)

    def gated_linear(self, x: Tensor, bias: Tensor | None, out_features: int, function: str) -> Tensor:
        """See panels.gated_linear."""
        out = empty_rows((x.shape[0], out_features // 2), torch.bfloat16)
        return self._run(x, bias, out_features, out, Gate(function).arguments)

    def grouped_linear(self, x: Tensor, biases: Tensor | None, out_features: int, groups: RowGroups) -> Tensor:
        """See panels.grouped_linear. No block has more than MAX_ROWS rows."""
        out = empty((x.shape[0], out_features), torch.bfloat16)
        return self._run(x, biases, out_features, out, NO_GATE, groups)

    def grouped_gated_linear(
        self, x: Tensor, biases: Tensor | None, out_features: int, groups: RowGroups, gate: Gate
    ) -> Tensor:
        """See panels.grouped_gated_linear. No block has more than MAX_ROWS rows."""
        out = empty_rows((x.shape[0], out_features // 2), torch.bfloat16)
        return self._run(x, biases, out_features, out, gate.arguments, groups)

    def _run(
        self,
        x: Tensor,
        bias: Tensor | None,
        out_features: int,
        out: Tensor,
        gate: tuple[int, float, float],
        groups: RowGroups | None = None,
    ) -> Tensor:
        x, row_stride = word_rows(x)
        num_panels, words, _ = self.codes.shape
        blocks, table = 1, 0
        if groups is not None:
            num_panels //= groups.num_experts
            blocks, table = groups.most_blocks, groups.table.data_ptr()
        _compressed_linear(
            num_panels * blocks,
            x.data_ptr(), self.codes.data_ptr(), self.tables.data_ptr(), self.starts.data_ptr(),
            self.others.data_ptr(), self.plain.data_ptr(), out.data_ptr(), 0 if bias is None else bias.data_ptr(),
            x.shape[0], row_stride, words, out_features, torch.get_num_threads(), num_panels, table, *gate,
            out.stride(0),
        )  # fmt: skip
        return out


def compress(panels: Tensor) -> CompressedPanels | None:
    """panels: see panels.pack. None for weights whose exponents differ too much to gain anything, and for shapes that
    AMX does not multiply on a processor that has it."""
    num_panels, words, _ = panels.shape
    if HAS_BF16_TILES and not amx.multiplies.py_func(words):
        return None  # panels.py multiplies with such weights in another order
    codes = torch.empty((num_panels, words, WORDS), dtype=torch.int32)
    tables = torch.zeros((num_panels, WIDTH), dtype=torch.int32)
    marks = torch.empty((num_panels, words), dtype=torch.int32)
    _compress(num_panels, panels.data_ptr(), codes.data_ptr(), tables.data_ptr(), marks.data_ptr(), words)
    marked = marks.bool()
    starts = torch.zeros(num_panels + 1, dtype=torch.int32)
    starts[1:] = marked.sum(1).cumsum(0)
    if starts[-1] > MAX_OTHER * marks.numel():
        return None
    return CompressedPanels(huge_pages.copy(codes), tables, starts, marked.nonzero()[:, 1].int(), panels[marked])
