"""PagedAttention for decode (Kwon et al., 2023): one query token per sequence over its blocks of the KV cache.

The heads that share a KV head are the rows of one tile. If the batch alone would leave the device idle, a sequence is
cut into splits that run concurrently (Flash-Decoding: Dao et al., 2023).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.aot_configuration import AotConfiguration, power_of_2
from kernels.attention.aot_cases import POINTERS, attention_cases
from kernels.attention.plan import (
    MAX_SPLITS,
    MIN_SPLIT_TILES,
    AttentionPlan,
    attention_shape,
    plan_for_call,
)
from kernels.attention.prefill import launch_prefill, prefill_attention, prefill_attention_reference
from kernels.attention.tile import attend_tile, base_2_scale, empty_softmax, load_slopes, sum_queries
from kernels.cache.quantize import as_bytes
from kernels.dispatch import cpu_kernels, tl, triton, use_triton


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    *,
    alibi_slopes: Tensor | None = None,
    sliding_window: int = 0,
    softcap: float = 0.0,
    plan: AttentionPlan | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of q [num_seqs, num_heads, head_dim], each sequence's newest token, over the tokens in its blocks.

    Caches [num_blocks, num_kv_heads, block_size, head_dim], or pages of a format of kernels/kv_format.py; block_tables
    int32 [num_seqs, max_blocks]; seq_lens int32 [num_seqs] counts the cached tokens, the query's own included (0 gives
    a row of zeros: padding of a CUDA graph).
    The options are those of prefill_attention. The launch depends on shapes only, never on seq_lens: a CUDA graph can
    capture it with some lengths and replay it with others. Returns [num_seqs, num_heads, head_dim].
    """
    if use_triton(q):
        shape = attention_shape(q, k_cache, alibi_slopes, sliding_window, softcap)
        plan = plan or plan_for_call(q, shape)
        caches, scales = (as_bytes(k_cache), as_bytes(v_cache)), base_2_scale(scale, softcap)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        if plan.batch_invariant:  # the kernel and the tile of prefill give the same bits
            starts = plan.decode_starts(len(q))
            launch_prefill(shape, plan, q, *caches, block_tables, starts, seq_lens, 1, alibi_slopes, *scales, out)
        else:
            launch_decode(shape, plan, q, *caches, block_tables, seq_lens, alibi_slopes, *scales, out)
        return out
    cpu = cpu_kernels() if q.device.type == "cpu" else None
    if cpu and cpu.attention.supports_attention(q, k_cache, v_cache, block_tables, seq_lens):
        attended = cpu.attention.paged_attention(
            q, k_cache, v_cache, block_tables, seq_lens, scale,
            alibi_slopes=alibi_slopes, sliding_window=sliding_window, softcap=softcap,
        )  # fmt: skip
    else:
        attended = paged_attention_reference(
            q, k_cache, v_cache, block_tables, seq_lens, scale,
            alibi_slopes=alibi_slopes, sliding_window=sliding_window, softcap=softcap,
        )  # fmt: skip
    return attended if out is None else out.copy_(attended)


def mixed_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    scale: float,
    *,
    alibi_slopes: Tensor | None = None,
    sliding_window: int = 0,
    softcap: float = 0.0,
    plan: AttentionPlan | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """prefill_attention for a step whose lengths only the device knows: q [num_tokens, num_heads, head_dim] and
    seq_lens int32 [num_seqs] are capacities.

    Sequence i owns the rows cu_seqlens_q[i]:cu_seqlens_q[i+1] (int32 [num_seqs + 1], from 0, never falling). An empty
    range is padding, whatever its length and its block table; the decode kernel computes a range of one row, the
    prefill kernel a longer one. Rows at and after cu_seqlens_q[num_seqs] are padding: no kernel reads or writes them,
    so their output is unspecified. Both launches depend on shapes only: a CUDA graph can capture them with some lengths
    and replay them with others. Returns [num_tokens, num_heads, head_dim].
    """
    if not use_triton(q):
        return prefill_attention(
            q, k_cache, v_cache, block_tables, cu_seqlens_q, seq_lens, len(q), scale,
            alibi_slopes=alibi_slopes, sliding_window=sliding_window, softcap=softcap, plan=plan, out=out,
        )  # fmt: skip
    shape = attention_shape(q, k_cache, alibi_slopes, sliding_window, softcap)
    plan = plan or plan_for_call(q, shape)
    caches, scales = (as_bytes(k_cache), as_bytes(v_cache)), base_2_scale(scale, softcap)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if not plan.batch_invariant:
        launch_decode(shape, plan, q, *caches, block_tables, seq_lens, alibi_slopes, *scales, out, cu_seqlens_q)
    launch_prefill(
        shape, plan, q, *caches, block_tables, cu_seqlens_q, seq_lens, len(q), alibi_slopes, *scales, out,
        skip_single=not plan.batch_invariant,
    )  # fmt: skip
    return out


def launch_decode(
    shape, plan, q, k_cache, v_cache, block_tables, seq_lens, alibi_slopes, scale, softcap, out, cu_seqlens_q=None
) -> None:
    """Launch the kernels. scale and softcap come from base_2_scale; quantised caches are passed as bytes.

    cu_seqlens_q: None if sequence i has row i; else int32 [num_seqs + 1], and sequences of one row alone are computed.
    """
    num_seqs = len(seq_lens)
    tile = shape.tile("decode", plan.capability, shape.group)
    max_tokens = block_tables.shape[1] * shape.block_size
    num_splits = plan.num_splits(num_seqs, shape.num_kv_heads, max_tokens, tile.block_n)
    values, lse = out, None
    if num_splits > 1:
        values, lse = plan.partial_results(num_seqs * shape.num_heads, num_splits, shape.head_dim)
    paged_attention_kernel[(num_seqs, shape.num_kv_heads, num_splits)](
        q, k_cache, v_cache, block_tables, cu_seqlens_q, seq_lens, alibi_slopes, values, lse,
        scale, softcap, block_tables.stride(0),
        MIN_TILES=MIN_SPLIT_TILES, **shape.constants(tile, plan.capability),
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    if lse is not None:
        reduce_splits_kernel[(num_seqs, shape.num_heads)](
            values, lse, cu_seqlens_q, seq_lens, out, num_splits, **_reduce_constants(shape, tile), num_warps=4
        )


def _reduce_constants(shape, tile) -> dict[str, int]:
    return {
        "HEAD_DIM": shape.head_dim,
        "BLOCK_D": max(16, power_of_2(shape.head_dim)),
        "BLOCK_N": tile.block_n,
        "WINDOW": shape.sliding_window,
        "BLOCK_S": MAX_SPLITS,
        "MIN_TILES": MIN_SPLIT_TILES,
    }


@triton.jit(
    do_not_specialize=["block_tables_stride"],
    # slices of any alignment
    do_not_specialize_on_alignment=["block_tables_ptr", "cu_seqlens_q_ptr", "seq_lens_ptr", "lse_ptr"],
)
def paged_attention_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_tables_ptr,
    cu_seqlens_q_ptr,
    seq_lens_ptr,
    alibi_slopes_ptr,
    out_ptr,
    lse_ptr,
    scale,
    softcap,
    block_tables_stride,
    Q_STRIDE_ROW: tl.constexpr,
    Q_STRIDE_HEAD: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    MIN_TILES: tl.constexpr,
):
    """Grid (num_seqs, num_kv_heads, num_splits): the heads of one group over one split of one sequence.

    Writes to out [num_seqs, num_heads, num_splits, HEAD_DIM] the attention over each split, and to lse [num_seqs,
    num_heads, num_splits] the base-2 logarithm of the softmax's denominator; a split without tokens writes nothing.
    lse None: there is one split, and out is the result. cu_seqlens_q None: sequence i has row i of q and out; else row
    cu_seqlens_q[i], and sequences that have not exactly one row are skipped.
    """
    seq, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_splits = tl.num_programs(2)
    q_row, is_decode = find_decode_row(cu_seqlens_q_ptr, seq)
    if not is_decode:
        return
    seq_len = tl.load(seq_lens_ptr + seq)
    first, size, _ = split_tiles(seq_len, num_splits, BLOCK_N, WINDOW, MIN_TILES)
    begin = (first + split * size) * BLOCK_N
    end = tl.minimum(begin + size * BLOCK_N, seq_len)
    if lse_ptr is not None:
        if begin >= end:
            return
    offs_m, offs_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + offs_m
    row_mask = offs_m < GROUP
    q_mask = row_mask[:, None] & (offs_d < HEAD_DIM)[None, :]
    q_offsets = q_row * Q_STRIDE_ROW + head[:, None] * Q_STRIDE_HEAD + offs_d[None, :]
    q = tl.load(q_ptr + q_offsets, mask=q_mask, other=0.0)
    q_sum = sum_queries(q, BLOCK_M, KV_FORMAT)
    slopes = load_slopes(alibi_slopes_ptr, head, row_mask, BLOCK_M, HAS_ALIBI)
    query_pos = tl.zeros([BLOCK_M], tl.int32) + (seq_len - 1)
    acc, row_max, row_sum = empty_softmax(BLOCK_M, BLOCK_D)
    block_table_ptr = block_tables_ptr + seq.to(tl.int64) * block_tables_stride
    for tile_start in range(begin, end, BLOCK_N):
        acc, row_max, row_sum = attend_tile(
            q, q_sum, acc, row_max, row_sum, k_cache_ptr, v_cache_ptr, block_table_ptr, kv_head,
            tile_start, end, query_pos, slopes, scale, softcap,
            NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N, KV_FORMAT, True, HAS_ALIBI, HAS_SOFTCAP, WINDOW,
        )  # fmt: skip
    # without splits: a row of `out`; with splits: of the partial results, which are numbered by sequence
    row = (q_row if lse_ptr is None else seq.to(tl.int64)) * (NUM_KV_HEADS * GROUP) + head
    row = row * num_splits + split
    result = acc / tl.where(row_sum > 0.0, row_sum, 1.0)[:, None]  # zeros if there is no token: padding
    tl.store(out_ptr + row[:, None] * HEAD_DIM + offs_d[None, :], result.to(out_ptr.dtype.element_ty), mask=q_mask)
    if lse_ptr is not None:
        tl.store(lse_ptr + row, row_max + tl.log2(row_sum), mask=row_mask)


@triton.jit
def find_decode_row(cu_seqlens_q_ptr, seq):
    """(row of the sequence's query as int64, True if the sequence has exactly one row)."""
    if cu_seqlens_q_ptr is None:
        return seq.to(tl.int64), seq >= 0
    else:
        row = tl.load(cu_seqlens_q_ptr + seq)
        return row.to(tl.int64), tl.load(cu_seqlens_q_ptr + seq + 1) == row + 1


@triton.jit
def split_tiles(seq_len, num_splits, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, MIN_TILES: tl.constexpr):
    """(first visible tile, tiles per split, splits with tiles) of a sequence: its own length divides its tiles."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(seq_len - WINDOW, 0) // BLOCK_N
    num_tiles = (seq_len + BLOCK_N - 1) // BLOCK_N - first
    size = (num_tiles + num_splits - 1) // num_splits
    size = tl.maximum(size, MIN_TILES)
    return first, size, (num_tiles + size - 1) // size


@triton.jit(
    do_not_specialize=["num_splits"],
    do_not_specialize_on_alignment=["cu_seqlens_q_ptr", "seq_lens_ptr", "lse_ptr"],
)
def reduce_splits_kernel(
    partial_ptr,
    lse_ptr,
    cu_seqlens_q_ptr,
    seq_lens_ptr,
    out_ptr,
    num_splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_S: tl.constexpr,
    MIN_TILES: tl.constexpr,
):
    """Grid (num_seqs, num_heads): adds the splits with tokens, each weighted by its share of the whole softmax."""
    seq, head = tl.program_id(0), tl.program_id(1)
    q_row, is_decode = find_decode_row(cu_seqlens_q_ptr, seq)
    if not is_decode:
        return
    row = seq.to(tl.int64) * tl.num_programs(1) + head
    _, _, used = split_tiles(tl.load(seq_lens_ptr + seq), num_splits, BLOCK_N, WINDOW, MIN_TILES)
    offs_s, offs_d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    lse = tl.load(lse_ptr + row * num_splits + offs_s, mask=offs_s < used, other=float("-inf"))
    top = tl.max(lse, 0)
    weights = tl.exp2(lse - tl.where(top == float("-inf"), 0.0, top))
    mask = (offs_s < used)[:, None] & (offs_d < HEAD_DIM)[None, :]
    offsets = (row * num_splits + offs_s)[:, None] * HEAD_DIM + offs_d[None, :]
    values = tl.load(partial_ptr + offsets, mask=mask, other=0.0)
    total = tl.sum(weights, 0)
    result = tl.sum(values * weights[:, None], 0) / tl.where(total > 0.0, total, 1.0)  # zeros if there is no token
    out_at = out_ptr + (q_row * tl.num_programs(1) + head) * HEAD_DIM
    tl.store(out_at + offs_d, result.to(out_ptr.dtype.element_ty), mask=offs_d < HEAD_DIM)


def paged_attention_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    *,
    alibi_slopes: Tensor | None = None,
    sliding_window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """paged_attention in torch: decode is prefill with one query row per sequence."""
    cu_seqlens_q = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
    return prefill_attention_reference(
        q,
        k_cache,
        v_cache,
        block_tables,
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=seq_lens,
        max_seqlen_q=1,
        scale=scale,
        alibi_slopes=alibi_slopes,
        sliding_window=sliding_window,
        softcap=softcap,
    )


def aot_configurations(capability: int) -> Iterator[AotConfiguration]:
    """Yields every model's shape, with one split and with several, and the reduction of each head size."""
    reduced = set()
    for case in attention_cases():
        tile = case.shape.tile("decode", capability, case.shape.group)
        constants = case.shape.constants(tile, capability) | case.absent
        constants |= {"MIN_TILES": MIN_SPLIT_TILES, "cu_seqlens_q_ptr": None}
        for several in (True, False) if case.every_tile else (True,):
            name = case.label(tile) + ("" if several else " unsplit")
            yield AotConfiguration(
                kernel=paged_attention_kernel, label=name, dtype=case.dtype,
                constants=constants if several else constants | {"lse_ptr": None},
                num_warps=tile.num_warps, num_stages=tile.num_stages,
                types=case.types | ({"out_ptr": "*fp32"} if several else {}),
                quick=case.quick and several, needs=case.needs(capability, tile),
                max_shared_memory=case.max_shared_memory(capability, tile),
            )  # fmt: skip
        if case.shape.head_dim not in reduced:
            reduced.add(case.shape.head_dim)
            constants = _reduce_constants(case.shape, tile) | {"cu_seqlens_q_ptr": None}
            yield AotConfiguration(
                reduce_splits_kernel, f"d {case.shape.head_dim}", case.dtype, constants,
                num_warps=4, types=POINTERS, quick=case.quick,
            )  # fmt: skip
