"""Causal attention of many query tokens over the paged KV cache: prefill, chunked prefill, and any mix of lengths."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.aot_configuration import AotConfiguration
from kernels.attention.aot_cases import attention_cases
from kernels.attention.choices import Tile
from kernels.attention.overlap import as_copied, attend_overlapped
from kernels.attention.plan import SMALL_ROWS, AttentionPlan, AttentionShape, attention_shape, plan_for_call
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
from kernels.attention.work import StepWork, first_key, reduce_chunks
from kernels.cache.quantize import as_bytes, read_pages
from kernels.dispatch import cpu_kernels, tl, triton, use_triton
from kernels.tile_choice import TileChoice


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
    sinks: Tensor | None = None,
    attention_chunk: int = 0,
    plan: AttentionPlan | None = None,
    work: StepWork | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of q [num_tokens, num_heads, head_dim] over the cached tokens at and before each query's position.

    Sequence i owns the rows cu_seqlens_q[i]:cu_seqlens_q[i+1] (int32 [num_seqs + 1]); its last row is token
    seq_lens[i] - 1 (int32 [num_seqs]). Keys and values, this step's included, are read from the caches
    [num_blocks, num_kv_heads, block_size, head_dim], or from pages of a format of kernels/kv_format.py, through
    block_tables int32 [num_seqs, max_blocks].
    alibi_slopes fp32 [num_heads]; sliding_window w > 0 keeps the last w tokens, the query's own included; softcap c > 0
    replaces a score s by c * tanh(s / c); sinks fp32 [num_heads] are logits that join the softmax's denominator
    (gpt-oss; Xiao et al., 2024); attention_chunk c > 0 keeps the tokens with the query's own position // c.
    plan: the launch parameters of a GPU (None: made for this call); a CPU reads only its batch_invariant. work: the
    work maps of the step, shared by its layers (None: made for this call). out
    [num_tokens, num_heads, head_dim], contiguous: the tensor to write the result to, if given. Returns out.
    """
    if use_triton(q):
        shape = attention_shape(q, k_cache, alibi_slopes, sliding_window, softcap, sinks, attention_chunk)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        launch_prefill(
            shape, plan or plan_for_call(q, shape), q, as_bytes(k_cache), as_bytes(v_cache), block_tables,
            cu_seqlens_q, seq_lens, max_seqlen_q, alibi_slopes, *base_2_scale(scale, softcap), sinks, out,
            work=work,
        )  # fmt: skip
        return out
    cpu = cpu_kernels() if q.device.type == "cpu" else None
    if cpu and cpu.attention.supports_attention(q, k_cache, v_cache, block_tables, seq_lens, cu_seqlens_q):
        attended = cpu.attention.prefill_attention(
            q, k_cache, v_cache, block_tables, cu_seqlens_q=cu_seqlens_q, seq_lens=seq_lens, scale=scale,
            alibi_slopes=alibi_slopes, sliding_window=sliding_window, softcap=softcap, sinks=sinks,
            attention_chunk=attention_chunk, out=out,
            as_decode=plan is not None and plan.batch_invariant,
        )  # fmt: skip
    else:
        attended = prefill_attention_reference(
            q, k_cache, v_cache, block_tables, cu_seqlens_q=cu_seqlens_q, seq_lens=seq_lens, max_seqlen_q=max_seqlen_q,
            scale=scale, alibi_slopes=alibi_slopes, sliding_window=sliding_window, softcap=softcap, sinks=sinks,
            attention_chunk=attention_chunk,
        )  # fmt: skip
    return attended if out is None or out is attended else out.copy_(attended)


def launch_prefill(
    shape: AttentionShape, plan: AttentionPlan, q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor,
    cu_seqlens_q: Tensor, seq_lens: Tensor, max_seqlen_q: int, alibi_slopes: Tensor | None, scale: float,
    softcap: float, sinks: Tensor | None, out: Tensor, *, work: StepWork | None = None, min_queries: int = 1,
) -> None:  # fmt: skip
    """Launch the kernels. scale and softcap come from base_2_scale; quantised caches are passed as bytes.

    min_queries: sequences of fewer rows are left to the decode kernel.
    """
    choice, divides = prefill_choice(shape, plan, max(0, len(q) - len(seq_lens)), max_seqlen_q)

    def start(tile: Tile) -> None:
        tokens = tile.block_m // shape.group
        max_tokens = block_tables.shape[1] * shape.block_size if divides else 0
        found = (work or StepWork()).find(
            "prefill", shape, plan, tile, len(q), max_tokens, cu_seqlens_q, seq_lens, min_queries
        )
        partial, lse = None, None
        if divides:
            partial, lse = plan.partial_results(found.max_rows, tokens * shape.num_heads, shape.head_dim)
        prefill_attention_kernel[(shape.num_kv_heads, len(found.items))](
            q, as_copied(k_cache, tile), as_copied(v_cache, tile), block_tables, found.items, alibi_slopes, sinks, out,
            partial, lse, scale, softcap, block_tables.stride(0),
            ALWAYS_MASKED=plan.batch_invariant, OVERLAP=tile.overlaps, TMA=tile.tma,
            **shape.constants(tile, plan.capability), num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
        reduce_chunks(found, plan, shape, tokens, sinks, out)

    choice.launch(start)


def prefill_tile(shape: AttentionShape, plan: AttentionPlan, num_rows: int, max_seqlen_q: int) -> tuple[Tile, bool]:
    """`prefill_choice` with the tile in use now."""
    choice, divides = prefill_choice(shape, plan, num_rows, max_seqlen_q)
    return choice.tile, divides


def prefill_choice(
    shape: AttentionShape, plan: AttentionPlan, num_rows: int, max_seqlen_q: int
) -> tuple[TileChoice[Tile], bool]:
    """(the tiles of a launch, whether units of work may be divided into chunks). num_rows: rows of sequences of several
    rows, at least.

    Large tiles are for prompts that fill the device by themselves, twice: there, chunks gain nothing, and the kernel
    without their code keeps the registers for its loop. Fewer rows get tiles of at most SMALL_ROWS rows: more programs.
    """
    if plan.batch_invariant:
        return shape.choice("invariant", plan.capability), False
    rows = max_seqlen_q * shape.group
    choice = shape.choice("prefill", plan.capability, rows)
    tile = choice.tile
    if tile.block_m <= SMALL_ROWS:
        return choice, True
    if num_rows // (tile.block_m // shape.group) * shape.num_kv_heads >= 2 * plan.num_sms:
        return choice, False
    return shape.choice("prefill", plan.capability, min(rows, SMALL_ROWS)), True


@triton.jit(
    do_not_specialize=["block_tables_stride"],
    do_not_specialize_on_alignment=["block_tables_ptr", "lse_ptr"],  # slices of any alignment
)
def prefill_attention_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, block_tables_ptr, items_ptr, alibi_slopes_ptr, sinks_ptr, out_ptr,
    partial_ptr, lse_ptr, scale, softcap, block_tables_stride,
    Q_STRIDE_ROW: tl.constexpr, Q_STRIDE_HEAD: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, KV_FORMAT: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, ALWAYS_MASKED: tl.constexpr, OVERLAP: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Grid (num_kv_heads, items of the WorkMap): BLOCK_M // GROUP tokens at most over a chunk of their keys.

    Row m of a tile is query token m // GROUP and head m % GROUP of the group, so K and V are read once for all heads of
    the group. Keys that every row sees come first, without masks; keys at the edge of a window or chunk and on the
    diagonal follow with masks. ALWAYS_MASKED: all keys in the sequence's order with masks, so that a row's arithmetic
    does not depend on the tile's other rows. OVERLAP: the loop of kernels/attention/overlap.py; TMA: its caches are
    descriptions of their rows.
    """
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(0)
    seq, q_row, tokens, first_pos, begin, end = load_item(items_ptr, tl.program_id(1))
    if seq < 0:
        return
    if partial_ptr is None and WINDOW == 0 and CHUNK == 0:
        begin = first_pos * 0  # known to the compiler: fewer registers
    offs_m, offs_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    tile_token, tile_head = offs_m // GROUP, offs_m % GROUP
    row_mask = (tile_token < tokens) & (offs_m < TOKENS * GROUP)
    q_mask = row_mask[:, None] & (offs_d < HEAD_DIM)[None, :]
    # int64 once for the tile: threads hold offsets of 32 bits
    q_at = q_ptr + (q_row.to(tl.int64) * Q_STRIDE_ROW + kv_head * (GROUP * Q_STRIDE_HEAD))
    q_offsets = (tile_token * Q_STRIDE_ROW + tile_head * Q_STRIDE_HEAD)[:, None] + offs_d[None, :]
    q = tl.load(q_at + q_offsets, mask=q_mask, other=0.0)
    q_sum = sum_queries(q, BLOCK_M, KV_FORMAT)
    q = cast_queries(q, KV_FORMAT)
    slopes = load_slopes(alibi_slopes_ptr, kv_head * GROUP + tile_head, row_mask, BLOCK_M, HAS_ALIBI)
    query_pos = first_pos + tile_token
    acc, row_max, row_sum = empty_softmax(BLOCK_M, BLOCK_D)
    block_table_ptr = block_tables_ptr + seq.to(tl.int64) * block_tables_stride
    all_see, all_see_end = key_range(first_pos, begin, end, TOKENS, BLOCK_N, WINDOW, CHUNK, ALWAYS_MASKED)
    if OVERLAP:
        acc, row_max, row_sum = attend_overlapped(
            q, acc, row_max, row_sum, k_cache_ptr, v_cache_ptr, block_table_ptr, kv_head, begin, all_see_end, end,
            query_pos, scale, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, TMA,
        )  # fmt: skip
    else:
        for tile_start in range(all_see, all_see_end, BLOCK_N):
            acc, row_max, row_sum = attend_tile(
                q, q_sum, acc, row_max, row_sum, k_cache_ptr, v_cache_ptr, block_table_ptr, kv_head,
                tile_start, end, query_pos, slopes, scale, softcap,
                NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N, KV_FORMAT, False, HAS_ALIBI, HAS_SOFTCAP, WINDOW,
                CHUNK,
            )  # fmt: skip
        skipped = all_see_end - all_see  # the masked tiles lie before and after the tiles done above
        for masked_start in range(begin + skipped, end, BLOCK_N):
            tile_start = masked_start
            if WINDOW > 0 or CHUNK > 0:
                tile_start = tl.where(masked_start - skipped < all_see, masked_start - skipped, masked_start)
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
        NUM_KV_HEADS, GROUP, BLOCK_M, TOKENS, HEAD_DIM, BLOCK_D,
    )  # fmt: skip


@triton.jit
def key_range(
    first_pos,
    begin,
    end,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    ALWAYS_MASKED: tl.constexpr,
):
    """Begin and end, multiples of BLOCK_N, of those keys in begin:end that each of TOKENS queries from first_pos on
    sees; they are equal if there is none. begin is a multiple of BLOCK_N."""
    if ALWAYS_MASKED:
        return begin, begin
    all_end = tl.maximum(tl.minimum(first_pos + 1, end) // BLOCK_N * BLOCK_N, begin)
    all_begin = begin
    if WINDOW > 0 or CHUNK > 0:
        last_begin = first_key(first_pos + TOKENS - 1, WINDOW, CHUNK)
        all_begin = (last_begin + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        all_begin = tl.minimum(tl.maximum(all_begin, begin), all_end)
    return all_begin, all_end


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
    sinks: Tensor | None = None,
    attention_chunk: int = 0,
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
        if attention_chunk:
            hidden |= k_pos < (k_pos - k_pos % attention_chunk)[seq_len - (rows.stop - rows.start) :, None]
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, len(distance), 1)], -1)
        probs = scores.softmax(-1)[..., :seq_len]
        out[rows] = torch.einsum("hqk,hkd->qhd", probs, values).to(q.dtype)
    return out


def gather_blocks(cache: Tensor, block_table: Tensor, seq_len: int) -> Tensor:
    """The first seq_len tokens of one sequence as fp32 [num_kv_heads, seq_len, head_dim], from any cache."""
    num_blocks = -(-seq_len // cache.shape[2])
    blocks = read_pages(as_bytes(cache)[block_table[:num_blocks].long()].view(cache.dtype))  # torch cannot index fp8
    return blocks.transpose(0, 1).flatten(1, 2)[:, :seq_len]


def aot_configurations(capability: int) -> Iterator[AotConfiguration]:
    """Yields every model's shape with long chunks; plain shapes also with short chunks and batch-invariant."""
    for case in attention_cases(capability):
        uses = {"": ("prefill", 1 << 20)}
        if case.every_tile:
            uses |= {f" {n} rows": ("prefill", n) for n in (16, 32, 64)} | {" invariant": ("invariant", 0)}
        for name, (use, num_rows) in uses.items():
            tile = case.shape.tile(use, capability, num_rows)
            flags = {"ALWAYS_MASKED": use == "invariant", "OVERLAP": tile.overlaps, "TMA": tile.tma}
            if use == "invariant" or (tile.block_m > SMALL_ROWS and num_rows > SMALL_ROWS):
                flags |= {"partial_ptr": None, "lse_ptr": None}
            yield AotConfiguration(
                kernel=prefill_attention_kernel, label=case.label(tile) + name, dtype=case.dtype,
                constants=case.shape.constants(tile, capability) | case.absent | flags,
                num_warps=tile.num_warps, num_stages=tile.num_stages,
                types=case.types | case.copied(tile), quick=case.quick and num_rows > 64,
                needs=case.needs(capability, tile), max_shared_memory=case.max_shared_memory(capability, tile),
            )  # fmt: skip
