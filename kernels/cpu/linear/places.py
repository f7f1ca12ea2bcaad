"""The work items of a linear layer: pairs of a panel of weights and some rows of inputs.

One matrix: consecutive items read the same panel. The matrices of experts (kernels/cpu/experts): rows are sorted by
expert, and each expert multiplies its own. Its panels follow those of the expert before it. A table, int64, says where
its rows are:

    blocks, entries, most rows of a block, then an entry for each expert with rows:
    expert, first row, end of its rows, blocks before it

The kernels before write the table, so a recorded program does not know how many items there will be: a call has as many
as there could be, and the last of them are empty. A thread that leaves gives those out, too: a thread that comes later
must not read a table whose memory another kernel has by then.
"""

from dataclasses import dataclass

from torch import Tensor

from kernels.cpu import simd
from kernels.cpu.parallel import in_runs, jit
from kernels.cpu.simd import advance, fetch_add, read

HEADER, ENTRY = 3, 4  # words
EXPERT, FIRST, END, BLOCKS_BEFORE = range(4)


@dataclass(frozen=True, slots=True)
class RowGroups:
    """Rows sorted by expert, and their table, int64."""

    table: Tensor
    num_experts: int
    most_blocks: int  # that the table can have


@jit
def count_items(num_items, table, num_panels):
    """The items of a call with `num_items` at most; `num_panels`: of one matrix."""
    return num_items if simd.address(table) == 0 else min(num_items, read(table, 0) * num_panels)


@jit
def give_out_rest(args):
    """Leave no item for a thread that has not come yet. Each thread calls it when it finds no item."""
    fetch_add(args, args[1])


@jit
def _entry_of(table, position, num_panels):
    """The last entry whose items do not begin behind the position."""
    low, high = 0, read(table, 1) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if read(table, HEADER + middle * ENTRY + BLOCKS_BEFORE) * num_panels <= position:
            low = middle
        else:
            high = middle - 1
    return advance(table, HEADER + low * ENTRY)


@jit
def place_of(item, num_items, table, num_rows, num_panels, num_runs, most_rows):
    """(matrix, panel of it, first row, number of rows) of an item. most_rows: without a table."""
    if simd.address(table) == 0:
        per_panel = (num_rows + most_rows - 1) // most_rows
        begin = item % per_panel * most_rows
        return 0, in_runs(item // per_panel, num_panels, num_runs), begin, min(most_rows, num_rows - begin)
    position = in_runs(item, num_items, num_runs)
    entry = _entry_of(table, position, num_panels)
    begin, end, most = read(entry, FIRST), read(entry, END), read(table, 2)
    blocks = (end - begin + most - 1) // most
    rest = position - read(entry, BLOCKS_BEFORE) * num_panels
    block, count = rest % blocks, end - begin
    first = begin + block * count // blocks  # blocks of nearly equal size
    return read(entry, EXPERT), rest // blocks, first, begin + (block + 1) * count // blocks - first
