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
MAX_BANDS = 8  # that multiply_panel takes
CONFIGURATION = 9  # int64 words of a thread's memory for `configure`
STATE = CONFIGURATION + (MAX_BANDS - 1) * COLUMNS // 2  # and for `hold_shared`
_I64 = ir.IntType(64)


# Instructions for `for_sums`.
LOAD, STORE, ZERO = "tileloadd {at}($0,$1,1), %tmm{tile}", "tilestored %tmm{tile}, {at}($0,$1,1)", "tilezero %tmm{tile}"


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
    """Give the tiles the sizes for 1 to 32 rows, unless they have them: it takes 400 cycles. state
    [CONFIGURATION]: what is loaded, and the number of rows it is for, 0 at first."""
    if read(state, CONFIGURATION - 1) == num_rows:
        return
    write(state, CONFIGURATION - 1, num_rows)
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


@jit
def bands_of(num_rows):
    """(number of bands, rows of each). All have as many rows, so that the tiles keep their sizes; the last band begins
    earlier where they would be too many."""
    bands = (num_rows + BAND_ROWS - 1) // BAND_ROWS
    return bands, (num_rows + bands - 1) // bands


@jit
def hold_shared(state, sums, last, shared):
    """Note the sums of the rows that belong to both of the last bands, `shared` rows from the first row `last` of the
    last band on, before any of them is raised."""
    if shared > 0:
        place, size = advance(state, CONFIGURATION), 4 * COLUMNS * shared
        simd.copy_bytes(simd.address(place), simd.address(advance(sums, last * COLUMNS)), size)


@jit
def restore_shared(state, sums, last, shared):
    """Undo what the last band but one did to the rows that it shares with the last: the last does it again."""
    if shared > 0:
        place, size = advance(state, CONFIGURATION), 4 * COLUMNS * shared
        simd.copy_bytes(simd.address(advance(sums, last * COLUMNS)), simd.address(place), size)


def _tile_of(bands, columns):
    """The number of the tile that holds the sums of each (band, column)."""
    return {(band, c): band * columns + c for band in range(bands) for c in range(columns)}


def _bands_of(builder, pointer, row, bands):
    return [builder.gep(pointer, [builder.mul(row, _number(ROWS * band))]) for band in range(bands)]


def for_sums(builder, instruction, bands, columns, out, out_stride):
    """Code: an instruction for each tile of sums and its place in `out`; out_stride in words."""
    tiles, out_bytes = _tile_of(bands, columns), builder.mul(out_stride, _number(4))
    for band, place in enumerate(_bands_of(builder, out, out_stride, bands)):
        lines = [instruction.format(at=64 * c, tile=tiles[band, c]) for c in range(columns)]
        _assembly(builder, lines, place, out_bytes)


def add_products(builder, bands, columns, x, x_stride, words, stride, steps, meanwhile, pieces=1, dot="tdpbf16ps"):
    """Code: raise the tiles of sums by x @ words, over `steps` steps of DEPTH words of a row. Strides in words.

    meanwhile(piece): code that runs beside the tiles, `pieces` times a step, once or after each column; `piece` counts
    how often it has run. A core works on some hundred instructions in a row at the same time, so vectors and tiles that
    follow one another closely do not wait for each other.
    """
    tiles, first_x = _tile_of(bands, columns), 4
    first_word = first_x + bands
    x_bytes, word_bytes = builder.mul(x_stride, _number(4)), builder.mul(stride, _number(4))
    with cgutils.for_range(builder, steps) as loop:
        at = builder.mul(loop.index, _number(DEPTH))
        rows = _bands_of(builder, builder.gep(x, [at]), x_stride, bands)
        column = builder.gep(words, [builder.mul(at, stride)])
        code = [f"tileloadd (${band},${bands + 1},1), %tmm{first_x + band}" for band in range(bands)]
        for c in range(columns):
            word = first_word + c % (8 - first_word)
            code.append(f"tileloadd {64 * c}(${bands},${bands + 2},1), %tmm{word}")
            code += [f"{dot} %tmm{word}, %tmm{first_x + band}, %tmm{tiles[band, c]}" for band in range(bands)]
            if (c + 1) * pieces % columns == 0:
                _assembly(builder, code, *rows, column, x_bytes, word_bytes)
                piece = _number((c + 1) * pieces // columns - 1)
                meanwhile(builder.add(builder.mul(loop.index, _number(pieces)), piece))
                code = []


def _multiply(bands, columns, doc, adds=True, dot="tdpbf16ps"):
    """An intrinsic: out[r, :] += x[r, :] @ words for the rows that are configured, in one band of up to sixteen or two,
    and 16 * `columns` columns; not `adds`: out[r, :] = x[r, :] @ words.

    dot: the instruction; tdpbsud multiplies words of four integers, signed bytes of x by unsigned bytes of `words`, and
    gives int32. Strides in words; `steps` of DEPTH words of a row. Each step prefetches `lines` cache lines of `soon`,
    one after the other.
    """

    def codegen(context, builder, sig, args):
        x, x_stride, words, stride, steps, out, out_stride, soon, lines = args

        def prefetch(step):
            with cgutils.for_range(builder, lines) as line:
                index = builder.add(builder.mul(step, lines), line.index)
                simd.prefetch(builder, builder.gep(soon, [builder.mul(index, _number(WIDTH))]))

        for_sums(builder, LOAD if adds else ZERO, bands, columns, out, out_stride)
        add_products(builder, bands, columns, x, x_stride, words, stride, steps, prefetch, dot=dot)
        for_sums(builder, STORE, bands, columns, out, out_stride)
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
    bands, size = bands_of(num_rows)
    steps, last, shared = depth // DEPTH, num_rows - size, bands * size - num_rows
    lines //= bands
    _configure_tiles(state, size)
    hold_shared(state, sums, last, shared)
    for band in range(bands):
        if band == bands - 1:
            restore_shared(state, sums, last, shared)
        row = min(band * size, last)
        a, out = advance(x, row * x_stride), advance(sums, row * COLUMNS)
        later = advance(soon, band * lines * steps * WIDTH)
        if size <= ROWS and adds:
            _add4(a, x_stride, panel, COLUMNS, steps, out, COLUMNS, later, lines)
        elif size <= ROWS:
            _set4(a, x_stride, panel, COLUMNS, steps, out, COLUMNS, later, lines)
        else:
            for column in range(0, COLUMNS, COLUMNS // 2):
                place, share = advance(out, column), advance(later, column * lines * steps * WIDTH // COLUMNS)
                if adds:
                    _add_bands(a, x_stride, advance(panel, column), COLUMNS, steps, place, COLUMNS, share, lines // 2)
                else:
                    _set_bands(a, x_stride, advance(panel, column), COLUMNS, steps, place, COLUMNS, share, lines // 2)


@intrinsic
def _zero_sums(typingctx):
    """Zeros for the sums of up to 16 rows and 64 columns, in their tiles."""

    def codegen(context, builder, sig, args):
        _assembly(builder, [ZERO.format(tile=tile) for tile in range(4)])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def _multiply_keys(typingctx, keys, stride, queries, steps, scores):
    """scores [16, 16] = keys @ queries, over `steps` steps of DEPTH words: sixteen keys, rows of `stride` words, and
    the words of sixteen queries, int32 [steps * DEPTH, 16]. The tiles have the sizes for up to 16 rows, which leave
    three tiles of sixteen."""

    def codegen(context, builder, sig, args):
        keys, stride, queries, steps, scores = args
        key_bytes, line = builder.mul(stride, _number(4)), _number(64)
        _assembly(builder, [ZERO.format(tile=7)])
        with cgutils.for_range(builder, steps) as loop:
            at = builder.mul(loop.index, _number(DEPTH))
            places = builder.gep(keys, [at]), key_bytes, builder.gep(queries, [builder.mul(at, _number(ROWS))]), line
            loads = "tileloadd ($0,$1,1), %tmm5", "tileloadd ($2,$3,1), %tmm6"
            _assembly(builder, [*loads, "tdpbf16ps %tmm6, %tmm5, %tmm7"], *places)
        _assembly(builder, [STORE.format(at=0, tile=7)], scores, line)
        return context.get_dummy_value()

    return types.void(I32Pointer, types.int64, I32Pointer, types.int64, F32Pointer), codegen


def _move_sums(instruction, columns, doc):
    """An intrinsic: an instruction of for_sums for up to 16 rows and 16 * `columns` columns."""

    def codegen(context, builder, sig, args):
        for_sums(builder, instruction, 1, columns, *args)
        return context.get_dummy_value()

    def typing(typingctx, out, out_stride):
        return types.void(F32Pointer, types.int64), codegen

    typing.__doc__ = doc
    return intrinsic(typing)


_load2, _load4 = (_move_sums(LOAD, n, f"The tiles = out[r, :{16 * n}], up to 16 rows.") for n in (2, 4))
_store2, _store4 = (_move_sums(STORE, n, f"out[r, :{16 * n}] = the tiles, up to 16 rows.") for n in (2, 4))


def _weigh(columns):
    """An intrinsic: raise `columns` tiles of sums of up to 16 rows by sixteen rows of numbers, weighted.

    Numbers lie in memory as they are, two in a word, and both belong to the same weight. Weights are words with a zero:
    `firsts` have the weight in the lower half and leave only the first number of each word, `seconds` only the second.
    So two tiles of sums, of first and of second numbers, belong to a tile of sixteen words.
    """

    def codegen(context, builder, sig, args):
        firsts, seconds, stride, numbers, words = args
        code = [f"tileloadd {64 * c}($2,$4,1), %tmm{5 + c}" for c in range(columns // 2)]
        for half in range(2):
            code.append(f"tileloadd (${half},$3,1), %tmm4")
            code += [f"tdpbf16ps %tmm{5 + c}, %tmm4, %tmm{2 * c + half}" for c in range(columns // 2)]
        sizes = builder.mul(stride, _number(4)), builder.mul(words, _number(4))
        _assembly(builder, code, firsts, seconds, numbers, *sizes)
        return context.get_dummy_value()

    def typing(typingctx, firsts, seconds, stride, numbers, words):
        i64 = types.int64
        return types.void(F32Pointer, F32Pointer, i64, I32Pointer, i64), codegen

    typing.__doc__ = f"{16 * columns} weighted columns; strides of weights and of numbers in words."
    return intrinsic(typing)


_weigh2, _weigh4 = _weigh(2), _weigh(4)
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


_FUNCTIONS = _configure_tiles, _release, _zero_sums, _multiply_panel, _multiply_keys, _set2, _set4, _add2, _add4
configure, release, zero_sums, multiply_panel, multiply_keys, set2, set4, add2, add4 = (
    _FUNCTIONS if HAS_BF16_TILES else [never] * 9
)
_WEIGHTED_SUMS = _load2, _load4, _weigh2, _weigh4, _store2, _store4
load2, load4, weigh2, weigh4, store2, store4 = _WEIGHTED_SUMS if HAS_BF16_TILES else [never] * 6
multiply_integers = _multiply_integers if HAS_INT8_TILES else never
