"""The work items of paged attention on a CPU: a query row with some KV heads. See launch.py."""

import numpy as np

from kernels.cpu import simd
from kernels.cpu.attention import rows as loops
from kernels.cpu.parallel import jit, next_item
from kernels.cpu.simd import WIDTH, advance, read, splat, store

ARGUMENTS = "13q2d8q"  # arguments of a kernel that calls attend_items
ITEMS_PER_THREAD = 8  # at least, if lengths differ: what the last item makes other threads wait is then some per cent
ZERO = np.float32(0)


def attend_heads(q, out, k_cache, v_cache, table, first, seq_len, kv_head, num_heads, num_kv_heads, group, block_size,
                 head_dim, scale, softcap, slopes, sinks):  # fmt: skip
    """Attention of one query row over the tokens first:seq_len for num_heads KV heads from kv_head on; q and out
    [num_heads, group, head_dim]. launch.py chooses the code by the pointers."""
    raise NotImplementedError("only for compiled code")


@jit
def _attend(args, row, seq, kv_head, num_heads, seq_len, q, k_cache, v_cache, out):
    """Attention of query row `row` of sequence `seq` over its first seq_len tokens, for num_heads KV heads."""
    num_kv_heads, group, block_size, head_dim = args[8], args[9], args[10], args[11]
    tables, table_stride, q_stride, window = simd.pointer_i32(args[6]), args[12], args[13], args[14]
    slopes = loops.heads_of(simd.pointer_f32(args[7]), kv_head * group)
    sinks, chunk = loops.heads_of(simd.pointer_f32(args[22]), kv_head * group), args[23]
    scale, softcap = np.float32(simd.as_float(args[15])), np.float32(simd.as_float(args[16]))
    head = kv_head * group * head_dim
    out_rows = advance(out, row * num_kv_heads * group * head_dim + head)
    if seq_len > 0:
        table = advance(tables, seq * table_stride)
        first = max(0, seq_len - window) if window > 0 else 0
        if chunk > 0:
            first = max(first, (seq_len - 1) // chunk * chunk)
        attend_heads(
            advance(q, row * q_stride + head), out_rows, k_cache, v_cache, table, first, seq_len, kv_head, num_heads,
            num_kv_heads, group, block_size, head_dim, scale, softcap, slopes, sinks,
        )  # fmt: skip
    else:
        for d in range(0, num_heads * group * head_dim, WIDTH):
            store(out_rows, d, splat(ZERO))


@jit
def _heads_per_item(args):
    """The most neighbouring KV heads per item that keep the threads busy alike: each has ITEMS_PER_THREAD items of the
    longest sequence's length, or sequences are equally long and each thread has the same number of items.

    The heads of a block are neighbours in memory, and a processor reads 8 KiB in a row a quarter faster than four times
    2 KiB.
    """
    seq_lens, num_seqs, num_kv_heads, num_threads = simd.pointer_i32(args[17]), args[19], args[8], args[24]
    longest = total = np.int64(0)
    for seq in range(num_seqs):
        seq_len = np.int64(read(seq_lens, seq))
        longest, total = max(longest, seq_len), total + seq_len
    equal = longest * num_seqs * 16 <= total * 17
    num_heads = num_kv_heads
    while num_heads > 1:
        many = num_heads * longest * ITEMS_PER_THREAD * num_threads <= total * num_kv_heads
        if many or (equal and num_kv_heads // num_heads * num_seqs % num_threads == 0):
            break
        num_heads = num_heads // 2 if num_heads % 2 == 0 else 1
    return num_heads


@jit
def _decode_items(args, q, k_cache, v_cache, out):
    """Work items are (a few KV heads, row), so that consecutive items of sequences with a common prefix read the same
    keys."""
    seq_lens, num_rows, num_heads = simd.pointer_i32(args[17]), args[20], _heads_per_item(args)
    num_items = args[8] // num_heads * num_rows
    item = next_item(args)
    while item < num_items:
        row, kv_head = item % num_rows, item // num_rows * num_heads
        _attend(args, row, row, kv_head, num_heads, np.int64(read(seq_lens, row)), q, k_cache, v_cache, out)
        item = next_item(args)


@jit
def attend_items(args, q, k_cache, v_cache, out):
    """Decode without cu_seqlens_q (null): every sequence has one row. Otherwise work items are (KV head, a few query
    rows), so that consecutive items read the same keys."""
    seq_lens, cu_seqlens_q = simd.pointer_i32(args[17]), simd.pointer_i32(args[18])
    num_seqs, num_rows, rows_per_item = args[19], args[20], args[21]
    if simd.address(cu_seqlens_q) == 0:
        return _decode_items(args, q, k_cache, v_cache, out)
    items_per_head = (num_rows + rows_per_item - 1) // rows_per_item
    item = next_item(args)
    while item < args[1]:
        kv_head, begin = item // items_per_head, item % items_per_head * rows_per_item
        seq = loops.find_sequence(cu_seqlens_q, num_seqs, begin)
        for row in range(begin, min(num_rows, begin + rows_per_item)):
            while row >= read(cu_seqlens_q, seq + 1):
                seq += 1
            behind = np.int64(read(cu_seqlens_q, seq + 1)) - 1 - row  # tokens of the sequence behind this row
            _attend(args, row, seq, kv_head, 1, np.int64(read(seq_lens, seq)) - behind, q, k_cache, v_cache, out)
        item = next_item(args)
