"""Causal attention of many query tokens over the paged KV cache: prefill, chunked prefill, and any mix of lengths."""

import torch
from torch import Tensor

from kernels.dispatch import cpu_kernels


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
) -> Tensor:
    """Attend from q [num_tokens, num_heads, head_dim] to the cached tokens at and before each query's position.

    Sequence i owns the rows cu_seqlens_q[i]:cu_seqlens_q[i+1] (int32 [num_seqs + 1]); its last row is token
    seq_lens[i] - 1 (int32 [num_seqs]). Keys and values, this step's included, are read from the caches
    [num_blocks, num_kv_heads, block_size, head_dim] through block_tables int32 [num_seqs, max_blocks].
    alibi_slopes fp32 [num_heads]; sliding_window w > 0 keeps the last w tokens, the query's own included; softcap c > 0
    replaces a score s by c * tanh(s / c). Returns [num_tokens, num_heads, head_dim].
    """
    cpu = cpu_kernels() if q.device.type == "cpu" else None
    if cpu and cpu.attention.supports_attention(q, k_cache, v_cache, block_tables, seq_lens, cu_seqlens_q):
        return cpu.attention.prefill_attention(
            q, k_cache, v_cache, block_tables, cu_seqlens_q, seq_lens, scale, alibi_slopes, sliding_window, softcap
        )
    return prefill_attention_reference(
        q,
        k_cache,
        v_cache,
        block_tables,
        cu_seqlens_q,
        seq_lens,
        max_seqlen_q,
        scale,
        alibi_slopes=alibi_slopes,
        sliding_window=sliding_window,
        softcap=softcap,
    )


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
    """The same in torch, one sequence at a time, in fp32."""
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    bounds = cu_seqlens_q.tolist()
    group = q.shape[1] // k_cache.shape[1]
    for i, seq_len in enumerate(seq_lens.tolist()):
        rows = slice(bounds[i], bounds[i + 1])
        if rows.start == rows.stop or seq_len == 0:
            continue
        keys, values = (gather_blocks(cache, block_tables[i], seq_len) for cache in (k_cache, v_cache))
        keys, values = (x.float().repeat_interleave(group, dim=0) for x in (keys, values))
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
    """The first seq_len tokens of one sequence as [num_kv_heads, seq_len, head_dim], copied out of the cache."""
    num_kv_heads, block_size, head_dim = cache.shape[1:]
    blocks = cache[block_table[: -(-seq_len // block_size)].long()]
    return blocks.transpose(0, 1).reshape(num_kv_heads, -1, head_dim)[:, :seq_len]
