"""Paged caches made from dense sequences, and attention over those sequences written as the formula says."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cache.quantize import dequantize_rows, quantize_rows
from kernels.cache.reshape_and_cache import reshape_and_cache_reference
from kernels.kv_format import KVFormat

POISON = float(
    "nan"
)  # what no kernel may read into a result: unused slots, unused blocks, outputs before they are written


@dataclass(frozen=True)
class Paged:
    """`num_seqs` sequences of dense keys and values [seq_len, num_kv_heads, head_dim], and the same in blocks."""

    keys: list[Tensor]
    values: list[Tensor]
    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor


def paged(seq_lens: list[int], num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype) -> Paged:
    """Random sequences scattered over shuffled blocks; every other slot is NaN, every unused table entry is far out."""
    counts = [-(-n // block_size) for n in seq_lens]
    shape = (sum(counts) + 3, num_kv_heads, block_size, head_dim)
    k_cache, v_cache = (torch.full(shape, POISON, dtype=dtype) for _ in range(2))
    block_tables = torch.full((len(seq_lens), max(counts) + 1), 10**6, dtype=torch.int32)
    free = torch.randperm(shape[0]).tolist()
    keys, values = [], []
    for i, n in enumerate(seq_lens):
        blocks = [free.pop() for _ in range(counts[i])]
        block_tables[i, : counts[i]] = torch.tensor(blocks, dtype=torch.int32)
        dense = [torch.randn(n, num_kv_heads, head_dim).to(dtype) for _ in range(2)]
        for cache, rows in ((k_cache, dense[0]), (v_cache, dense[1])):
            for t in range(n):
                cache[blocks[t // block_size], :, t % block_size] = rows[t]
        keys.append(dense[0])
        values.append(dense[1])
    return Paged(keys, values, k_cache, v_cache, block_tables, torch.tensor(seq_lens, dtype=torch.int32))


def share(data: Paged, i: int, num_blocks: int) -> None:
    """Let sequence i begin with the first num_blocks blocks of the one before it, which both fill."""
    num_tokens = num_blocks * data.k_cache.shape[2]
    data.block_tables[i, :num_blocks] = data.block_tables[i - 1, :num_blocks]
    for rows in (data.keys, data.values):
        rows[i][:num_tokens] = rows[i - 1][:num_tokens]


def empty_pages(num_blocks: int, num_kv_heads: int, head_dim: int, block_size: int, kv_format: KVFormat) -> Tensor:
    """A quantised cache of bytes 0xFF: every parameter is NaN, whatever the format."""
    shape = (num_blocks, num_kv_heads, block_size, kv_format.width(head_dim))
    return torch.full(shape, 0xFF, dtype=torch.uint8).view(getattr(torch, kv_format.dtype_name))


def slots(data: Paged, i: int) -> Tensor:
    """The slots of the tokens of sequence i."""
    block_size, positions = data.k_cache.shape[2], torch.arange(len(data.keys[i]))
    return data.block_tables[i].long()[positions // block_size] * block_size + positions % block_size


def quantized(data: Paged, kv_format: KVFormat) -> Paged:
    """The same sequences in quantised pages; keys and values become what the pages give back."""
    num_blocks, num_kv_heads, block_size, head_dim = data.k_cache.shape
    caches = [empty_pages(num_blocks, num_kv_heads, head_dim, block_size, kv_format) for _ in range(2)]
    for i, (keys, values) in enumerate(zip(data.keys, data.values, strict=True)):
        reshape_and_cache_reference(keys, values, *caches, slots(data, i))
    rows = [[dequantize_rows(*quantize_rows(x, kv_format), kv_format) for x in dense]
            for dense in (data.keys, data.values)]  # fmt: skip
    return Paged(*rows, *caches, data.block_tables, data.seq_lens)


def attention(q, keys, values, scale, alibi_slopes=None, sliding_window=0, softcap=0.0, sinks=None,
              attention_chunk=0) -> Tensor:  # fmt: skip
    """Dense causal attention of the last len(q) tokens of one sequence, fp32, one head and one query at a time."""
    (num_queries, num_heads, _), (seq_len, num_kv_heads, _) = q.shape, keys.shape
    out = torch.empty(q.shape)
    for t in range(num_queries):
        pos = seq_len - num_queries + t
        first = max(0, pos - sliding_window + 1) if sliding_window else 0
        first = max(first, pos // attention_chunk * attention_chunk) if attention_chunk else first
        for h in range(num_heads):
            kv = h // (num_heads // num_kv_heads)
            scores = keys[first : pos + 1, kv].float() @ q[t, h].float() * scale
            if softcap:
                scores = softcap * (scores / softcap).tanh()
            if alibi_slopes is not None:
                scores = scores - alibi_slopes[h] * (pos - torch.arange(first, pos + 1))
            if sinks is not None:
                scores = torch.cat([scores, sinks[h : h + 1]])
            out[t, h] = scores.softmax(0)[: pos + 1 - first] @ values[first : pos + 1, kv].float()
    return out.to(q.dtype)


def options(name: str, num_heads: int) -> dict:
    """Keyword arguments of the attention kernels, by the name of a case."""
    slopes = torch.linspace(0.05, 0.6, num_heads)
    return {
        "plain": {},
        "window": {"sliding_window": 5},
        "softcap": {"softcap": 1.5},
        "alibi": {"alibi_slopes": slopes},
        "sinks": {"sinks": torch.linspace(-3.0, 4.0, num_heads)},
        "chunk": {"attention_chunk": 20},
        "chunked sinks": {"attention_chunk": 32, "sinks": torch.linspace(6.0, -1.0, num_heads), "sliding_window": 25},
        "all": {"sliding_window": 11, "softcap": 2.0, "alibi_slopes": slopes},
    }[name]


def fused_q(num_rows: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Query heads as the models pass them: a view into the rows of a fused qkv projection."""
    return torch.randn(num_rows, num_heads + 2 * num_kv_heads, head_dim).to(dtype)[:, :num_heads]
