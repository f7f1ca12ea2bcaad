"""Encoders: the layers of the decoder over whole sequences, in which each token attends to later tokens, too.

They are BERT and its relatives, and decoders that were trained on to embed (EmbeddingGemma, gte-Qwen2). Sequences of
any lengths are packed one after the other, so linear layers and norms compute no padding. Attention on a CPU needs none
either: it reads keys and values from blocks, like a decoder's. Torch's attention, for all else, needs rectangles:
sequences of equal or nearly equal length share one.

Letters in shapes: T tokens of the step, C hidden_size, H query heads, K KV heads, D head_dim.
"""

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.layers.attention import BatchMetadata, KVCache, take_heads
from engine.models.layers.operators import Operators, take_linear
from engine.models.layers.position import PositionTables
from kernels.attention.whole import BLOCK_SIZE, supports_whole_attention, whole_attention
from kernels.cache.rope_and_cache import rope_and_cache
from kernels.card import read_card
from kernels.quantized.weight import Weight

FLASH_CAPABILITY, MAX_FLASH_HEAD_DIM = 80, 256  # the oldest card and largest head of torch's flash attention


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Sequences in rows `start` to `end` that attend together, as a rectangle of num_seqs x length tokens.

    If the sequences differ in length: `rows` int64 [num_seqs * length] is the row at each place of the rectangle
    (padding repeats some row), `mask` bool [num_seqs, 1, 1, length] is True at places that count, and `places` int64
    [end - start] is the place of each row.
    """

    start: int
    end: int
    num_seqs: int
    length: int
    rows: Tensor | None = None
    mask: Tensor | None = None
    places: Tensor | None = None


@dataclass(frozen=True, slots=True)
class SequenceBlocks:
    """Places of the sequences of a step in a cache of num_blocks blocks, which holds one layer's keys and values.

    slots int64 [num_tokens]: the place of each token. block_tables int32 [num_seqs, max_blocks], starts int32
    [num_seqs + 1] and lengths int32 [num_seqs]: see whole_attention.
    """

    num_blocks: int
    slots: Tensor
    block_tables: Tensor
    starts: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, lengths: np.ndarray) -> "SequenceBlocks":
        """Blocks one after the other for sequences of these lengths, int64 [num_seqs], on the CPU."""
        counts = -(-lengths // BLOCK_SIZE)
        first = np.cumsum(counts) - counts
        starts = np.concatenate([[0], np.cumsum(lengths)])
        slots = np.arange(starts[-1]) + np.repeat(first * BLOCK_SIZE - starts[:-1], lengths)
        tables = first[:, None] + np.arange(counts.max())  # entries behind a sequence's own are not read
        integers = (torch.from_numpy(array.astype(np.int32)) for array in (tables, starts, lengths))
        return cls(int(counts.sum()), torch.from_numpy(slots), *integers)


@dataclass(frozen=True, slots=True)
class EncoderBatch:
    """Whole sequences, one after the other. positions int64 [num_tokens], from 0 in each. Attention goes by `blocks`,
    or by `groups` if there are none."""

    positions: Tensor
    groups: list[AttentionGroup]
    blocks: SequenceBlocks | None = None
    outputs: None = None  # every row is wanted


class EncoderAttention:
    """Attention of each token to its whole sequence or, in a layer with a window, to the tokens that are nearer than
    the window on both sides. One matrix makes q, k and v."""

    __slots__ = ("attn_out", "head_dim", "heads", "qkv", "scale", "window")

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
        self.qkv = take_linear(weights, f"{prefix}.qkv", operators)
        self.attn_out = take_linear(weights, f"{prefix}.attn_out", operators)
        self.heads = take_heads(config, weights, layer, positions)
        self.head_dim = config.heads(layer).head_dim
        self.scale = config.softmax_scale
        self.window = config.window(layer)

    def __call__(
        self, hidden: Tensor, batch: EncoderBatch, kv_cache: KVCache | None = None, outputs: None = None
    ) -> Tensor:
        """hidden (T, C) -> (T, C)"""
        num_heads, num_kv_heads = self.heads.num_heads, self.heads.num_kv_heads
        qkv = self.qkv(hidden).view(len(hidden), num_heads + 2 * num_kv_heads, self.head_dim)  # (T, H + 2K, D)
        if batch.blocks is not None:
            return self.attn_out(self._attend_in_blocks(qkv, batch.positions, batch.blocks))
        if self.heads.change_rows:
            q, k, v = self._turn(qkv, batch.positions)
        else:
            q, k, v = torch.split(qkv, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        attended = [self._attend(q, k, v, group) for group in batch.groups]
        return self.attn_out(attended[0] if len(attended) == 1 else torch.cat(attended))

    def _write(self, qkv: Tensor, positions: Tensor, slots: Tensor, num_blocks: int) -> tuple[Tensor, Tensor]:
        """Norm and rotate q and k; write k and v to a new cache. qkv (T, H + 2K, D) -> q (T, H, D), caches
        (2, num_blocks, K, BLOCK_SIZE, D)"""
        caches = qkv.new_empty(2, num_blocks, self.heads.num_kv_heads, BLOCK_SIZE, self.head_dim)
        return rope_and_cache(qkv, self.heads, positions, slots, caches[0], caches[1]), caches

    def _attend_in_blocks(self, qkv: Tensor, positions: Tensor, blocks: SequenceBlocks) -> Tensor:
        """(T, H + 2K, D) -> (T, H * D)"""
        q, caches = self._write(qkv, positions, blocks.slots, blocks.num_blocks)
        attended = whole_attention(  # (T, H, D)
            q, caches[0], caches[1], blocks.block_tables, blocks.starts, blocks.lengths, self.scale,
            sliding_window=self.window,
        )  # fmt: skip
        return attended.view(len(q), -1)

    def _turn(self, qkv: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Norm and rotate q and k. (T, H + 2K, D) -> (T, H, D), (T, K, D), (T, K, D)

        The operators for that write keys and values to a KV cache: here to one of this step's tokens, in order.
        """
        num_tokens = len(qkv)
        slots = torch.arange(num_tokens, device=qkv.device)
        q, caches = self._write(qkv, positions, slots, -(-num_tokens // BLOCK_SIZE))
        k, v = caches.transpose(2, 3).reshape(2, -1, self.heads.num_kv_heads, self.head_dim)[:, :num_tokens]
        return q, k, v

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, group: AttentionGroup) -> Tensor:
        """(T, H, D), (T, K, D), (T, K, D) -> (end - start, H * D)"""
        q, k, v = (_rectangle(x, group) for x in (q, k, v))  # (num_seqs, H or K, length, D)
        mask = self._mask(group, q.device)
        if q.shape[1] != k.shape[1] and not takes_groups(q, mask):
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))  # (num_seqs, H, length, D)
        attended = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        rows = attended.transpose(1, 2).reshape(group.num_seqs * group.length, -1)
        return rows if group.places is None else rows.index_select(0, group.places)

    def _mask(self, group: AttentionGroup, device: torch.device) -> Tensor | None:
        """bool, broadcast to (num_seqs, H, length, length): the keys of each query; None: all."""
        if not self.window or group.length <= self.window:
            return group.mask
        places = torch.arange(group.length, device=device)
        near = (places[:, None] - places).abs() < self.window
        return near if group.mask is None else near & group.mask


def takes_groups(q: Tensor, mask: Tensor | None) -> bool:
    """True if torch's attention reads grouped KV heads without making a matrix of all scores in fp32. q: (num_seqs, H,
    length, D).

    On a GPU only its flash attention does, which takes no mask. With a mask, torch would make that matrix, without a
    warning: 22 GB for two texts of 10,000 tokens and 28 heads.
    """
    if not q.is_cuda:
        return True
    computes = q.dtype != torch.float32 and read_card(q.device).capability >= FLASH_CAPABILITY
    return mask is None and computes and q.shape[-1] <= MAX_FLASH_HEAD_DIM


def _rectangle(x: Tensor, group: AttentionGroup) -> Tensor:
    """The rows of a group, (T, heads, D) -> (num_seqs, heads, length, D)."""
    rows = x[group.start : group.end] if group.rows is None else x.index_select(0, group.rows)
    return rows.view(group.num_seqs, group.length, *x.shape[1:]).transpose(1, 2)


class Encoder:
    """Weights on one device, and the forward pass over a batch of whole sequences of any lengths."""

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, Weight],
        device: torch.device,
        max_positions: int | None,
        operators: Operators,
    ) -> None:
        """Arguments as of Decoder."""
        self.config = config
        self.decoder = Decoder(config, weights, device, max_positions, operators, attention=EncoderAttention)
        head_sizes = {config.heads(layer).head_dim for layer in range(config.num_layers)}
        # Attention reads a batch's SequenceBlocks; else it needs its groups.
        self.attends_in_blocks = all(supports_whole_attention(device, operators.dtype, size) for size in head_sizes)

    @torch.inference_mode()
    def forward(self, input_ids: Tensor, batch: EncoderBatch) -> Tensor:
        """input_ids int64 (T) -> hidden states of the last layer, behind the last norm if there is one, (T, C)."""
        decoder = self.decoder
        metadata = cast(BatchMetadata, batch)  # attention alone reads more of it than `outputs`
        no_caches = cast(list[KVCache], [None] * self.config.num_layers)
        return decoder.run(input_ids, decoder.embed(input_ids, batch.positions), metadata, no_caches)
