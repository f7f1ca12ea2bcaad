"""PagedAttention for decode (Kwon et al., 2023): one query token per sequence over its blocks of the KV cache.

The heads that share a KV head are the rows of one tile. Long sequences are cut into chunks that run concurrently
(Flash-Decoding: Dao et al., 2023), as the step's WorkMap says. Keys that neighbours share are read once for a window of
them (kernels/attention/shared.py), whose heads are the rows of a larger tile in the same launch.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.aot_configuration import AotConfiguration
from kernels.attention.aot_cases import attention_cases
from kernels.attention.choices import Tile
from kernels.attention.plan import AttentionPlan, AttentionShape, attention_shape, plan_for_call
from kernels.attention.prefill import launch_prefill, prefill_attention, prefill_attention_reference
from kernels.attention.shared import LEAST_MEMBERS, WINDOW_ROWS, shares_keys, window_keys
from kernels.attention.tile import (
    attend_tile,
    base_2_scale,
    cast_queries,
    empty_softmax,
    load_item,
    load_slopes,
    store_result,
    sum_queries,
    value_factor,
)
from kernels.attention.work import StepWork, reduce_chunks
from kernels.cache.quantize import as_bytes
from kernels.card import known_card
from kernels.dependent_launch import launch_options, pdl_constants, wait_for_inputs
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
    sinks: Tensor | None = None,
    attention_chunk: int = 0,
    plan: AttentionPlan | None = None,
    work: StepWork | None = None,
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
        shape = attention_shape(q, k_cache, alibi_slopes, sliding_window, softcap, sinks, attention_chunk)
        plan = plan or plan_for_call(q, shape)
        caches, scales = (as_bytes(k_cache), as_bytes(v_cache)), base_2_scale(scale, softcap)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        if plan.batch_invariant:  # the kernel and the tile of prefill give the same bits
            starts = plan.decode_starts(len(q))
            launch_prefill(
                shape, plan, q, *caches, block_tables, starts, seq_lens, 1, alibi_slopes, *scales, sinks, out, work=work
            )
        else:
            launch_decode(shape, plan, q, *caches, block_tables, seq_lens, alibi_slopes, *scales, sinks, out, work=work)
        return out
    cpu = cpu_kernels() if q.device.type == "cpu" else None
    if cpu and cpu.attention.supports_attention(q, k_cache, v_cache, block_tables, seq_lens):
        attended = cpu.attention.paged_attention(
            q, k_cache, v_cache, block_tables, seq_lens, scale,
            alibi_slopes=alibi_slopes, sliding_window=sliding_window, softcap=softcap, sinks=sinks,
            attention_chunk=attention_chunk, out=out,
        )  # fmt: skip
    else:
        attended = paged_attention_reference(
            q, k_cache, v_cache, block_tables, seq_lens, scale,
            alibi_slopes=alibi_slopes, sliding_window=sliding_window, softcap=softcap, sinks=sinks,
            attention_chunk=attention_chunk,
        )  # fmt: skip
    return attended if out is None or out is attended else out.copy_(attended)


def mixed_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    scale: float,
    *,
    max_seqlen_q: int = 0,
    alibi_slopes: Tensor | None = None,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    attention_chunk: int = 0,
    plan: AttentionPlan | None = None,
    work: StepWork | None = None,
    out: Tensor | None = None,
    counts: Tensor | None = None,
) -> Tensor:
    """prefill_attention for a step whose lengths only the device knows: q [num_tokens, num_heads, head_dim] and
    seq_lens int32 [num_seqs] are capacities.

    Sequence i owns the rows cu_seqlens_q[i]:cu_seqlens_q[i+1] (int32 [num_seqs + 1], from 0, never falling). An empty
    range is padding, whatever its length and its block table; the decode kernel computes a range of one row, the
    prefill kernel a longer one. Rows at and after cu_seqlens_q[num_seqs] are padding: no kernel reads or writes them,
    so their output is unspecified. max_seqlen_q: no sequence will ever have more rows (0: not known); it chooses the
    tile. The launches depend on shapes only: a CUDA graph can capture them with some lengths and replay them with
    others. counts: for a CPU's compiled kernels, int64 [2], the numbers of sequences of one row, which come first, and
    of all sequences; read when the kernels run, so that a recorded program can hold them. Returns [num_tokens,
    num_heads, head_dim].
    """
    cpu = cpu_kernels() if counts is not None and not use_triton(q) else None
    if cpu and cpu.attention.supports_mixed(q, k_cache, v_cache, block_tables, cu_seqlens_q, seq_lens):
        options = (scale, alibi_slopes, sliding_window, softcap, sinks, attention_chunk)
        return cpu.attention.mixed_attention(  # type: ignore[no-any-return]
            q, k_cache, v_cache, block_tables, cu_seqlens_q, seq_lens, counts, *options
        )
    if not use_triton(q):  # a CPU's prefill has no padding: every row is of a sequence
        num_rows = int(cu_seqlens_q[-1])
        out = torch.zeros(q.shape, dtype=q.dtype) if out is None else out
        prefill_attention(
            q[:num_rows], k_cache, v_cache, block_tables, cu_seqlens_q, seq_lens, num_rows, scale,
            alibi_slopes=alibi_slopes, sliding_window=sliding_window, softcap=softcap, sinks=sinks,
            attention_chunk=attention_chunk, plan=plan, out=out[:num_rows],
        )  # fmt: skip
        return out
    shape = attention_shape(q, k_cache, alibi_slopes, sliding_window, softcap, sinks, attention_chunk)
    plan = plan or plan_for_call(q, shape)
    caches, scales = (as_bytes(k_cache), as_bytes(v_cache)), base_2_scale(scale, softcap)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if not plan.batch_invariant:
        launch_decode(
            shape, plan, q, *caches, block_tables, seq_lens, alibi_slopes, *scales, sinks, out, cu_seqlens_q, work=work
        )
    launch_prefill(
        shape, plan, q, *caches, block_tables, cu_seqlens_q, seq_lens, max_seqlen_q or len(q), alibi_slopes, *scales,
        sinks, out, work=work, min_queries=1 if plan.batch_invariant else 2,
    )  # fmt: skip
    return out


def launch_decode(
    shape: AttentionShape, plan: AttentionPlan, q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor,
    seq_lens: Tensor, alibi_slopes: Tensor | None, scale: float, softcap: float, sinks: Tensor | None, out: Tensor,
    cu_seqlens_q: Tensor | None = None, *, work: StepWork | None = None,
) -> None:  # fmt: skip
    """Launch the kernels. scale and softcap come from base_2_scale; quantised caches are passed as bytes.

    cu_seqlens_q: None if sequence i has row i; else int32 [num_seqs + 1], and sequences of one row alone are computed.
    """

    def start(tile: Tile) -> None:
        starts = plan.decode_starts(len(seq_lens)) if cu_seqlens_q is None else cu_seqlens_q
        windows_fit = plan.window_rows(shape) >= 2 * len(seq_lens)
        shares = windows_fit and shares_keys(shape, tile, len(seq_lens))
        found = (work or StepWork()).find(
            "decode", shape, plan, tile, len(q), block_tables.shape[1] * shape.block_size, starts, seq_lens,
            block_tables=block_tables if shares else None,
        )  # fmt: skip
        partial, lse = plan.partial_results(found.max_rows, shape.num_heads, shape.head_dim)
        paged_attention_kernel[(shape.num_kv_heads, len(found.items))](
            q, k_cache, v_cache, block_tables, found.items, found.rows, alibi_slopes, sinks, out, partial, lse,
            scale, softcap, block_tables.stride(0), WINDOW_ROWS=WINDOW_ROWS,
            WINDOW_KEYS=window_keys(plan.capability), **shape.constants(tile, plan.capability),
            num_warps=tile.num_warps, num_stages=tile.num_stages, **launch_options(q.device),
        )  # fmt: skip
        reduce_chunks(found, plan, shape, 1, sinks, out)

    shape.choice("decode", plan.capability, shape.group).launch(start)


@triton.jit(
    do_not_specialize=["block_tables_stride"],
    do_not_specialize_on_alignment=["block_tables_ptr", "rows_ptr", "lse_ptr"],  # slices of any alignment
)
def paged_attention_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_tables_ptr,
    items_ptr,
    rows_ptr,
    alibi_slopes_ptr,
    sinks_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    scale,
    softcap,
    block_tables_stride,
    WINDOW_ROWS: tl.constexpr,
    WINDOW_KEYS: tl.constexpr,
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
    CHUNK: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """Grid (num_kv_heads, items of the WorkMap): the heads of one group over a chunk of the keys of one sequence, or of
    the keys of a window. rows_ptr: WorkMap.rows."""
    wait_for_inputs(PDL)
    kv_head = tl.program_id(0)
    seq, q_row, tokens, query_pos, begin, end = load_item(items_ptr, tl.program_id(1))
    if seq < 0:
        return
    if rows_ptr is not None:
        if query_pos == -2:
            attend_window(
                q_ptr, k_cache_ptr, v_cache_ptr, block_tables_ptr + seq.to(tl.int64) * block_tables_stride,
                items_ptr + tl.program_id(1) * 8, rows_ptr + seq, partial_ptr, lse_ptr, q_row, tokens, kv_head, begin,
                end, scale, softcap, WINDOW_ROWS, WINDOW_KEYS, Q_STRIDE_ROW, Q_STRIDE_HEAD, NUM_KV_HEADS, GROUP,
                HEAD_DIM, BLOCK_D, BLOCK_SIZE, HAS_SOFTCAP,
            )  # fmt: skip
            return
    offs_m, offs_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + offs_m
    row_mask = offs_m < GROUP
    q_mask = row_mask[:, None] & (offs_d < HEAD_DIM)[None, :]
    q_offsets = q_row.to(tl.int64) * Q_STRIDE_ROW + head[:, None] * Q_STRIDE_HEAD + offs_d[None, :]
    q = tl.load(q_ptr + q_offsets, mask=q_mask, other=0.0)
    q_sum = sum_queries(q, BLOCK_M, KV_FORMAT)
    q = cast_queries(q, KV_FORMAT)
    slopes = load_slopes(alibi_slopes_ptr, head, row_mask, BLOCK_M, HAS_ALIBI)
    query_pos += tl.zeros([BLOCK_M], tl.int32)
    acc, row_max, row_sum = empty_softmax(BLOCK_M, BLOCK_D)
    block_table_ptr = block_tables_ptr + seq.to(tl.int64) * block_tables_stride
    for tile_start in range(begin, end, BLOCK_N):
        acc, row_max, row_sum = attend_tile(
            q, q_sum, acc, row_max, row_sum, k_cache_ptr, v_cache_ptr, block_table_ptr, kv_head,
            tile_start, end, query_pos, slopes, scale, softcap,
            NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N, KV_FORMAT, True, HAS_ALIBI, HAS_SOFTCAP, WINDOW,
            CHUNK,
        )  # fmt: skip
    if KV_FORMAT != 0:
        acc *= 1.0 / value_factor(KV_FORMAT, q.dtype)
    store_result(
        acc, row_max, row_sum, sinks_ptr, out_ptr, partial_ptr, lse_ptr, items_ptr, tl.program_id(1), kv_head,
        NUM_KV_HEADS, GROUP, BLOCK_M, 1, HEAD_DIM, BLOCK_D,
    )  # fmt: skip


@triton.jit
def attend_window(
    q_ptr, k_cache_ptr, v_cache_ptr, block_table_ptr, item_ptr, rows_ptr, partial_ptr, lse_ptr, q_row, tokens, kv_head,
    begin, end, scale, softcap, WINDOW_ROWS: tl.constexpr, WINDOW_KEYS: tl.constexpr, Q_STRIDE_ROW: tl.constexpr,
    Q_STRIDE_HEAD: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Keys begin:end, whole tiles that all `tokens` sequences of a window see, for the rows q_row and up: to the
    partial results of each sequence. rows_ptr: the first of those of the window's first sequence; item_ptr: the item,
    whose number 6 is the chunk."""
    offs_m, offs_d = tl.arange(0, WINDOW_ROWS), tl.arange(0, BLOCK_D)
    member, head = offs_m // GROUP, offs_m % GROUP
    mask = member < tl.minimum(tokens, WINDOW_ROWS // GROUP)
    q_at = q_ptr + (q_row.to(tl.int64) * Q_STRIDE_ROW + kv_head * (GROUP * Q_STRIDE_HEAD))
    q_offsets = (member * Q_STRIDE_ROW + head * Q_STRIDE_HEAD)[:, None] + offs_d[None, :]
    q = tl.load(q_at + q_offsets, mask=mask[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)
    acc, row_max, row_sum = empty_softmax(WINDOW_ROWS, BLOCK_D)
    none = tl.zeros([WINDOW_ROWS], tl.float32)
    for tile_start in range(begin, end, WINDOW_KEYS):
        acc, row_max, row_sum = attend_tile(
            q, none, acc, row_max, row_sum, k_cache_ptr, v_cache_ptr, block_table_ptr, kv_head, tile_start, end, none,
            none, scale, softcap, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, BLOCK_D, WINDOW_KEYS, 0, False, False,
            HAS_SOFTCAP, 0, 0,
        )  # fmt: skip
    # Read after the loop, so that no register holds it there.
    row = tl.load(rows_ptr + member, mask=mask, other=0) + tl.load(item_ptr + 6, volatile=True)
    at = (row.to(tl.int64) * NUM_KV_HEADS + kv_head) * GROUP + head
    kept = mask[:, None] & (offs_d < HEAD_DIM)[None, :]
    tl.store(partial_ptr + at[:, None] * HEAD_DIM + offs_d[None, :], acc / row_sum[:, None], mask=kept)
    tl.store(lse_ptr + at, row_max + tl.log2(row_sum), mask=mask)


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
    sinks: Tensor | None = None,
    attention_chunk: int = 0,
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
        sinks=sinks,
        attention_chunk=attention_chunk,
    )


def aot_configurations(capability: int) -> Iterator[AotConfiguration]:
    """Yields every model's shape."""
    for case in attention_cases(capability):
        tile = case.shape.tile("decode", capability, case.shape.group)
        shares = shares_keys(case.shape, tile, LEAST_MEMBERS)
        windows = {"WINDOW_ROWS": WINDOW_ROWS, "WINDOW_KEYS": window_keys(capability)}
        windows |= {} if shares else {"rows_ptr": None}
        card = known_card(capability)
        room = card.shared_memory_per_sm // 2 - card.reserved if shares else case.max_shared_memory(capability, tile)
        # Triton 3.9 keeps some addresses of 128 keys on the stack, and of windows with masked rows; 3.6 (which was
        # timed) none
        max_spill = 40 if case.shape.kv_format and tile.block_n == 128 else 8 if shares else 0
        yield AotConfiguration(
            kernel=paged_attention_kernel, label=case.label(tile), dtype=case.dtype,
            constants=case.shape.constants(tile, capability) | windows | case.absent | pdl_constants(capability),
            num_warps=tile.num_warps, num_stages=tile.num_stages,
            types=case.types, quick=case.quick, needs=case.needs(capability, tile),
            max_shared_memory=room, max_spill=max_spill,
        )  # fmt: skip
