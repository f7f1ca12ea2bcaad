"""Attention over the paged KV cache, and the metadata of a batch that it needs.

    hidden (T, C)
       |
      qkv: one matrix, C -> (H + 2K) * D
       |
    (T, H + 2K, D)      q: heads 0 .. H-1        k: H .. H+K-1        v: H+K .. H+2K-1
       |
    rope_and_cache: norm q and k (QK-norm, some families), rotate q and k, then write k and v (QKVHeads has the rest)
       |                                                   |
    q (T, H, D)                                  slot_mapping (T): block * S + offset
       |                                                   v
       |      k_cache, v_cache of this layer: (N, K, S, D)      grouped-query attention: query head h
       |                                |                       reads KV head h // (H / K)
       |                                | block_tables
       |   rows of the first            v
       +--- num_decodes sequences --> decode kernel ----+       one query token each, the whole sequence as keys
       |                                                |
       +--- the other rows ---------> prefill kernel ---+       chunks of prompts: causal within the chunk, with the
                                                        |       cached tokens before it (or FlashInfer's kernels)
                                              attended (T, H, D)
                                                        |
                                     attn_out: H * D -> C, then (T, C)

If a step wants only R output rows, the last layer keeps these rows of q. Each is a decode, because all keys of its
sequence are in the cache by then, so the prefill kernel does not run.

Letters in shapes: T tokens of the step, R output rows, C hidden_size, H query heads, K KV heads, D head_dim, N blocks,
S block_size, B blocks of the longest table, Q sequences of the step, P prefills among them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.models.config import ModelConfig
from engine.models.layers.operators import Linear, Operators, summed, take_linear, take_optional
from engine.models.layers.position import PositionTables
from kernels.attention.decode import mixed_attention, paged_attention
from kernels.attention.flashinfer import PlannedPrefill
from kernels.attention.plan import AttentionPlan
from kernels.attention.prefill import prefill_attention
from kernels.attention.work import StepWork
from kernels.cache.rope_and_cache import QKVHeads, rope_and_cache
from kernels.elementwise.rows import new_rows, take_rows
from kernels.quantized.weight import Weight

Attend = Callable[..., Tensor]  # an attention operator with the options of a layer
KVCache = tuple[Tensor, Tensor]  # k_cache, v_cache of a layer: (N, K, S, D) each


@dataclass(frozen=True, slots=True)
class OutputRows:
    """The rows whose hidden states are wanted. Each is the last token of a sequence, so the last layer decodes it."""

    indices: Tensor  # int64 (R): rows among the step's tokens
    block_tables: Tensor  # int32 (R, B)
    seq_lens: Tensor  # int32 (R)


@dataclass(frozen=True, slots=True)
class BatchMetadata:
    """The places of one step's tokens in sequences and cache. An argument of the forward pass, never a global.

    The first num_decodes sequences have exactly one query token each, in rows 0 to num_decodes - 1; the rows after
    them belong to the other sequences ("prefills"), in order.

    num_decodes None: only the device knows the lengths, as in a recorded CUDA graph, and T and Q are capacities.
    cu_seqlens_q, int32 (Q + 1), then counts the rows of all sequences from 0: one row is a decode, more rows are a
    chunk, no row is padding (its seq_lens and block_tables are not read). The rows from cu_seqlens_q[Q] on are padding
    with slot -1. max_seqlen_q bounds the rows of a sequence at every replay; 0: T bounds them. Padding of `outputs` has
    seq_lens 0 and any index below T.
    """

    positions: Tensor  # int64 (T): of each token in its sequence
    slot_mapping: Tensor  # int64 (T): block_id * S + offset of each token; -1: not cached
    num_decodes: int | None
    block_tables: Tensor  # int32 (Q, B)
    seq_lens: Tensor  # int32 (Q): tokens in the cache, this step's included
    cu_seqlens_q: Tensor  # int32 (P + 1): first query row of each prefill, counted from num_decodes; or (Q + 1), above
    max_seqlen_q: int  # longest prefill in this step
    outputs: OutputRows | None = None  # None: every row
    plan: AttentionPlan | None = None  # for the GPU's kernels; on a CPU only where batch invariance is asked for
    prefill: PlannedPrefill | None = None  # FlashInfer's plan of the prefills; None: our own kernel
    work: StepWork | None = None  # made for each pass by for_forward_pass
    # int64 (2), with num_decodes None on a CPU: the step's decodes, which come first, and its sequences. A recorded
    # program reads them when it runs.
    counts: Tensor | None = None

    def for_forward_pass(self) -> "BatchMetadata":
        """The metadata with a StepWork of its own where there is a plan.

        The first layer of each kind makes the work map that all later ones read. In a recorded CUDA graph the map is
        made again at each replay, from the lengths of that time.
        """
        return self if self.plan is None else replace(self, work=StepWork())


class Attention:
    """Grouped-query attention. One matrix makes q, k and v; k and v are written to their blocks, then read there."""

    __slots__ = (
        "attn_out", "decode", "head_dim", "heads", "mixed", "num_heads", "prefill", "q_size", "qkv", "sliding_window",
    )  # fmt: skip

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, Weight],
        layer: int,
        positions: PositionTables,
        operators: Operators,
    ) -> None:
        """Take the weights of the layer. positions: the tables that all layers share."""
        prefix = f"layers.{layer}"
        heads = config.heads(layer)
        self.qkv: Any = take_linear(weights, f"{prefix}.qkv", operators)
        if layer in config.values_from_keys:
            self.qkv = ValuesFromKeys(self.qkv, heads.num_kv_heads * heads.head_dim)
        attn_out = take_linear(weights, f"{prefix}.attn_out", operators)
        # In a parallel residual the layer sums over the ranks, once for attention and MLP.
        self.attn_out = attn_out if config.parallel_residual else summed(attn_out, operators)
        self.heads = take_heads(config, weights, layer, positions)
        self.num_heads = self.heads.num_heads + 2 * self.heads.num_kv_heads
        self.head_dim = heads.head_dim
        self.q_size = config.num_heads * heads.head_dim
        self.sliding_window = config.window(layer)
        sinks = take_optional(weights, f"{prefix}.sinks.weight")
        options: dict[str, Any] = {
            "scale": config.softmax_scale,
            "alibi_slopes": positions.alibi_slopes,
            "sliding_window": self.sliding_window,
            "softcap": config.attn_softcap,
            "sinks": None if sinks is None else sinks.float(),
            "attention_chunk": config.chunk(layer),
        }
        self.decode: Attend = partial(paged_attention, **options)
        self.prefill: Attend = partial(prefill_attention, **options)
        self.mixed: Attend = partial(mixed_attention, **options)

    def __call__(
        self, hidden: Tensor, metadata: BatchMetadata, kv_cache: KVCache, outputs: OutputRows | None = None
    ) -> Tensor:
        """hidden (T, C), also QuantizedRows where qkv takes them -> (T, C), or (R, C) with `outputs`."""
        q = self.write(hidden, metadata, kv_cache)  # (T, C) -> (T, H, D)
        if outputs is None:
            attended = self._attend(q, *kv_cache, metadata)  # (T, H, D) -> (T, H, D)
        else:
            q = take_rows(q, outputs.indices)  # (T, H, D) -> (R, H, D)
            tables, lengths = outputs.block_tables, outputs.seq_lens  # (R, B), (R)
            plan, work = metadata.plan, metadata.work
            attended = self.decode(q, *kv_cache, tables, lengths, plan=plan, work=work)  # (R, H, D) -> (R, H, D)
        return self.attn_out(attended.view(-1, self.q_size))  # (R, H, D) -> (R, H * D) -> (R, C)

    def write(self, hidden: Tensor, metadata: BatchMetadata, kv_cache: KVCache) -> Tensor:
        """Write the keys and values of every row to the cache, unless another layer did; returns q. hidden (T, C) ->
        (T, H, D)."""
        num_tokens = len(hidden)
        qkv = self.qkv(hidden).view(num_tokens, self.num_heads, self.head_dim)  # (T, C) -> (T, H + 2K, D)
        return rope_and_cache(qkv, self.heads, metadata.positions, metadata.slot_mapping, *kv_cache)  # -> (T, H, D)

    def _attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: BatchMetadata) -> Tensor:
        """q (T, H, D) -> (T, H, D); decode rows and prefill rows have a kernel each."""
        n, tables, lengths = metadata.num_decodes, metadata.block_tables, metadata.seq_lens
        plan, work = metadata.plan, metadata.work
        if n == q.shape[0]:
            return self.decode(q, k_cache, v_cache, tables, lengths, plan=plan, work=work)  # (T, H, D)
        if n is None:
            return self.mixed(  # (T, H, D)
                q, k_cache, v_cache, tables, metadata.cu_seqlens_q, lengths, max_seqlen_q=metadata.max_seqlen_q,
                plan=plan, work=work, counts=metadata.counts,
            )  # fmt: skip
        if n == 0:
            return self._prefill(q, k_cache, v_cache, metadata, n)  # (T, H, D)
        attended = new_rows(q)  # (T, H, D)
        self.decode(  # (n, H, D)
            q[:n], k_cache, v_cache, tables[:n], lengths[:n], plan=plan, work=work, out=attended[:n]
        )
        self._prefill(q[n:], k_cache, v_cache, metadata, n, out=attended[n:])  # (T - n, H, D)
        return attended

    def _prefill(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: BatchMetadata, n: int, out: Tensor | None = None
    ) -> Tensor:
        """The prefills after n decodes. q (T - n, H, D) -> (T - n, H, D)."""
        if metadata.prefill is not None:
            return metadata.prefill.attend(q, k_cache, v_cache, self.sliding_window, out)
        return self.prefill(
            q, k_cache, v_cache, metadata.block_tables[n:], cu_seqlens_q=metadata.cu_seqlens_q,
            seq_lens=metadata.seq_lens[n:], max_seqlen_q=metadata.max_seqlen_q, plan=metadata.plan,
            work=metadata.work, out=out,
        )  # fmt: skip


class ValuesFromKeys:
    """A matrix of q and k alone, whose rows of k are the values, too: (T, C) -> (T, (H + 2K) * D)."""

    __slots__ = ("kv_size", "linear")

    def __init__(self, linear: Linear, kv_size: int) -> None:
        self.linear, self.kv_size = linear, kv_size

    def __call__(self, hidden: Tensor) -> Tensor:
        rows = self.linear(hidden)  # (T, C) -> (T, (H + K) * D)
        return torch.cat([rows, rows[:, -self.kv_size :]], dim=1)  # (T, (H + 2K) * D)


def take_heads(config: ModelConfig, weights: dict[str, Weight], layer: int, positions: PositionTables) -> QKVHeads:
    """The operations on q, k and v of a layer; drops their weights from `weights`."""
    own = config.kv_source(layer) == layer
    q_norm = take_optional(weights, f"layers.{layer}.q_norm.weight")
    return QKVHeads(
        config.num_heads,
        config.heads(layer).num_kv_heads if own else 0,
        positions.rotation(config, layer),
        config.rope_interleaved,
        q_norm=q_norm,
        k_norm=take_optional(weights, f"layers.{layer}.k_norm.weight") if own else q_norm,
        norm_without_weights=config.has_qk_norm(layer) and config.qk_norm_kind == "l2",
        norm_eps=config.norm_eps,
        norm_weight_offset=config.norm_weight_offset,
        norm_rows=config.qk_norm == "all",
        norm_centred=config.qk_norm_kind == "layer",
        norm_after_rope=config.qk_norm_after_rope,
        clip=config.clip_qkv,
        v_norm=config.v_norm and own,
        query_scales=positions.query_scales if config.scales_queries(layer) else None,
    )
