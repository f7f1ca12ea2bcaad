"""Token embedding, learned positions, and the lm_head, which may share the embedding's weight."""

from functools import partial

import torch
from torch import Tensor

from engine.models.config import ModelConfig
from engine.models.layers.operators import Linear, Operators, take_linear, take_optional, with_adapters
from engine.models.parallel.ranks import GatheredColumns, VocabularyRows
from kernels.elementwise.embedding import embedding
from kernels.elementwise.rows import limit
from kernels.quantized.linear import QuantizedLinear
from kernels.quantized.weight import Weight


class Embedding:
    """input_ids, positions int64 [num_tokens] -> [num_tokens, hidden]."""

    __slots__ = ("is_plain", "position_offset", "position_weight", "project_in", "rows", "scale", "weight")

    def __init__(self, config: ModelConfig, weights: dict[str, Weight], operators: Operators) -> None:
        weight = weights.pop("embedding.weight")
        assert not isinstance(weight, tuple), "an embedding is one tensor"
        self.weight = table = weight if isinstance(weight, Tensor) else QuantizedLinear(weight, None, operators.dtype)
        look_up = partial(embedding, weight=table) if isinstance(table, Tensor) else table.rows
        ranks = operators.ranks
        self.rows = look_up if ranks is None else VocabularyRows(look_up, config.vocab_part, ranks)
        self.scale = config.embedding_scale
        if config.round_embedding_scale:  # in bf16 sqrt(3072) is 55.5
            self.scale = torch.tensor(self.scale).to(self.weight.dtype).item()
        self.position_weight = take_optional(weights, "position_embedding.weight")
        self.position_offset = config.position_offset
        has_projection = "project_in.weight" in weights
        self.project_in = take_linear(weights, "project_in", operators) if has_projection else None
        self.is_plain = isinstance(table, Tensor) and ranks is None and not has_projection

    def __call__(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        if self.is_plain and isinstance(self.weight, Tensor):
            return embedding(input_ids, self.weight, self.scale, positions, self.position_weight, self.position_offset)
        hidden = self.rows(input_ids)
        if self.scale != 1.0:
            hidden = hidden * self.scale
        if self.project_in is not None:
            hidden = self.project_in(hidden)
        if self.position_weight is not None:
            hidden = hidden + embedding(positions + self.position_offset, self.position_weight)
        return hidden


class LMHead:
    """[rows, hidden] -> logits [rows, vocab_size]. A tied head packs its own copy of the embedding's weight; if that is
    quantised, the two share it.

    Logits are in the model's dtype: the sampler widens them.
    """

    __slots__ = ("linear", "project_out", "scale", "softcap")

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, Weight],
        embedding_weight: Tensor | QuantizedLinear,
        operators: Operators,
    ) -> None:
        has_projection = "project_out.weight" in weights
        self.project_out = take_linear(weights, "project_out", operators) if has_projection else None
        self.scale, self.softcap = config.logits_scale, config.logit_softcap
        bias = take_optional(weights, "lm_head.bias")
        self.linear: Linear | GatheredColumns
        if not config.tie_embeddings:
            self.linear = operators.linear(weights.pop("lm_head.weight"), bias)
        elif isinstance(embedding_weight, QuantizedLinear):
            self.linear = operators.note(embedding_weight.with_bias(bias))
        else:
            self.linear = operators.linear(embedding_weight, bias)
        self.linear = with_adapters(self.linear, "lm_head", operators)
        if operators.ranks is not None:
            self.linear = GatheredColumns(self.linear, config.vocab_size, operators.ranks)

    def __call__(self, hidden: Tensor) -> Tensor:
        if self.project_out is not None:
            hidden = self.project_out(hidden)
        logits = self.linear(hidden)
        limit(logits, self.scale, self.softcap)
        return logits
