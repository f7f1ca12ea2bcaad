"""PagedAttention for decode (Kwon et al., 2023): one query token per sequence over its blocks of the KV cache."""

import torch
from torch import Tensor

from kernels.dispatch import cpu_kernels
from kernels.prefill_attention import prefill_attention_reference


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
) -> Tensor:
    """Attend from q [num_seqs, num_heads, head_dim], each sequence's newest token, to the tokens in its blocks.

    Caches [num_blocks, num_kv_heads, block_size, head_dim]; block_tables int32 [num_seqs, max_blocks]; seq_lens int32
    [num_seqs] counts the cached tokens, the query's own included (0 gives a row of zeros: padding of a CUDA graph).
    The options are those of prefill_attention. Returns [num_seqs, num_heads, head_dim].
    """
    cpu = cpu_kernels() if q.device.type == "cpu" else None
    if cpu and cpu.attention.supports_attention(q, k_cache, v_cache, block_tables, seq_lens):
        return cpu.attention.paged_attention(
            q, k_cache, v_cache, block_tables, seq_lens, scale, alibi_slopes, sliding_window, softcap
        )
    return paged_attention_reference(
        q,
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        scale,
        alibi_slopes=alibi_slopes,
        sliding_window=sliding_window,
        softcap=softcap,
    )


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
    """The same in torch: decode is prefill with one query row per sequence."""
    cu_seqlens_q = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
    return prefill_attention_reference(
        q,
        k_cache,
        v_cache,
        block_tables,
        cu_seqlens_q,
        seq_lens,
        1,
        scale,
        alibi_slopes=alibi_slopes,
        sliding_window=sliding_window,
        softcap=softcap,
    )
