"""Attention over the paged KV cache, and the metadata of a batch that it needs."""

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from engine.models.config import ModelConfig
from engine.models.layers.operators import Operators, take_linear
from kernels.attention.decode import paged_attention
from kernels.attention.plan import AttentionPlan
from kernels.attention.prefill import prefill_attention
from kernels.cache.rope_and_cache import QKVHeads, rope_and_cache

KVCache = tuple[Tensor, Tensor]  # k_cache, v_cache of a layer: [num_blocks, num_kv_heads, block_size, head_dim]


@dataclass(frozen=True, slots=True)
class OutputRows:
    """The rows whose hidden states are wanted, each the last token of a sequence: to the last layer, a decode."""

    indices: Tensor  # int64 [num_outputs]: rows among the step's tokens
    block_tables: Tensor  # int32 [num_outputs, max_blocks]
    seq_lens: Tensor  # int32 [num_outputs]


@dataclass(frozen=True, slots=True)
class BatchMetadata:
    """Where the tokens of one step stand. An argument of the forward pass, never a global.

    The first num_decodes sequences have exactly one query token each, in rows 0 to num_decodes - 1; the rows after
    them belong to the other sequences ("prefills"), in order.
    """

    positions: Tensor  # int64 [num_tokens]
    slot_mapping: Tensor  # int64 [num_tokens]: block_id * block_size + offset of each token; -1: not cached
    num_decodes: int
    block_tables: Tensor  # int32 [num_seqs, max_blocks]
    seq_lens: Tensor  # int32 [num_seqs]: tokens in the cache, this step's included
    cu_seqlens_q: Tensor  # int32 [num_prefills + 1]: first query row of each prefill, counted from num_decodes
    max_seqlen_q: int  # longest prefill in this step
    outputs: OutputRows | None = None  # None: every row
    plan: AttentionPlan | None = None  # of the GPU's kernels; on a CPU only where it asks for batch invariance


class Attention:
    """Grouped-query attention: q, k and v come from one matrix, K and V are written to their pages, then read there."""

    __slots__ = ("attn_out", "decode", "head_dim", "heads", "num_heads", "prefill", "q_size", "qkv")

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, Tensor],
        layer: int,
        cos_sin_cache: Tensor | None,
        operators: Operators,
    ) -> None:
        """cos_sin_cache fp32 [max_position, rotary_dim] is shared by layers that rotate alike; None: none here."""
        prefix = f"layers.{layer}"
        self.qkv = take_linear(weights, f"{prefix}.qkv", operators)
        self.attn_out = take_linear(weights, f"{prefix}.attn_out", operators)
        self.heads = QKVHeads(
            config.num_heads,
            config.num_kv_heads,
            cos_sin_cache,
            q_norm=weights.pop(f"{prefix}.q_norm.weight", None),
            k_norm=weights.pop(f"{prefix}.k_norm.weight", None),
            norm_eps=config.norm_eps,
            norm_weight_offset=config.norm_weight_offset,
        )
        self.num_heads = config.num_heads + 2 * config.num_kv_heads
        self.head_dim = config.head_dim
        self.q_size = config.q_size
        scale = config.head_dim**-0.5 if config.attn_scale is None else config.attn_scale
        window, softcap = config.window(layer), config.attn_softcap
        self.decode = partial(paged_attention, scale=scale, sliding_window=window, softcap=softcap)
        self.prefill = partial(prefill_attention, scale=scale, sliding_window=window, softcap=softcap)

    def __call__(
        self, hidden: Tensor, metadata: BatchMetadata, kv_cache: KVCache, outputs: OutputRows | None = None
    ) -> Tensor:
        """hidden [num_tokens, hidden] -> the same shape, or [num_outputs, hidden]."""
        q = self.write(hidden, metadata, kv_cache)
        if outputs is None:
            attended = self._attend(q, *kv_cache, metadata)
        else:
            q = q.index_select(0, outputs.indices)
            attended = self.decode(q, *kv_cache, outputs.block_tables, outputs.seq_lens, plan=metadata.plan)
        return self.attn_out(attended.view(-1, self.q_size))

    def write(self, hidden: Tensor, metadata: BatchMetadata, kv_cache: KVCache) -> Tensor:
        """Write the keys and values of every row to the cache; returns q [num_tokens, num_heads, head_dim]."""
        num_tokens = hidden.shape[0]
        qkv = self.qkv(hidden).view(num_tokens, self.num_heads, self.head_dim)
        return rope_and_cache(qkv, self.heads, metadata.positions, metadata.slot_mapping, *kv_cache)

    def _attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: BatchMetadata) -> Tensor:
        """q [num_tokens, num_heads, head_dim] -> the same shape; decode rows and prefill rows have a kernel each."""
        n, tables, lengths, plan = metadata.num_decodes, metadata.block_tables, metadata.seq_lens, metadata.plan
        if n == q.shape[0]:
            return self.decode(q, k_cache, v_cache, tables, lengths, plan=plan)
        starts, longest = metadata.cu_seqlens_q, metadata.max_seqlen_q
        if n == 0:
            return self.prefill(q, k_cache, v_cache, tables, starts, lengths, longest, plan=plan)
        attended = q.new_empty(q.shape)
        self.decode(q[:n], k_cache, v_cache, tables[:n], lengths[:n], plan=plan, out=attended[:n])
        self.prefill(q[n:], k_cache, v_cache, tables[n:], starts, lengths[n:], longest, plan=plan, out=attended[n:])
        return attended
