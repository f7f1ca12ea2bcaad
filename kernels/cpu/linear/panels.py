"""The linear layer over bf16 weights of a CPU that multiplies bf16 pairs; with one row it is as fast as memory.

The weight is stored in panels of 64 outputs, and each panel is read from memory once, from its first word to its last:
a microkernel keeps six rows by 64 columns of sums in registers while it reads the panel. A row's sums do not depend on
the other rows. Unlike oneDNN's, the code does not depend on the number of rows. Time compared with oneDNN, all layers
of a llama of 90 M parameters, two cores with AVX512-BF16: two thirds with 1 or 2 rows, 70 to 80 % with 4 to 32, nine
tenths with 64. With AMX, tiles of rows and of a panel's words are multiplied (kernels/cpu/amx.py): four fifths of
oneDNN's time with 1 to 16 rows, as long with 512.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import huge_pages
from kernels.cpu import amx, simd, widened_dots
from kernels.cpu.codes import WIDTH
from kernels.cpu.dots import multiply
from kernels.cpu.elementwise.activations import FUNCTIONS, Gate, gated
from kernels.cpu.features import HAS_BF16_DOT, HAS_BF16_TILES, MULTIPLIES_PAIRS
from kernels.cpu.linear.places import RowGroups, count_items, give_out_rest, place_of
from kernels.cpu.parallel import empty, empty_rows, jit, next_item, parallel_kernel
from kernels.cpu.simd import advance, load, load_some, splat, store, store_both, store_some

COLUMNS = 64  # outputs per panel
HALF = COLUMNS // 2
ROWS = 6  # rows of a microkernel: 24 sums, 4 words of the panel and one word of x in 32 registers
ROWS_PER_ITEM = 256 if HAS_BF16_TILES else 96
# With AMX: bytes of the rows that are multiplied with a whole matrix before the next ones are. They stay in L2, half of
# it, while panel after panel is read; a core multiplies faster than it reads rows from L3.
BYTES_AT_A_TIME = 1 << 20
# Words of a row at a time: this part of a panel, 256 or 64 KiB, stays in L2 for the next rows.
DEPTH = 1024 if HAS_BF16_DOT else widened_dots.DEPTH
TILE_DEPTH = 128  # the same for tiles of AMX, so that the words of 32 rows and 32 columns stay in L1
# Prefetch distance in words, 16 KiB: 5.2 ms with 1 row, 6.2 ms at 4 KiB. Without vdpbf16ps, columns are read block by
# block, and all of what a block reads is to be there before.
AHEAD = 4096 if HAS_BF16_DOT else widened_dots.DEPTH * COLUMNS
ZERO = np.float32(0)
NO_GATE = (-1, 0.0, 0.0)  # in place of Gate.arguments


def _microkernel(lines):
    """sums[r, :] += x[r, :] @ panel for 1 to 6 rows, with a prefetch of `lines` cache lines of `soon` per word of
    depth."""
    rows1, rows2, rows3, rows4, rows5, rows6 = (
        multiply(rows, COLUMNS // WIDTH, f"{rows} rows of a panel's columns.", lines) for rows in range(1, ROWS + 1)
    )

    @jit
    def microkernel(num_rows, x, x_stride, panel, depth, sums, soon):
        if num_rows == 6:
            rows6(x, x_stride, panel, COLUMNS, depth, sums, COLUMNS, soon)
        elif num_rows == 5:
            rows5(x, x_stride, panel, COLUMNS, depth, sums, COLUMNS, soon)
        elif num_rows == 4:
            rows4(x, x_stride, panel, COLUMNS, depth, sums, COLUMNS, soon)
        elif num_rows == 3:
            rows3(x, x_stride, panel, COLUMNS, depth, sums, COLUMNS, soon)
        elif num_rows == 2:
            rows2(x, x_stride, panel, COLUMNS, depth, sums, COLUMNS, soon)
        else:
            rows1(x, x_stride, panel, COLUMNS, depth, sums, COLUMNS, soon)

    return microkernel


multiply_ahead, _half, _quarter = _microkernel(4), _microkernel(2), _microkernel(1)


@jit
def _multiply_rows(x, x_stride, panel, depth, num_rows, sums, soon):
    """sums[r, :] += x[r, :] @ panel, with the rows in groups of nearly equal size.

    The first group that reads a part of a panel waits for memory, and the others would leave memory idle. So each group
    prefetches a share of the next part, `soon`. A single group prefetches its own part, a little ahead.
    """
    groups = (num_rows + ROWS - 1) // ROWS
    groups = max(groups, 4) if groups > 2 else groups
    row = 0
    for group in range(groups):
        count = (num_rows - row + groups - group - 1) // (groups - group)
        a, out = advance(x, row * x_stride), advance(sums, row * COLUMNS)
        if groups == 1:
            multiply_ahead(count, a, x_stride, panel, depth, out, advance(panel, AHEAD))
        elif groups == 2:
            _half(count, a, x_stride, panel, depth, out, advance(soon, group * depth * COLUMNS // 2))
        else:
            _quarter(count, a, x_stride, panel, depth, out, advance(soon, group % 4 * depth * COLUMNS // 4))
        row += count


@jit
def store_outputs(sums, bias, out, out_features, rows, begin, column):
    """The outputs of a panel, row by row: a store that fills a cache line takes less time than two."""
    count = min(COLUMNS, out_features - column)
    whole, has_bias = count // WIDTH * WIDTH, simd.address(bias) != 0
    for r in range(rows if whole == COLUMNS else 0):
        row, place = advance(sums, r * COLUMNS), advance(out, (begin + r) * out_features + column)
        for c in range(0, COLUMNS, 2 * WIDTH):
            first, second = load(row, c), load(row, c + WIDTH)
            if has_bias:
                first = simd.add(first, load(bias, column + c))
                second = simd.add(second, load(bias, column + c + WIDTH))
            store_both(place, c, first, second)
    for c in range(0, whole if whole < COLUMNS else 0, WIDTH):
        offset = load(bias, column + c) if has_bias else splat(ZERO)
        for r in range(rows):
            value = simd.add(load(sums, r * COLUMNS + c), offset)
            store(out, (begin + r) * out_features + column + c, value)
    if whole < count:
        rest = count - whole
        offset = load_some(bias, column + whole, rest) if simd.address(bias) != 0 else splat(ZERO)
        for r in range(rows):
            value = simd.add(load(sums, r * COLUMNS + whole), offset)
            store_some(out, (begin + r) * out_features + column + whole, value, rest)


@jit
def _gated_outputs(sums, bias, column, function, limit, slope):
    """act(gate) * up of sixteen outputs. sums: of their gates; those of their ups are HALF further, as in `bias`."""
    gate, up = load(sums, 0), load(sums, HALF)
    if simd.address(bias) != 0:
        gate, up = simd.add(gate, load(bias, column)), simd.add(up, load(bias, column + HALF))
    return gated(gate, up, function, limit, slope, True)


@jit
def store_gated_outputs(sums, bias, out, out_stride, rows, begin, column, function, limit, slope):
    """act(gate) * up of a panel whose first half are gates, while the sums are in L1. limit, slope: see `gated`."""
    for r in range(rows):
        row, place = advance(sums, r * COLUMNS), (begin + r) * out_stride + column // 2
        first = _gated_outputs(row, bias, column, function, limit, slope)
        second = _gated_outputs(advance(row, WIDTH), bias, column + WIDTH, function, limit, slope)
        store_both(out, place, first, second)


@parallel_kernel("12q2d2q")
def _linear(args):
    """Work items: see places.py."""
    x, panels, out, bias = (
        simd.pointer_i32(args[2]), simd.pointer_i32(args[3]), simd.pointer_bf16(args[4]), simd.pointer_bf16(args[5])
    )  # fmt: skip
    num_rows, x_stride, words, out_features, num_runs = args[6], args[7], args[8], args[9], args[10]
    num_panels, table, function = args[11], simd.pointer_i64(args[12]), args[13]
    rows_per_item, out_stride = args[16], args[17]
    limit, slope = np.float32(simd.as_float(args[14])), np.float32(simd.as_float(args[15]))
    in_tiles = amx.multiplies(words)
    most = TILE_DEPTH if in_tiles else DEPTH
    # Up to 16 rows wait for memory anyway, and the processor's own prefetch reads faster than those of a program, which
    # go through L1.
    lines = amx.LINES if num_rows > amx.ROWS else 0
    scratch, tiles = np.empty(ROWS_PER_ITEM * COLUMNS + WIDTH, np.float32), np.zeros(amx.STATE, np.int64)
    sums = simd.pointer_f32((scratch.ctypes.data + 63) // 64 * 64)  # rows of tiles in whole cache lines
    state = simd.pointer_i64(tiles.ctypes.data)
    items = count_items(args[1], table, num_panels)
    item, next_one = next_item(args), next_item(args)
    while item < items:
        matrix, panel, begin, rows = place_of(item, items, table, num_rows, num_panels, num_runs, rows_per_item)
        other, after, _, _ = place_of(
            min(next_one, items - 1), items, table, num_rows, num_panels, num_runs, rows_per_item
        )
        start, then = (matrix * num_panels + panel) * COLUMNS * words, (other * num_panels + after) * COLUMNS * words
        column, terms = panel * COLUMNS, bias
        if simd.address(bias) != 0:
            terms = advance(bias, matrix * out_features)
        for i in range(0, 0 if in_tiles else rows * COLUMNS, WIDTH):
            store(sums, i, splat(ZERO))
        for k in range(0, words, most):
            at = start + k * COLUMNS
            soon = advance(panels, at + most * COLUMNS if k + most < words else then)
            a, part, depth = advance(x, begin * x_stride + k), advance(panels, at), min(most, words - k)
            if in_tiles:
                amx.multiply_panel(state, a, x_stride, part, depth, rows, sums, soon, lines, k > 0)
            else:
                _multiply_rows(a, x_stride, part, depth, rows, sums, soon)
        if function < 0:
            store_outputs(sums, terms, out, out_features, rows, begin, column)
        else:
            store_gated_outputs(sums, terms, out, out_stride, rows, begin, column, function, limit, slope)
        item, next_one = next_one, next_item(args)
    give_out_rest(args)
    if in_tiles:
        amx.release()
    simd.keep(scratch)
    simd.keep(tiles)


def supports_linear(weight: Tensor, bias: Tensor | None) -> bool:
    """True for bf16 and in_features a multiple of 2."""
    return (
        MULTIPLIES_PAIRS
        and weight.dtype == torch.bfloat16
        and weight.shape[1] % 2 == 0
        and (bias is None or (bias.dtype == torch.bfloat16 and bias.is_contiguous()))
    )


def pack(weight: Tensor) -> Tensor:
    """[out_features, in_features] -> int32 [panels, in_features / 2, 64], padded by zeros behind the last feature."""
    return huge_pages.copy(in_panels(weight))


def in_panels(weight: Tensor) -> Tensor:
    """`pack`, as a view of the weight where that is dense and has whole panels."""
    words = weight.contiguous().view(torch.int32)
    words = F.pad(words, (0, 0, 0, -len(words) % COLUMNS))
    return words.view(-1, COLUMNS, words.shape[1]).transpose(1, 2)


def linear(x: Tensor, panels: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    """x bf16 [num_rows, in_features], whose rows may be strided -> bf16 [num_rows, out_features]."""
    return _run(x, panels, bias, out_features, empty((x.shape[0], out_features), torch.bfloat16), NO_GATE)


def supports_gated_linear(weight: Tensor, bias: Tensor | None, function: str) -> bool:
    """As supports_linear for a weight [gate | up], with whole panels and a function that the kernel has."""
    return function in FUNCTIONS and weight.shape[0] % COLUMNS == 0 and supports_linear(weight, bias)


def interleave(weight: Tensor) -> Tensor:
    """[2n, ...] = [gate | up] -> 32 gates, their 32 ups, the next 32 gates ...: each panel computes 32 outputs."""
    return weight.unflatten(0, (2, -1, HALF)).transpose(0, 1).reshape(weight.shape)


def gated_linear(x: Tensor, panels: Tensor, bias: Tensor | None, out_features: int, function: str) -> Tensor:
    """linear, then kernels.elementwise.activation.gated_activation of its sums in fp32: bf16 [num_rows, out_features /
    2]. `panels` and `bias` are of `interleave`."""
    out = empty_rows((x.shape[0], out_features // 2), torch.bfloat16)
    return _run(x, panels, bias, out_features, out, Gate(function).arguments)


def word_rows(x: Tensor) -> tuple[Tensor, int]:
    """(x or a copy of it, whose rows consist of 32-bit words; their stride in words)."""
    row_stride, stride = x.stride()
    return (x, row_stride // 2) if stride == 1 and row_stride % 2 == 0 else (x.contiguous(), x.shape[1] // 2)


def grouped_linear(x: Tensor, panels: Tensor, biases: Tensor | None, out_features: int, groups: RowGroups) -> Tensor:
    """`linear` of rows sorted by expert, each with its expert's matrix. panels of all experts, one after the other;
    biases bf16 [num_experts, out_features]."""
    out = empty((x.shape[0], out_features), torch.bfloat16)
    return _run(x, panels, biases, out_features, out, NO_GATE, groups)


def grouped_gated_linear(
    x: Tensor, panels: Tensor, biases: Tensor | None, out_features: int, groups: RowGroups, gate: Gate
) -> Tensor:
    """`gated_linear` of rows sorted by expert, see grouped_linear."""
    out = empty_rows((x.shape[0], out_features // 2), torch.bfloat16)
    return _run(x, panels, biases, out_features, out, gate.arguments, groups)


def _rows_per_item(num_rows: int) -> int:
    """ROWS_PER_ITEM, or for AMX nearly equal numbers of whole tiles: a few rows would take as long as many."""
    if not HAS_BF16_TILES:
        return ROWS_PER_ITEM
    blocks = -(-num_rows // ROWS_PER_ITEM)
    return -(-num_rows // (blocks * amx.BAND_ROWS)) * amx.BAND_ROWS


def _run(
    x: Tensor,
    panels: Tensor,
    bias: Tensor | None,
    out_features: int,
    out: Tensor,
    gate: tuple[int, float, float],
    groups: RowGroups | None = None,
) -> Tensor:
    x, row_stride = word_rows(x)
    num_rows, (num_panels, words, _) = x.shape[0], panels.shape
    most, most_blocks, table = max(num_rows, 1), 0, 0
    if groups is not None:
        num_panels //= groups.num_experts
        most_blocks, table = groups.most_blocks, groups.table.data_ptr()
    elif HAS_BF16_TILES:
        most = max(1, BYTES_AT_A_TIME // (4 * words * ROWS_PER_ITEM)) * ROWS_PER_ITEM
    for first in range(0, num_rows, most):
        rows = min(most, num_rows - first)
        rows_per_item = _rows_per_item(rows)
        _linear(
            num_panels * (most_blocks or -(-rows // rows_per_item)),
            x.data_ptr() + 4 * row_stride * first, panels.data_ptr(), out.data_ptr() + first * out.stride(0) * 2,
            0 if bias is None else bias.data_ptr(),
            rows, row_stride, words, out_features, torch.get_num_threads(), num_panels, table, *gate, rows_per_item,
            out.stride(0),
        )  # fmt: skip
    return out
