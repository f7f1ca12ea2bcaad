"""The encoder of BERT and its relatives: every token attends to all tokens of its sequence.

Sequences of any lengths are packed one after the other, so linear layers and norms compute no padding. Attention needs
rectangles: sequences of equal or nearly equal length share a rectangle.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models.config import ModelConfig
from engine.models.layers.embedding import Embedding
from engine.models.layers.mlp import take_mlp
from engine.models.layers.norm import take_norm
from engine.models.layers.operators import Operators, take_linear, take_optional
from kernels.quantized.weight import Weight


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
class EncoderBatch:
    """Whole sequences, one after the other. positions int64 [num_tokens], from 0 in each."""

    positions: Tensor
    groups: list[AttentionGroup]


class EncoderAttention:
    """Attention of each token to its whole sequence; one matrix makes q, k and v."""

    __slots__ = ("attn_out", "head_dim", "num_heads", "qkv", "scale")

    def __init__(self, config: ModelConfig, weights: dict[str, Weight], prefix: str, operators: Operators) -> None:
        self.qkv = take_linear(weights, f"{prefix}.qkv", operators)
        self.attn_out = take_linear(weights, f"{prefix}.attn_out", operators)
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.scale = config.softmax_scale

    def __call__(self, hidden: Tensor, batch: EncoderBatch) -> Tensor:
        """[num_tokens, hidden] -> the same shape."""
        qkv = self.qkv(hidden)
        attended = [self._attend(qkv, group) for group in batch.groups]
        return self.attn_out(attended[0] if len(attended) == 1 else torch.cat(attended))

    def _attend(self, qkv: Tensor, group: AttentionGroup) -> Tensor:
        """qkv [num_tokens, 3 * num_heads * head_dim] -> [end - start, num_heads * head_dim]"""
        x = qkv[group.start : group.end] if group.rows is None else qkv.index_select(0, group.rows)
        # [3, num_seqs, num_heads, length, head_dim]
        x = x.view(group.num_seqs, group.length, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(x[0], x[1], x[2], attn_mask=group.mask, scale=self.scale)
        rows = attended.transpose(1, 2).reshape(group.num_seqs * group.length, self.num_heads * self.head_dim)
        return rows if group.places is None else rows.index_select(0, group.places)


class EncoderLayer:
    """x = norm(x + attention(x)); x = norm(x + mlp(x))"""

    __slots__ = ("attention", "attn_norm", "mlp", "mlp_norm")

    def __init__(self, config: ModelConfig, weights: dict[str, Weight], layer: int, operators: Operators) -> None:
        prefix = f"layers.{layer}"
        self.attn_norm = take_norm(config, weights, f"{prefix}.attn_norm")
        self.attention = EncoderAttention(config, weights, prefix, operators)
        self.mlp_norm = take_norm(config, weights, f"{prefix}.mlp_norm")
        self.mlp = take_mlp(config, weights, layer, operators)

    def __call__(self, x: Tensor, batch: EncoderBatch) -> Tensor:
        x, _ = self.attn_norm(self.attention(x, batch), x)
        x, _ = self.mlp_norm(self.mlp(x), x)
        return x


class Encoder:
    """Weights on one device, and the forward pass over a batch of whole sequences of any lengths."""

    def __init__(self, config: ModelConfig, weights: dict[str, Weight], operators: Operators) -> None:
        """`weights` holds the tensors of config.parameter_shapes() and is emptied: packed copies replace them."""
        self.config = config
        self.embedding = Embedding(config, weights, operators)
        types = take_optional(weights, "token_type_embedding.weight")
        self.token_type = None if types is None else types[0].clone()  # type 0: every sequence is a single text
        self.embedding_norm = take_norm(config, weights, "embedding_norm")
        self.layers = [EncoderLayer(config, weights, layer, operators) for layer in range(config.num_layers)]

    @torch.inference_mode()
    def forward(self, input_ids: Tensor, batch: EncoderBatch) -> Tensor:
        """input_ids int64 [num_tokens] -> hidden states of the last layer [num_tokens, hidden]."""
        x = self.embedding(input_ids, batch.positions)
        if self.token_type is not None:
            x = x + self.token_type
        x, _ = self.embedding_norm(x)
        for layer in self.layers:
            x = layer(x, batch)
        return x
