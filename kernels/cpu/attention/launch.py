"""Paged attention on a CPU: decode reads the blocks of the cache in place and widens bf16 in registers.

The query heads that share a KV head are computed four at a time (a "quad"), so that a widened row of K or V serves four
heads. Three remaining heads are padded to a quad; one or two are computed one by one. The scores of a quad are stored
token by token, four floats per token, the scores of a single head one float per token ("lanes" is 4 or 1).

If the processor has an instruction for pairs of bf16, a bf16 cache whose KV heads serve several query heads is not
widened: bf16_pairs.py. A KV head with a single query head is faster here, because no other head would share its pairing
of value rows. Sequences that begin with the same blocks (samples of one prompt, a common system prompt) are computed
together by bf16_pairs.py, so that a common block is read once for up to MOST_ROWS of them: items.py.

Codes of a quantised cache are widened in registers too. A key's scale multiplies its scores and a value's scale its
probabilities, so that the loops over a row are the same for every format.
"""

import numpy as np
import torch
from torch import Tensor

from kernels.cpu import codes, simd
from kernels.cpu.attention import bf16_pairs as pairs
from kernels.cpu.attention import rows as loops
from kernels.cpu.attention import tiles
from kernels.cpu.attention.items import ARGUMENTS, items_with
from kernels.cpu.parallel import empty_rows, jit, parallel_kernel
from kernels.cpu.simd import WIDTH, advance, read, splat, store
from kernels.kv_format import kv_format_of

ZERO = np.float32(0)
ROWS_PER_ITEM = 8  # prefill
# Rows of decode per item, where sequences begin with the same blocks: 64 sequences of 2,100 tokens with 2,048 in common
# took 1.71 ms per layer of llama-90m, one by one 2.04; with 16 rows, as long as with 8.
MOST_ROWS = 8
# Blocks of a head to prefetch. 64 sequences of 160 tokens, all in the caches, took 1.7 ms without prefetch, 1.2 ms with
# 2 blocks into L1, 0.9 ms with 4 into L2 (one thread, 12 heads, 4 KV heads, head size 64, bf16).
AHEAD = 4


@jit
def _unit(unit, quads):
    """(first head in the group, lanes) of a quad, or of a single head behind the quads."""
    return (4 * unit, 4) if unit < quads else (3 * quads + unit, 1)


@jit
def _score_block(k, ahead, t, n, block_size, head_dim, quads, units, stride, wide_q, q_sums, scores):
    """Scores of the n tokens of one block, whose first token is t, for every head of the group."""
    parameters = loops.words(k, block_size, head_dim)
    if codes.bits(k) != 0:
        simd.prefetch_pair(loops.words(ahead, block_size, head_dim), 0)
    for unit in range(quads):
        at = advance(scores, 4 * (unit * stride + t))
        loops.scores_quad(advance(wide_q, 4 * unit * head_dim), k, ahead, n, head_dim, at)
        if codes.bits(k) != 0:
            loops.scale_scores(k, parameters, n, block_size, 4, advance(q_sums, unit * WIDTH), at)
    for unit in range(quads, units):
        g = 3 * quads + unit
        at = advance(scores, g * stride + t)
        loops.scores_single(advance(wide_q, g * head_dim), k, ahead, block_size, head_dim, at)
        if codes.bits(k) != 0:
            loops.scale_scores(k, parameters, n, block_size, 1, advance(q_sums, unit * WIDTH), at)


@jit
def _accumulate_block(v, ahead, t, n, block_size, head_dim, quads, units, stride, scores, least_sums, acc):
    """Add the values of the n tokens of one block, weighted by their probabilities, for every head of the group."""
    parameters = loops.words(v, block_size, head_dim)
    if codes.bits(v) != 0:
        simd.prefetch_pair(loops.words(ahead, block_size, head_dim), 0)
    for unit in range(quads):
        at = advance(scores, 4 * (unit * stride + t))
        if codes.bits(v) != 0:
            loops.scale_probs(v, parameters, n, block_size, 4, at, advance(least_sums, unit * WIDTH))
        loops.accumulate_quad(at, v, ahead, n, head_dim, advance(acc, 4 * unit * head_dim))
    for unit in range(quads, units):
        g = 3 * quads + unit
        at = advance(scores, g * stride + t)
        if codes.bits(v) != 0:
            loops.scale_probs(v, parameters, n, block_size, 1, at, advance(least_sums, unit * WIDTH))
        loops.accumulate_single(at, v, ahead, n, head_dim, advance(acc, g * head_dim))


@jit
def _softmax(scores, begin, end, group, row, quads, units, stride, softcap, slopes, sinks):
    """Replace the scores of every head by probabilities, not yet divided by their sum."""
    for unit in range(units):
        g, lanes = _unit(unit, quads)
        at = advance(scores, g * stride)
        heads = min(lanes, group - g)
        if softcap != 0 or simd.address(slopes) != 0:
            loops.adjust_scores(at, lanes, heads, begin, end, softcap, loops.heads_of(slopes, g))
        loops.softmax_rows(at, lanes, heads, begin, end, lanes * row, loops.heads_of(sinks, g))


@jit
def _attend_heads(q, out, k_cache, v_cache, table, first, seq_len, kv_head, num_heads, num_kv_heads, group, block_size,
                  head_dim, scale, softcap, slopes, sinks):  # fmt: skip
    """Attention of one query row for num_heads KV heads from kv_head on; q and out [num_heads, group, head_dim]. All
    query heads of a group share a read of each block, and the KV heads of a block are read one after the other."""
    first_block, last_block = first // block_size, (seq_len + block_size - 1) // block_size
    begin, end = first - first_block * block_size, seq_len - first_block * block_size
    quads = (group + 1) // 4  # three or four remaining heads make a quad
    units = quads + max(0, group - 4 * quads)
    rows = 3 * quads + units
    row = ((last_block - first_block) * block_size + WIDTH - 1) // WIDTH * WIDTH
    stride = row + WIDTH  # scores of one head, and room for the reciprocal sums behind them
    zeroed = num_heads * (2 * rows * head_dim + 2 * units * WIDTH)
    scratch = np.empty(num_heads * rows * stride + zeroed + head_dim, np.float32)
    scores = simd.pointer_f32(scratch.ctypes.data)  # rows * stride numbers per KV head
    wide_q = advance(scores, num_heads * rows * stride)  # rows * head_dim
    acc = advance(wide_q, num_heads * rows * head_dim)
    q_sums = advance(acc, num_heads * rows * head_dim)  # units * WIDTH
    least_sums = advance(q_sums, num_heads * units * WIDTH)
    spare = advance(least_sums, num_heads * units * WIDTH)
    for i in range(0, zeroed, WIDTH):
        store(wide_q, i, splat(ZERO))
    for h in range(num_heads):
        for g in range(group):
            loops.widen(advance(q, (h * group + g) * head_dim), head_dim, scale,
                        advance(wide_q, (h * rows + g) * head_dim), k_cache, spare)  # fmt: skip
        if codes.is_int4(k_cache):
            for unit in range(units):
                g, lanes = _unit(unit, quads)
                loops.sum_queries(advance(wide_q, (h * rows + g) * head_dim), head_dim, lanes,
                                  advance(q_sums, (h * units + unit) * WIDTH))  # fmt: skip
    lead = loops.lead(AHEAD, num_heads, first_block, last_block)
    for j in range(first_block, first_block + lead):
        for h in range(kv_head, kv_head + num_heads):
            loops.warm(loops.block(k_cache, table, j, num_kv_heads, h, block_size, head_dim), block_size, head_dim)
    for j in range(first_block, last_block):
        t = (j - first_block) * block_size
        n = min(block_size, end - t)
        for h in range(num_heads):
            k = loops.block(k_cache, table, j, num_kv_heads, kv_head + h, block_size, head_dim)
            ahead = loops.block_ahead(k_cache, v_cache, table, j + lead, first_block, last_block, num_kv_heads,
                                      kv_head + h, block_size, head_dim)  # fmt: skip
            _score_block(k, ahead, t, n, block_size, head_dim, quads, units, stride,
                         advance(wide_q, h * rows * head_dim), advance(q_sums, h * units * WIDTH),
                         advance(scores, h * rows * stride))  # fmt: skip
    for h in range(num_heads):
        _softmax(advance(scores, h * rows * stride), begin, end, group, row, quads, units, stride, softcap,
                 loops.heads_of(slopes, h * group), loops.heads_of(sinks, h * group))  # fmt: skip
    for j in range(first_block, last_block):
        t = (j - first_block) * block_size
        n = min(block_size, end - t)
        for h in range(num_heads):
            v = loops.block(v_cache, table, j, num_kv_heads, kv_head + h, block_size, head_dim)
            later = min(j + lead, last_block - 1)
            ahead = loops.block(v_cache, table, later, num_kv_heads, kv_head + h, block_size, head_dim)
            _accumulate_block(v, ahead, t, n, block_size, head_dim, quads, units, stride,
                              advance(scores, h * rows * stride), advance(least_sums, h * units * WIDTH),
                              advance(acc, h * rows * head_dim))  # fmt: skip
    for h in range(num_heads):
        if codes.is_int4(v_cache):
            for unit in range(units):
                g, lanes = _unit(unit, quads)
                loops.add_minima(advance(least_sums, (h * units + unit) * WIDTH), lanes, head_dim,
                                 advance(acc, (h * rows + g) * head_dim))  # fmt: skip
        for g in range(group):
            at = 4 * (g // 4) * stride + 4 * row + g % 4 if g < 4 * quads else g * stride + row
            loops.narrow(advance(acc, (h * rows + g) * head_dim), head_dim, read(scores, h * rows * stride + at),
                         advance(out, (h * group + g) * head_dim), v_cache, spare)  # fmt: skip
    simd.keep(scratch)


@jit
def _attend_row(q, q_stride, out, out_stride, k_cache, v_cache, tables, table_stride, first, seq_lens, behind,
                num_rows, common, kv_head, num_heads, num_kv_heads, group, block_size, head_dim, scale, softcap, slopes,
                sinks):  # fmt: skip
    """See items.items_with. num_rows is 1 and `common` 0, because _launch allows an item of this kernel one row."""
    seq_len = np.int64(read(seq_lens, 0)) - behind
    _attend_heads(q, out, k_cache, v_cache, tables, first, seq_len, kv_head, num_heads, num_kv_heads, group, block_size,
                  head_dim, scale, softcap, slopes, sinks)  # fmt: skip


_attend_items = items_with(_attend_row)


@parallel_kernel(ARGUMENTS)
def _attention_bf16(args):
    pointer = simd.pointer_bf16
    _attend_items(args, pointer(args[2]), pointer(args[3]), pointer(args[4]), pointer(args[5]))


@parallel_kernel(ARGUMENTS)
def _attention_bf16_int8(args):
    pointer, page = simd.pointer_bf16, codes.pointer_int8
    _attend_items(args, pointer(args[2]), page(args[3]), page(args[4]), pointer(args[5]))


@parallel_kernel(ARGUMENTS)
def _attention_bf16_fp8(args):
    pointer, page = simd.pointer_bf16, codes.pointer_fp8
    _attend_items(args, pointer(args[2]), page(args[3]), page(args[4]), pointer(args[5]))


@parallel_kernel(ARGUMENTS)
def _attention_bf16_int4(args):
    pointer, page = simd.pointer_bf16, codes.pointer_int4
    _attend_items(args, pointer(args[2]), page(args[3]), page(args[4]), pointer(args[5]))


@parallel_kernel(ARGUMENTS)
def _attention_f32(args):
    pointer = simd.pointer_f32
    _attend_items(args, pointer(args[2]), pointer(args[3]), pointer(args[4]), pointer(args[5]))


@parallel_kernel(ARGUMENTS)
def _attention_f32_int8(args):
    pointer, page = simd.pointer_f32, codes.pointer_int8
    _attend_items(args, pointer(args[2]), page(args[3]), page(args[4]), pointer(args[5]))


@parallel_kernel(ARGUMENTS)
def _attention_f32_fp8(args):
    pointer, page = simd.pointer_f32, codes.pointer_fp8
    _attend_items(args, pointer(args[2]), page(args[3]), page(args[4]), pointer(args[5]))


@parallel_kernel(ARGUMENTS)
def _attention_f32_int4(args):
    pointer, page = simd.pointer_f32, codes.pointer_int4
    _attend_items(args, pointer(args[2]), page(args[3]), page(args[4]), pointer(args[5]))


_KERNELS = {
    (torch.bfloat16, "auto"): _attention_bf16,
    (torch.bfloat16, "int8"): _attention_bf16_int8,
    (torch.bfloat16, "fp8"): _attention_bf16_fp8,
    (torch.bfloat16, "int4"): _attention_bf16_int4,
    (torch.float32, "auto"): _attention_f32,
    (torch.float32, "int8"): _attention_f32_int8,
    (torch.float32, "fp8"): _attention_f32_fp8,
    (torch.float32, "int4"): _attention_f32_int4,
}


def supports_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, *int_tensors: Tensor) -> bool:
    """True for bf16 or fp32, caches of the same dtype or quantised, head_dim a multiple of 16, block_size of 4,
    int32."""
    return (
        q.dtype in (torch.bfloat16, torch.float32)
        and k_cache.dtype == v_cache.dtype
        and (k_cache.dtype == q.dtype or kv_format_of(k_cache) is not None)
        and q.shape[2] % WIDTH == 0
        and k_cache.shape[2] % 4 == 0
        and q.stride(2) == 1
        and q.stride(1) == q.shape[2]
        and k_cache.is_contiguous()
        and v_cache.is_contiguous()
        and all(x.dtype == torch.int32 and x.is_contiguous() for x in int_tensors)
    )


def paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, scale: float,
                    alibi_slopes: Tensor | None, sliding_window: int, softcap: float, sinks: Tensor | None,
                    attention_chunk: int, out: Tensor | None = None) -> Tensor:  # fmt: skip
    """See kernels.attention.decode."""
    options = (scale, alibi_slopes, sliding_window, softcap, sinks, attention_chunk, out)
    return _launch(q, k_cache, v_cache, block_tables, seq_lens, 0, *options)


def prefill_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, cu_seqlens_q: Tensor,
                      seq_lens: Tensor, scale: float, alibi_slopes: Tensor | None, sliding_window: int,
                      softcap: float, sinks: Tensor | None, attention_chunk: int,
                      out: Tensor | None = None, *, as_decode: bool = False) -> Tensor:  # fmt: skip
    """See kernels.attention.prefill. The bits of a row do not depend on the chunks of its prompt. as_decode uses the
    loops of decode instead of tiles, and so gives the bits of paged_attention."""
    options = (scale, alibi_slopes, sliding_window, softcap, sinks, attention_chunk, out)
    if not as_decode and tiles.supports(q, k_cache):
        return tiles.prefill_attention(q, k_cache, v_cache, block_tables, cu_seqlens_q, seq_lens, *options)
    return _launch(q, k_cache, v_cache, block_tables, seq_lens, cu_seqlens_q.data_ptr(), *options)


def supports_mixed(q: Tensor, k_cache: Tensor, v_cache: Tensor, *int_tensors: Tensor) -> bool:
    """True for what mixed_attention takes."""
    return supports_attention(q, k_cache, v_cache, *int_tensors) and tiles.supports(q, k_cache)


def mixed_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, cu_seqlens_q: Tensor,
                    seq_lens: Tensor, counts: Tensor, scale: float, alibi_slopes: Tensor | None, sliding_window: int,
                    softcap: float, sinks: Tensor | None, attention_chunk: int) -> Tensor:  # fmt: skip
    """See kernels.attention.decode. counts: int64 [2], (sequences of one row, which come first, all sequences), read
    when the kernels run. Rows behind those of all sequences are not written."""
    options = (scale, alibi_slopes, sliding_window, softcap, sinks, attention_chunk, empty_rows(q.shape, q.dtype))
    _launch(q, k_cache, v_cache, block_tables, seq_lens, 0, *options, counts)
    return tiles.prefill_attention(
        q, k_cache, v_cache, block_tables, cu_seqlens_q, seq_lens, *options, counts=counts
    )  # fmt: skip


def _launch(q, k_cache, v_cache, block_tables, seq_lens, cu_seqlens_q, scale, alibi_slopes, sliding_window, softcap,
            sinks, attention_chunk, out, counts=None):  # fmt: skip
    """cu_seqlens_q: the address, or 0 for decode. counts: see mixed_attention."""
    num_rows, num_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = k_cache.shape
    out = empty_rows(q.shape, q.dtype) if out is None else out
    kv_format, in_pairs = kv_format_of(k_cache), pairs.supports(q, k_cache)
    format_name = "auto" if kv_format is None else kv_format.name
    kernel = pairs.attention_pairs_bf16 if in_pairs else _KERNELS[q.dtype, format_name]
    if cu_seqlens_q:
        num_items, rows_per_item = -(-num_rows // ROWS_PER_ITEM) * num_kv_heads, ROWS_PER_ITEM
    else:
        num_items = num_rows * num_kv_heads
        rows_per_item = MOST_ROWS if in_pairs and not (sliding_window or attention_chunk) else 1
    kernel(
        num_items,
        q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), out.data_ptr(), block_tables.data_ptr(),
        0 if alibi_slopes is None else alibi_slopes.data_ptr(),
        num_kv_heads, num_heads // num_kv_heads, block_size, head_dim, block_tables.stride(0), q.stride(0),
        sliding_window, scale, softcap, seq_lens.data_ptr(), cu_seqlens_q, seq_lens.shape[0], num_rows, rows_per_item,
        0 if sinks is None else sinks.data_ptr(), attention_chunk, torch.get_num_threads(), out.stride(0),
        0 if counts is None else counts.data_ptr(),
    )  # fmt: skip
    return out
