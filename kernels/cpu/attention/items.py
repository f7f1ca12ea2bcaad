"""The work items of paged attention on a CPU: a query row with some KV heads, or the rows of neighbouring sequences
that begin with the same blocks (samples of one prompt, a common system prompt). See launch.py."""

import numpy as np

from kernels.cpu import simd
from kernels.cpu.attention import rows as loops
from kernels.cpu.features import HAS_BF16_TILES
from kernels.cpu.parallel import jit, next_item
from kernels.cpu.simd import WIDTH, advance, read, splat, store

ARGUMENTS = "13q2d10q"  # arguments of a kernel that calls attend_items
ITEMS_PER_THREAD = 8  # at least, if lengths differ: what the last item makes other threads wait is then some per cent
LEAST_COMMON = 64  # tokens that neighbours have in common, if their rows are computed together
# Items of several rows per thread, at least. With 8, which leave one head each, 16 sequences of 544 tokens with 384 in
# common took 1.07 times as long as row by row; with 4, as long. Tiles of AMX hold the queries of more rows: with 4, 8
# such sequences took 1.3 times as long as with 3, and 16 took 1.1 times as long.
ITEMS_OF_ROWS_PER_THREAD = 3 if HAS_BF16_TILES else 4
MOST_SCORES = 1 << 19  # bytes of the scores of such an item: half of a core's L2 on a Zen 4
ZERO = np.float32(0)


@jit
def _common_blocks(args, seq, most):
    """How many blocks, at most `most`, sequence `seq` and the one before it begin with and both fill."""
    tables, seq_lens, j = simd.pointer_i32(args[6]), simd.pointer_i32(args[17]), 0
    before, table = advance(tables, (seq - 1) * args[12]), advance(tables, seq * args[12])
    most = min(most, np.int64(min(read(seq_lens, seq - 1), read(seq_lens, seq))) // args[10])
    while j < most and read(before, j) == read(table, j):
        j += 1
    return j


@jit
def _least_common(args):
    """LEAST_COMMON in blocks."""
    return (LEAST_COMMON + args[10] - 1) // args[10]


@jit
def _num_sequences(args):
    """The number of sequences; args[26] is null, or where the kernel finds the number when it runs."""
    counts = simd.pointer_i64(args[26])
    return args[19] if simd.address(counts) == 0 else read(counts, 0)


@jit
def _rows_per_item(args, most):
    """The rows of an item, a power of two up to `most`: several if most sequences begin with the blocks of the one
    before them."""
    sharing, least, rows, num_seqs = 0, _least_common(args), 1, _num_sequences(args)
    for seq in range(1, num_seqs):
        sharing += _common_blocks(args, seq, least) == least
    while 2 * rows <= most and 2 * sharing >= num_seqs:
        rows *= 2
    return rows


@jit
def _item_size(args):
    """(rows, KV heads) of an item that keep the threads busy alike.

    Rows that share blocks come first, because they save reads of memory: as many as leave two heads per item, and then
    heads. Rows alone: the most neighbouring heads so that each thread has ITEMS_PER_THREAD items of the longest
    sequence's length, or sequences are equally long and each thread has the same number of items. The heads of a block
    are neighbours in memory, and a processor reads 8 KiB in a row a quarter faster than four times 2 KiB.
    """
    seq_lens, num_seqs, num_kv_heads, num_threads = simd.pointer_i32(args[17]), _num_sequences(args), args[8], args[24]
    longest = total = np.int64(0)
    for seq in range(num_seqs):
        seq_len = np.int64(read(seq_lens, seq))
        longest, total = max(longest, seq_len), total + seq_len
    num_heads, most_rows = num_kv_heads, args[21]
    if most_rows > 1 and longest > 0:
        most = total * num_kv_heads // (longest * ITEMS_OF_ROWS_PER_THREAD * num_threads)  # rows times heads
        most = min(most, MOST_SCORES // (4 * longest * args[9]))
        most_rows = min(most_rows, most // min(2, num_kv_heads))
        rows = _rows_per_item(args, most_rows) if most_rows > 1 else 1
        if rows > 1:
            while num_heads > 1 and rows * num_heads > most:
                num_heads = num_heads // 2 if num_heads % 2 == 0 else 1
            return rows, num_heads
    equal = longest * num_seqs * 16 <= total * 17
    while num_heads > 1:
        many = num_heads * longest * ITEMS_PER_THREAD * num_threads <= total * num_kv_heads
        if many or (equal and num_kv_heads // num_heads * num_seqs % num_threads == 0):
            break
        num_heads = num_heads // 2 if num_heads % 2 == 0 else 1
    return 1, num_heads


@jit
def _neighbours(args, begin, end):
    """(number, common tokens) of the rows from `begin` on, before `end`, to compute together: as many as leave half of
    the common blocks. A row alone has no common tokens."""
    row, common = begin + 1, np.int64(0)
    while row < end:
        blocks = _common_blocks(args, row, common if common > 0 else np.int64(args[12]))
        if blocks < max(_least_common(args), common // 2):
            break
        common = blocks
        row += 1
    return row - begin, common * args[10]


def items_with(attend):
    """A function for a kernel: (args, q, k_cache, v_cache, out) computes the work items that its thread gets. attend:
    the function for rows; its arguments are those in attend_rows."""

    @jit
    def attend_rows(args, row, num_rows, common, seq, behind, kv_head, num_heads, q, k_cache, v_cache, out):
        """Attention of num_rows query rows from `row` on, each of another sequence, for num_heads KV heads from kv_head
        on.

        The first row is of sequence `seq`. A row sees its sequence without the last `behind` tokens. The first `common`
        tokens of all sequences are in the same blocks, which they fill; common is 0 for a row alone.
        """
        num_kv_heads, group, block_size, head_dim = args[8], args[9], args[10], args[11]
        tables, table_stride, q_stride, window = simd.pointer_i32(args[6]), args[12], args[13], args[14]
        slopes = loops.heads_of(simd.pointer_f32(args[7]), kv_head * group)
        sinks, chunk = loops.heads_of(simd.pointer_f32(args[22]), kv_head * group), args[23]
        scale, softcap = np.float32(simd.as_float(args[15])), np.float32(simd.as_float(args[16]))
        seq_lens, head = advance(simd.pointer_i32(args[17]), seq), kv_head * group * head_dim
        out_rows = advance(out, row * args[25] + head)
        seq_len = np.int64(read(seq_lens, 0)) - behind
        if seq_len > 0:
            first = max(0, seq_len - window) if window > 0 else 0
            if chunk > 0:
                first = max(first, (seq_len - 1) // chunk * chunk)
            attend(
                advance(q, row * q_stride + head), q_stride, out_rows, args[25], k_cache, v_cache,
                advance(tables, seq * table_stride), table_stride, first, seq_lens, behind, num_rows, common, kv_head,
                num_heads, num_kv_heads, group, block_size, head_dim, scale, softcap, slopes, sinks,
            )  # fmt: skip
        else:
            for d in range(0, num_heads * group * head_dim, WIDTH):
                store(out_rows, d, splat(ZERO))

    @jit
    def decode_items(args, q, k_cache, v_cache, out):
        """Work items are (a few KV heads, rows), so that consecutive items of sequences with a common prefix read the
        same keys."""
        num_rows = min(args[20], _num_sequences(args))
        rows, num_heads = _item_size(args)
        items_per_head = (num_rows + rows - 1) // rows
        num_items = args[8] // num_heads * items_per_head
        item = next_item(args)
        while item < num_items:
            row, kv_head = item % items_per_head * rows, item // items_per_head * num_heads
            end = min(num_rows, row + rows)
            while row < end:
                count, common = _neighbours(args, row, end)
                attend_rows(args, row, count, common, row, 0, kv_head, num_heads, q, k_cache, v_cache, out)
                row += count
            item = next_item(args)

    @jit
    def attend_items(args, q, k_cache, v_cache, out):
        """Decode without cu_seqlens_q (null): every sequence has one row. Otherwise work items are (KV head, a few
        query rows), so that consecutive items read the same keys."""
        cu_seqlens_q = simd.pointer_i32(args[18])
        num_seqs, num_rows, rows_per_item = args[19], args[20], args[21]
        if simd.address(cu_seqlens_q) == 0:
            return decode_items(args, q, k_cache, v_cache, out)
        items_per_head = (num_rows + rows_per_item - 1) // rows_per_item
        item = next_item(args)
        while item < args[1]:
            kv_head, begin = item // items_per_head, item % items_per_head * rows_per_item
            seq = loops.find_sequence(cu_seqlens_q, num_seqs, begin)
            for row in range(begin, min(num_rows, begin + rows_per_item)):
                while row >= read(cu_seqlens_q, seq + 1):
                    seq += 1
                behind = np.int64(read(cu_seqlens_q, seq + 1)) - 1 - row  # tokens of the sequence behind this row
                attend_rows(args, row, 1, 0, seq, behind, kv_head, 1, q, k_cache, v_cache, out)
            item = next_item(args)

    return attend_items
