"""The one decoder: every family is this, with another ModelConfig."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from engine.models.config import ModelConfig
from engine.models.layers.attention import Attention, BatchMetadata, KVCache, OutputRows
from engine.models.layers.embedding import Embedding, LMHead
from engine.models.layers.mlp import take_mlp
from engine.models.layers.norm import take_norm
from engine.models.layers.operators import FastOperators, Operators
from engine.models.layers.position import cos_sin_table


class DecoderLayer:
    """Attention and MLP around one residual stream.

    parallel_residual:  residual += attention(norm(residual)) + mlp(norm(residual))
    pre_norm:           residual += attention(norm(residual));  residual += mlp(norm(residual))
    otherwise:          x = norm(x + attention(x));             x = norm(x + mlp(x))

    Post norms, beside pre_norm: what attention and MLP give is normalised once more before it is added.
    """

    __slots__ = ("attention", "attn_norm", "attn_post_norm", "mlp", "mlp_norm", "mlp_post_norm")

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, Tensor],
        layer: int,
        cos_sin_cache: Tensor | None,
        operators: Operators,
    ) -> None:
        prefix = f"layers.{layer}"
        self.attn_norm = take_norm(config, weights, f"{prefix}.attn_norm")
        self.attention = Attention(config, weights, layer, cos_sin_cache, operators)
        self.mlp_norm = take_norm(config, weights, f"{prefix}.mlp_norm") if config.mlp_norm else None
        self.mlp = take_mlp(config, weights, layer, operators)
        post = config.post_norms
        self.attn_post_norm = take_norm(config, weights, f"{prefix}.attn_post_norm") if post else None
        self.mlp_post_norm = take_norm(config, weights, f"{prefix}.mlp_post_norm") if post else None

    def forward_pre_norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        metadata: BatchMetadata,
        kv_cache: KVCache,
        outputs: OutputRows | None,
    ) -> tuple[Tensor, Tensor]:
        """x is what the previous layer adds to the residual; so is what comes back. [num_tokens, hidden] each.

        With `outputs`, what comes back has those rows only.
        """
        x, residual = self.attn_norm(x, residual)
        x = self.attention(x, metadata, kv_cache, outputs)
        if self.attn_post_norm is not None:
            x, _ = self.attn_post_norm(x)
        assert self.mlp_norm is not None, "only a parallel residual may do without"
        x, residual = self.mlp_norm(x, residual if outputs is None else residual.index_select(0, outputs.indices))
        x = self.mlp(x)
        return x if self.mlp_post_norm is None else self.mlp_post_norm(x)[0], residual

    def forward_parallel(
        self,
        x: Tensor,
        residual: Tensor | None,
        metadata: BatchMetadata,
        kv_cache: KVCache,
        outputs: OutputRows | None,
    ) -> tuple[Tensor, Tensor]:
        """As forward_pre_norm."""
        x, residual = self.attn_norm(x, residual)
        attended = self.attention(x, metadata, kv_cache, outputs)
        if outputs is not None:
            x, residual = (rows.index_select(0, outputs.indices) for rows in (x, residual))
        if self.mlp_norm is not None:
            x, _ = self.mlp_norm(residual)
        return attended + self.mlp(x), residual

    def forward_post_norm(
        self, x: Tensor, metadata: BatchMetadata, kv_cache: KVCache, outputs: OutputRows | None
    ) -> Tensor:
        """[num_tokens, hidden] -> the same shape, or [num_outputs, hidden]."""
        residual = x if outputs is None else x.index_select(0, outputs.indices)
        x, _ = self.attn_norm(self.attention(x, metadata, kv_cache, outputs), residual)
        assert self.mlp_norm is not None, "only a parallel residual may do without"
        x, _ = self.mlp_norm(self.mlp(x), x)
        return x


class Decoder:
    """Weights on one device, and the forward pass over a batch of sequences of any lengths."""

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, Tensor],
        device: torch.device,
        max_positions: int | None = None,
        operators: Operators | None = None,
    ) -> None:
        """`weights` holds the tensors of config.parameter_shapes() and is emptied, so that packed copies replace them.

        max_positions bounds the rotary table in rows, where sequences stay shorter than config's maximum; it may ask
        for up to config.max_positions.
        operators: None for the fast ones.
        """
        self.config = config
        operators = operators or FastOperators()
        self.embedding = Embedding(config, weights, operators)
        self.cos_sin_cache: Tensor | None = None
        window_cache: Tensor | None = None  # of the layers with a window, where it is another
        if config.position == "rope":
            num_positions = min(config.max_positions, max_positions or config.max_position_embeddings)
            self.cos_sin_cache = window_cache = cos_sin_table(config, num_positions, device)
            window_rope = config.window_rope()
            if window_rope is not None:
                window_cache = cos_sin_table(window_rope, num_positions, device)
        tables = [window_cache if config.window(i) else self.cos_sin_cache for i in range(config.num_layers)]
        self.layers = [
            DecoderLayer(config, weights, i, None if i in config.nope_layers else tables[i], operators)
            for i in range(config.num_layers)
        ]
        self.final_norm = take_norm(config, weights, "final_norm") if config.final_norm else None
        self.lm_head = LMHead(config, weights, self.embedding.weight, operators)
        self.run_layers = self._run_pre_norm if config.pre_norm else self._run_post_norm

    @torch.inference_mode()
    def forward(self, input_ids: Tensor, metadata: BatchMetadata, kv_caches: Sequence[KVCache]) -> Tensor:
        """input_ids int64 [num_tokens], kv_caches one per layer -> hidden states, normed.

        [num_tokens, hidden], or of metadata.outputs only: the last layer computes no others. Writes this step's keys
        and values into the caches.
        """
        return self.run_layers(self.embedding(input_ids, metadata.positions), metadata, kv_caches)

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden] -> logits [rows, vocab_size], see LMHead."""
        return self.lm_head(hidden)

    def _run_pre_norm(self, x: Tensor, metadata: BatchMetadata, kv_caches: Sequence[KVCache]) -> Tensor:
        residual: Tensor | None = None
        forward = DecoderLayer.forward_parallel if self.config.parallel_residual else DecoderLayer.forward_pre_norm
        for layer, kv_cache, outputs in self._schedule(metadata, kv_caches):
            x, residual = forward(layer, x, residual, metadata, kv_cache, outputs)
        if self.final_norm is not None:
            return self.final_norm(x, residual)[0]
        return x if residual is None else x + residual

    def _run_post_norm(self, x: Tensor, metadata: BatchMetadata, kv_caches: Sequence[KVCache]) -> Tensor:
        for layer, kv_cache, outputs in self._schedule(metadata, kv_caches):
            x = layer.forward_post_norm(x, metadata, kv_cache, outputs)
        return x if self.final_norm is None else self.final_norm(x)[0]

    def _schedule(
        self, metadata: BatchMetadata, kv_caches: Sequence[KVCache]
    ) -> Iterator[tuple[DecoderLayer, KVCache, OutputRows | None]]:
        """Each layer, its cache, and the rows wanted of it: every other layer needs all keys and values of the next."""
        last = len(self.layers) - 1
        for i, (layer, kv_cache) in enumerate(zip(self.layers, kv_caches, strict=True)):
            yield layer, kv_cache, metadata.outputs if i == last else None
