"""Causal attention of many query tokens over the paged KV cache: prefill, chunked prefill, and any mix of lengths."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.aot_configuration import AotConfiguration
from kernels.attention.aot_cases import attention_cases
from kernels.attention.plan import AttentionPlan, AttentionShape, attention_shape, plan_for_call
from kernels.attention.tile import attend_tile, base_2_scale, empty_softmax, load_slopes, sum_queries
from kernels.cache.quantize import as_bytes, read_pages
from kernels.dispatch import cpu_kernels, tl, triton, use_triton


def prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    max_seqlen_q: int,
    scale: float,
    *,
    alibi_slopes: Tensor | None = None,
    sliding_window: int = 0,
    softcap: float = 0.0,
    plan: AttentionPlan | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of q [num_tokens, num_heads, head_dim] over the cached tokens at and before each query's position.

    Sequence i owns the rows cu_seqlens_q[i]:cu_seqlens_q[i+1] (int32 [num_seqs + 1]); its last row is token
    seq_lens[i] - 1 (int32 [num_seqs]). Keys and values, this step's included, are read from the caches
    [num_blocks, num_kv_heads, block_size, head_dim], or from pages of a format of kernels/kv_format.py, through
    block_tables int32 [num_seqs, max_blocks].
    alibi_slopes fp32 [num_heads]; sliding_window w > 0 keeps the last w tokens, the query's own included; softcap c > 0
    replaces a score s by c * tanh(s / c).
    plan: the launch parameters of a GPU (None: made for this call); a CPU reads only its batch_invariant. out
    [num_tokens, num_heads, head_dim], contiguous: the tensor to write the result to, if given. Returns out.
    """
    if use_triton(q):
        shape = attention_shape(q, k_cache, alibi_slopes, sliding_window, softcap)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        launch_prefill(
            shape, plan or plan_for_call(q, shape), q, as_bytes(k_cache), as_bytes(v_cache), block_tables,
            cu_seqlens_q, seq_lens, max_seqlen_q, alibi_slopes, *base_2_scale(scale, softcap), out,
        )  # fmt: skip
        return out
    cpu = cpu_kernels() if q.device.type == "cpu" else None
    if cpu and cpu.attention.supports_attention(q, k_cache, v_cache, block_tables, seq_lens, cu_seqlens_q):
        attended = cpu.attention.prefill_attention(
            q, k_cache, v_cache, block_tables, cu_seqlens_q=cu_seqlens_q, seq_lens=seq_lens, scale=scale,
            alibi_slopes=alibi_slopes, sliding_window=sliding_window, softcap=softcap,
            as_decode=plan is not None and plan.batch_invariant,
        )  # fmt: skip
    else:
        attended = prefill_attention_reference(
            q, k_cache, v_cache, block_tables, cu_seqlens_q=cu_seqlens_q, seq_lens=seq_lens, max_seqlen_q=max_seqlen_q,
            scale=scale, alibi_slopes=alibi_slopes, sliding_window=sliding_window, softcap=softcap,
        )  # fmt: skip
    return attended if out is None else out.copy_(attended)


def launch_prefill(
    shape: AttentionShape, plan: AttentionPlan, q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor,
    cu_seqlens_q: Tensor, seq_lens: Tensor, max_seqlen_q: int, alibi_slopes: Tensor | None, scale: float,
    softcap: float, out: Tensor, *, skip_single: bool = False,
) -> None:  # fmt: skip
    """Launch the kernel. scale and softcap come from base_2_scale; quantised caches are passed as bytes.

    skip_single: sequences of one row are left to the decode kernel.
    """
    num_seqs = len(seq_lens)
    use = "invariant" if plan.batch_invariant else "prefill"
    tile = shape.tile(use, plan.capability, 0 if plan.batch_invariant else max_seqlen_q * shape.group)
    tokens_per_tile = tile.block_m // shape.group
    # find_tile_start numbers tiles like this: one number per sequence may stay unused, whatever the lengths.
    num_tiles = len(q) // tokens_per_tile + num_seqs
    prefill_attention_kernel[(num_tiles, shape.num_kv_heads)](
        q, k_cache, v_cache, block_tables, cu_seqlens_q, seq_lens, alibi_slopes, out,
        scale, softcap, num_seqs, block_tables.stride(0),
        ALWAYS_MASKED=plan.batch_invariant, MIN_QUERIES=2 if skip_single else 1,
        **shape.constants(tile, plan.capability),
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_seqs", "block_tables_stride"],
    do_not_specialize_on_alignment=["block_tables_ptr", "cu_seqlens_q_ptr", "seq_lens_ptr"],  # slices of any alignment
)
def prefill_attention_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_tables_ptr,
    cu_seqlens_q_ptr,
    seq_lens_ptr,
    alibi_slopes_ptr,
    out_ptr,
    scale,
    softcap,
    num_seqs,
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
    ALWAYS_MASKED: tl.constexpr,
    MIN_QUERIES: tl.constexpr,
):
    """Grid (query tiles of all sequences, num_kv_heads); a tile has BLOCK_M // GROUP tokens of one sequence.

    Row m of a tile is query token m // GROUP and head m % GROUP of the group, so K and V are read once for all heads of
    the group. Keys that every row sees come first, without masks; keys at the edge of a window and on the diagonal
    follow with masks. ALWAYS_MASKED: all keys in the sequence's order with masks, so that a row's arithmetic does not
    depend on the tile's other rows. Sequences of fewer than MIN_QUERIES rows are skipped.
    """
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(1)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # long programs, at the end of sequences, start first
    seq, first_token, q_begin, q_len = find_tile_start(cu_seqlens_q_ptr, num_seqs, tile, TOKENS)
    if (first_token >= q_len) | (q_len < MIN_QUERIES):
        return
    seq_len = tl.load(seq_lens_ptr + seq)
    offs_m, offs_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    tile_token, tile_head = offs_m // GROUP, offs_m % GROUP
    token = first_token + tile_token
    row_mask = (token < q_len) & (offs_m < TOKENS * GROUP)
    q_mask = row_mask[:, None] & (offs_d < HEAD_DIM)[None, :]
    row = (q_begin + first_token).to(tl.int64)  # the only 64-bit value: threads hold no addresses in registers
    q_at = q_ptr + (row * Q_STRIDE_ROW + kv_head * (GROUP * Q_STRIDE_HEAD))
    q_offsets = (tile_token * Q_STRIDE_ROW + tile_head * Q_STRIDE_HEAD)[:, None] + offs_d[None, :]
    q = tl.load(q_at + q_offsets, mask=q_mask, other=0.0)
    q_sum = sum_queries(q, BLOCK_M, KV_FORMAT)
    slopes = load_slopes(alibi_slopes_ptr, kv_head * GROUP + tile_head, row_mask, BLOCK_M, HAS_ALIBI)
    first_pos, query_pos = seq_len - q_len + first_token, seq_len - q_len + token
    acc, row_max, row_sum = empty_softmax(BLOCK_M, BLOCK_D)
    block_table_ptr = block_tables_ptr + seq.to(tl.int64) * block_tables_stride
    end = tl.minimum(seq_len, first_pos + TOKENS)
    begin, all_see, all_see_end = key_ranges(first_pos, TOKENS, BLOCK_N, WINDOW, ALWAYS_MASKED)
    for tile_start in range(all_see, all_see_end, BLOCK_N):
        acc, row_max, row_sum = attend_tile(
            q, q_sum, acc, row_max, row_sum, k_cache_ptr, v_cache_ptr, block_table_ptr, kv_head,
            tile_start, end, query_pos, slopes, scale, softcap,
            NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N, KV_FORMAT, False, HAS_ALIBI, HAS_SOFTCAP, WINDOW,
        )  # fmt: skip
    skipped = all_see_end - all_see  # the masked tiles lie before and after the tiles done above
    for masked_start in range(begin + skipped, end, BLOCK_N):
        tile_start = masked_start
        if WINDOW > 0:
            tile_start = tl.where(masked_start - skipped < all_see, masked_start - skipped, masked_start)
        acc, row_max, row_sum = attend_tile(
            q, q_sum, acc, row_max, row_sum, k_cache_ptr, v_cache_ptr, block_table_ptr, kv_head,
            tile_start, end, query_pos, slopes, scale, softcap,
            NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N, KV_FORMAT, True, HAS_ALIBI, HAS_SOFTCAP, WINDOW,
        )  # fmt: skip
    result = acc / tl.where(row_sum > 0.0, row_sum, 1.0)[:, None]
    out_at = out_ptr + (row * NUM_KV_HEADS + kv_head) * (GROUP * HEAD_DIM)
    out_offsets = (tile_token * (NUM_KV_HEADS * GROUP) + tile_head)[:, None] * HEAD_DIM + offs_d[None, :]
    tl.store(out_at + out_offsets, result.to(out_ptr.dtype.element_ty), mask=q_mask)


@triton.jit
def find_tile_start(cu_seqlens_q_ptr, num_seqs, tile, TOKENS: tl.constexpr):
    """Binary search for a tile: (its sequence, its first query token, the sequence's first row and number of rows).

    Tiles of sequence i are numbered from cu_seqlens_q[i] // TOKENS + i. That leaves enough numbers for every sequence,
    because ceil((b - a) / T) <= floor(b / T) - floor(a / T) + 1. An unused number gives a first token past the
    sequence's end.
    """
    low, high = num_seqs * 0, num_seqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        is_after = tl.load(cu_seqlens_q_ptr + middle) // TOKENS + middle > tile
        high = tl.where(is_after, middle - 1, high)
        low = tl.where(is_after, low, middle)
    q_begin = tl.load(cu_seqlens_q_ptr + low)
    return low, (tile - q_begin // TOKENS - low) * TOKENS, q_begin, tl.load(cu_seqlens_q_ptr + low + 1) - q_begin


@triton.jit
def key_ranges(
    first_pos, TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, ALWAYS_MASKED: tl.constexpr
):
    """(first visible key, begin and end of the keys that all queries see), rounded to multiples of BLOCK_N, for TOKENS
    queries from first_pos on. If no key is seen by all, begin and end are the first visible key."""
    begin = first_pos * 0
    if WINDOW > 0:
        begin = tl.maximum(first_pos + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N
    if ALWAYS_MASKED:
        return begin, begin, begin
    all_end = tl.maximum((first_pos + 1) // BLOCK_N * BLOCK_N, begin)
    all_begin = begin
    if WINDOW > 0:
        all_begin = (tl.maximum(first_pos + TOKENS - WINDOW, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        all_begin = tl.minimum(all_begin, all_end)
    return begin, all_begin, all_end


def prefill_attention_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    max_seqlen_q: int,
    scale: float,
    *,
    alibi_slopes: Tensor | None = None,
    sliding_window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """prefill_attention in torch, one sequence at a time, in fp32."""
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    bounds = cu_seqlens_q.tolist()
    group = q.shape[1] // k_cache.shape[1]
    for i, seq_len in enumerate(seq_lens.tolist()):
        rows = slice(bounds[i], bounds[i + 1])
        if rows.start == rows.stop or seq_len == 0:
            continue
        keys, values = (gather_blocks(cache, block_tables[i], seq_len) for cache in (k_cache, v_cache))
        keys, values = (x.repeat_interleave(group, dim=0) for x in (keys, values))
        scores = torch.einsum("qhd,hkd->hqk", q[rows].float(), keys) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        k_pos = torch.arange(seq_len, device=q.device)
        distance = k_pos[seq_len - (rows.stop - rows.start) :, None] - k_pos  # query position - key position
        if alibi_slopes is not None:
            scores = scores - alibi_slopes.float()[:, None, None] * distance
        hidden = distance < 0
        if sliding_window:
            hidden |= distance >= sliding_window
        probs = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[rows] = torch.einsum("hqk,hkd->qhd", probs, values).to(q.dtype)
    return out


def gather_blocks(cache: Tensor, block_table: Tensor, seq_len: int) -> Tensor:
    """The first seq_len tokens of one sequence as fp32 [num_kv_heads, seq_len, head_dim], from any cache."""
    num_blocks = -(-seq_len // cache.shape[2])
    blocks = read_pages(as_bytes(cache)[block_table[:num_blocks].long()].view(cache.dtype))  # torch cannot index fp8
    return blocks.transpose(0, 1).flatten(1, 2)[:, :seq_len]


def aot_configurations(capability: int) -> Iterator[AotConfiguration]:
    """Yields every model's shape with long chunks; plain shapes also with short chunks and batch-invariant."""
    for case in attention_cases():
        uses = {"": ("prefill", 1 << 20)}
        if case.every_tile:
            uses |= {f" {n} rows": ("prefill", n) for n in (16, 32, 64)} | {" invariant": ("invariant", 0)}
        for name, (use, num_rows) in uses.items():
            tile = case.shape.tile(use, capability, num_rows)
            flags = {"ALWAYS_MASKED": use == "invariant", "MIN_QUERIES": 1}
            yield AotConfiguration(
                kernel=prefill_attention_kernel, label=case.label(tile) + name, dtype=case.dtype,
                constants=case.shape.constants(tile, capability) | case.absent | flags,
                num_warps=tile.num_warps, num_stages=tile.num_stages,
                types=case.types, quick=case.quick and num_rows > 64, needs=case.needs(capability, tile),
                max_shared_memory=case.max_shared_memory(capability, tile),
            )  # fmt: skip
