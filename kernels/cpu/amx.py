"""AMX, the matrix unit of Intel's server processors since Sapphire Rapids: products of tiles of bf16 pairs, for numba.

A core has eight tiles of up to 16 rows of 64 bytes. TDPBF16PS raises 16 x 16 sums in fp32 by the product of 16 rows of
x, 32 numbers each, and sixteen words of sixteen columns (a word is two neighbouring numbers of one sum, as in dots.py),
in 16 cycles: sixteen times the rate of vdpbf16ps (Intel's Software Developer's Manual, volume 2, TDPBF16PS). A row's
sums do not depend on the rows beside it. But the instruction adds its 32 products to each other before it adds them to
the sum, so the bits are not those of vdpbf16ps: a layer multiplies all its rows by tiles, even a single one.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu import simd
from kernels.cpu.codes import WIDTH, F32Pointer
from kernels.cpu.dots import never
from kernels.cpu.features import HAS_BF16_TILES, HAS_INT8_TILES
from kernels.cpu.parallel import jit
from kernels.cpu.simd import I32Pointer, I64Pointer, advance, read, write

ROWS = 16  # a tile has
DEPTH = 16  # words of a row in a tile
BAND_ROWS = 2 * ROWS  # that are multiplied at a time: four tiles of sums, two of x, two of words
COLUMNS = 64  # a panel has, see kernels/cpu/linear/panels.py
LINES = DEPTH * COLUMNS // WIDTH  # cache lines of a panel for DEPTH words of a row
STATE = 9  # int64 words of a thread's memory for `configure`
_I64 = ir.IntType(64)


@jit
def multiplies(words):
    """True if a layer with so many words in a row is multiplied in tiles."""
    return HAS_BF16_TILES and words % DEPTH == 0


def _number(value):
    return ir.Constant(_I64, value)


def _assembly(builder, lines, *args):
    """Instructions that use tiles and memory, of which LLVM knows nothing; $i is the register of args[i]."""
    constraints = ",".join(["r"] * len(args) + ["~{memory}"])
    function = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    builder.call(ir.InlineAsm(function, "\n".join(lines), constraints, side_effect=True), args)


@intrinsic
def _load_configuration(typingctx, place):
    """Give the tiles the sizes that 64 bytes describe, and fill them with zeros."""

    def codegen(context, builder, sig, args):
        _assembly(builder, ["ldtilecfg ($0)"], *args)
        return context.get_dummy_value()

    return types.void(I64Pointer), codegen


@intrinsic
def _release(typingctx):
    """Leave the tiles: the system saves those in use, 8 KiB, when it switches threads."""

    def codegen(context, builder, sig, args):
        _assembly(builder, ["tilerelease"])
        return context.get_dummy_value()

    return types.void(), codegen


@jit
def _configure_tiles(state, num_rows):
    """Give the tiles the sizes for 1 to 32 rows, unless they have them. state [STATE]: what is loaded, and the number
    of rows it is for, 0 at first."""
    if read(state, STATE - 1) == num_rows:
        return
    write(state, STATE - 1, num_rows)
    top, bottom = min(num_rows, ROWS), num_rows - ROWS
    for i in range(8):
        write(state, i, 0)
    write(state, 0, 1)  # the palette: eight tiles
    for i in range(2, 4):
        write(state, i, 0x0040_0040_0040_0040)  # bytes of a row of each tile
    if bottom <= 0:  # rows of each tile: four of sums, one of x, three of words
        write(state, 6, top * 0x01_01010101 + 0x101010 * 0x100_00000000)
    else:  # two of sums above, two below, x above and below, two of words
        write(state, 6, top * 0x01_00000101 + bottom * 0x0100_01010000 + 0x1010 * 0x10000_00000000)
    _load_configuration(state)


def _multiply(bands, columns, doc, adds=True, dot="tdpbf16ps"):
    """An intrinsic: out[r, :] += x[r, :] @ words for the rows that are configured, in one band of up to sixteen or two,
    and 16 * `columns` columns; not `adds`: out[r, :] = x[r, :] @ words.

    dot: the instruction; tdpbsud multiplies words of four integers, signed bytes of x by unsigned bytes of `words`, and
    gives int32. Strides in words; `steps` of DEPTH words of a row. Each step prefetches `lines` cache lines of `soon`,
    one after the other.
    """
    sums = {(band, c): band * columns + c for band in range(bands) for c in range(columns)}
    first_x = 4
    first_word = first_x + bands

    def codegen(context, builder, sig, args):
        x, x_stride, words, stride, steps, out, out_stride, soon, lines = args
        x_bytes, word_bytes, out_bytes = (builder.mul(s, _number(4)) for s in (x_stride, stride, out_stride))

        def bands_of(pointer, row):
            return [builder.gep(pointer, [builder.mul(row, _number(ROWS * band))]) for band in range(bands)]

        def for_sums(instruction):
            for band, place in enumerate(bands_of(out, out_stride)):
                at = [(64 * c, sums[band, c]) for c in range(columns)]
                _assembly(builder, [instruction.format(at=offset, tile=t) for offset, t in at], place, out_bytes)

        for_sums("tileloadd {at}($0,$1,1), %tmm{tile}" if adds else "tilezero %tmm{tile}")
        with cgutils.for_range(builder, steps) as loop:
            at = builder.mul(loop.index, _number(DEPTH))
            rows, column = bands_of(builder.gep(x, [at]), x_stride), builder.gep(words, [builder.mul(at, stride)])
            code = [f"tileloadd (${band},${bands + 1},1), %tmm{first_x + band}" for band in range(bands)]
            for c in range(columns):
                word = first_word + c % (8 - first_word)
                code.append(f"tileloadd {64 * c}(${bands},${bands + 2},1), %tmm{word}")
                code += [f"{dot} %tmm{word}, %tmm{first_x + band}, %tmm{sums[band, c]}" for band in range(bands)]
            _assembly(builder, code, *rows, column, x_bytes, word_bytes)
            with cgutils.for_range(builder, lines) as line:
                index = builder.add(builder.mul(loop.index, lines), line.index)
                simd.prefetch(builder, builder.gep(soon, [builder.mul(index, _number(WIDTH))]))
        for_sums("tilestored %tmm{tile}, {at}($0,$1,1)")
        return context.get_dummy_value()

    def typing(typingctx, x, x_stride, words, stride, steps, out, out_stride, soon, lines):
        i64 = types.int64
        return types.void(I32Pointer, i64, I32Pointer, i64, i64, F32Pointer, i64, I32Pointer, i64), codegen

    typing.__doc__ = doc
    return intrinsic(typing)


_set2, _set4 = (_multiply(1, n, f"Up to 16 rows and {16 * n} columns.", adds=False) for n in (2, 4))
_add2, _add4 = (_multiply(1, n, f"Up to 16 rows and {16 * n} columns.") for n in (2, 4))
_set_bands, _add_bands = (_multiply(2, 2, "17 to 32 rows and 32 columns.", adds) for adds in (False, True))


@jit
def _multiply_panel(state, x, x_stride, panel, depth, num_rows, sums, soon, lines, adds):
    """sums[r, :] += x[r, :] @ panel, over `depth` words of a row, a multiple of DEPTH; not `adds`: sums[r, :] = x[r, :]
    @ panel. The bands of rows prefetch `lines` cache lines of `soon` per DEPTH words, each its share."""
    steps, bands = depth // DEPTH, (num_rows + BAND_ROWS - 1) // BAND_ROWS
    lines //= bands
    for band in range(bands):
        row = band * BAND_ROWS
        count = min(BAND_ROWS, num_rows - row)
        a, out = advance(x, row * x_stride), advance(sums, row * COLUMNS)
        later = advance(soon, row * lines * steps // 2)
        _configure_tiles(state, count)
        if count <= ROWS and adds:
            _add4(a, x_stride, panel, COLUMNS, steps, out, COLUMNS, later, lines)
        elif count <= ROWS:
            _set4(a, x_stride, panel, COLUMNS, steps, out, COLUMNS, later, lines)
        else:
            for column in range(0, COLUMNS, COLUMNS // 2):
                place, share = advance(out, column), advance(later, column * lines * steps // 4)
                if adds:
                    _add_bands(a, x_stride, advance(panel, column), COLUMNS, steps, place, COLUMNS, share, lines // 2)
                else:
                    _set_bands(a, x_stride, advance(panel, column), COLUMNS, steps, place, COLUMNS, share, lines // 2)


_integers_of_band = _multiply(1, 4, "Integers of up to 16 rows and 64 columns.", False, "tdpbsud")
_integers_of_bands = _multiply(2, 2, "Integers of 17 to 32 rows and 32 columns.", False, "tdpbsud")


@jit
def _multiply_integers(state, x, x_stride, panel, depth, num_rows, out):
    """out[r, :] = x[r, :] @ panel in int32, for up to 32 rows over `depth` words of a row, a multiple of DEPTH."""
    steps = depth // DEPTH
    _configure_tiles(state, num_rows)
    if num_rows <= ROWS:
        _integers_of_band(x, x_stride, panel, COLUMNS, steps, out, COLUMNS, panel, 0)
    else:
        for column in range(0, COLUMNS, COLUMNS // 2):
            _integers_of_bands(x, x_stride, advance(panel, column), COLUMNS, steps, advance(out, column), COLUMNS,
                               panel, 0)  # fmt: skip


_FUNCTIONS = _configure_tiles, _release, _multiply_panel, _set2, _set4, _add2, _add4
configure, release, multiply_panel, set2, set4, add2, add4 = _FUNCTIONS if HAS_BF16_TILES else [never] * 7
multiply_integers = _multiply_integers if HAS_INT8_TILES else never
