"""Attention in whole sequences whose tokens attend to later tokens, too, as in encoders, on a CPU."""

import torch
from torch import Tensor

from kernels.dispatch import INTERPRET, cpu_kernels

BLOCK_SIZE = 16  # the caches have blocks of this many tokens


def supports_whole_attention(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """True if `whole_attention` computes such heads on the device."""
    cpu = cpu_kernels() if device.type == "cpu" and not INTERPRET else None
    if cpu is None:
        return False
    cache = torch.empty(0, 1, BLOCK_SIZE, head_dim, dtype=dtype)
    return cpu.attention_tiles.supports(cache[:, 0], cache)


def whole_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    scale: float,
    *,
    sliding_window: int = 0,
) -> Tensor:
    """Attention of q [num_tokens, num_heads, head_dim] over all tokens of each sequence. Ask supports_whole_attention()
    first.

    Sequence i owns the rows cu_seqlens[i]:cu_seqlens[i+1] (int32 [num_seqs + 1]), seq_lens[i] of them (int32
    [num_seqs]). Keys and values are read from the caches [num_blocks, num_kv_heads, BLOCK_SIZE, head_dim] through
    block_tables int32 [num_seqs, max_blocks]. sliding_window w > 0 keeps the tokens that are nearer than w, before and
    behind the query's own. Returns a tensor like q.
    """
    cpu = cpu_kernels()
    assert cpu is not None, "supports_whole_attention() says so"
    return cpu.attention_tiles.prefill_attention(
        q, k_cache, v_cache, block_tables, cu_seqlens, seq_lens, scale, None, sliding_window, 0.0, None, 0,
        both_ways=True,
    )  # fmt: skip
