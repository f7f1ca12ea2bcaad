"""The work items of paged attention on a CPU: (query row, KV head). See launch.py."""

import numpy as np

from kernels.cpu import simd
from kernels.cpu.attention import rows as loops
from kernels.cpu.parallel import jit, next_item
from kernels.cpu.simd import WIDTH, advance, read, splat, store

ARGUMENTS = "13q2d7q"  # arguments of a kernel that calls attend_items
ZERO = np.float32(0)


def attend_heads(q, out, k_cache, v_cache, table, first, seq_len, kv_head, num_kv_heads, group, block_size, head_dim,
                 scale, softcap, slopes, sinks):  # fmt: skip
    """Attention of one query row over the tokens first:seq_len for one KV head; q and out [group, head_dim]. launch.py
    chooses the code by the pointers."""
    raise NotImplementedError("only for compiled code")


@jit
def _attend(args, row, seq, kv_head, seq_len, q, k_cache, v_cache, out):
    """Attention of query row `row` of sequence `seq` over its first seq_len tokens, for one KV head."""
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
            advance(q, row * q_stride + head), out_rows, k_cache, v_cache, table, first, seq_len, kv_head, num_kv_heads,
            group, block_size, head_dim, scale, softcap, slopes, sinks,
        )  # fmt: skip
    else:
        for d in range(0, group * head_dim, WIDTH):
            store(out_rows, d, splat(ZERO))


@jit
def attend_items(args, q, k_cache, v_cache, out):
    """Work items are (KV head, a few query rows), so that consecutive items read the same keys.

    Without cu_seqlens_q (null) every sequence has one row: decode.
    """
    seq_lens, cu_seqlens_q = simd.pointer_i32(args[17]), simd.pointer_i32(args[18])
    num_seqs, num_rows, rows_per_item = args[19], args[20], args[21]
    decode = simd.address(cu_seqlens_q) == 0
    items_per_head = (num_rows + rows_per_item - 1) // rows_per_item
    item = next_item(args)
    while item < args[1]:
        kv_head, begin = item // items_per_head, item % items_per_head * rows_per_item
        seq = begin if decode else loops.find_sequence(cu_seqlens_q, num_seqs, begin)
        for row in range(begin, min(num_rows, begin + rows_per_item)):
            behind = 0  # tokens of the sequence behind this row
            if decode:
                seq = row
            else:
                while row >= read(cu_seqlens_q, seq + 1):
                    seq += 1
                behind = np.int64(read(cu_seqlens_q, seq + 1)) - 1 - row
            _attend(args, row, seq, kv_head, np.int64(read(seq_lens, seq)) - behind, q, k_cache, v_cache, out)
        item = next_item(args)
