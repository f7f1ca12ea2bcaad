"""The decoder of every family: a ModelConfig chooses among the three layers below.

A step:

    input_ids (T) -> Embedding -> layer 0 -> ... -> layer L-1 -> final_norm -> hidden (R, C) -> lm_head -> logits (R, V)
    positions (T) ------^           |  ^                ^
                              write |  | read      from here on, R rows only: the last tokens of the sequences that the
                                    v  |           step samples (metadata.outputs); R = T where all rows are wanted
                                 KV cache

BLOOM and BERT normalise the embeddings before layer 0 (embedding_norm). engine/models/encoder.py has the attention of
encoders, which reads no cache.

A layer adds attention and MLP to a residual stream. Norms marked (g) exist only in some families; without input_norms,
a pre_norm layer has its two post norms alone:

    pre_norm                         parallel_residual                   post-norm (pre_norm is off)

    r ----+-----------------.        r ----+---------------------.       x ----+-------------.
          |                 |              |                     |             |             |
       attn_norm            |           attn_norm -------.       |         attention         |
          |                 |              |             |       |             |             |
       attention            |              |        mlp_norm (g) |            (+) <----------'
          |                 |              |             |       |             |
    attn_post_norm (g)      |          attention        mlp      |         attn_norm ---.
          |                 |              |             |       |             |        |
         (+) <--------------'              '---> (+) <---'       |            mlp       |
          |                                       |              |             |        |
          +-----------------.                    (+) <-----------'            (+) <-----'
          |                 |                     |                            |
       mlp_norm             |                     r                        mlp_norm
          |                 |                                                  |
         mlp                |                                                  x
          |                 |
    mlp_post_norm (g)       |       mlp_norm, where the family has it, reads r; else the MLP reads
          |                 |       the output of attn_norm.
         (+) <--------------'
          |
          r

The norm kernel makes the addition before it: forward_pre_norm and forward_parallel return (x, residual), and the next
norm adds x to the residual.

Letters in shapes: T tokens of the step, R rows wanted of the last layer, C hidden_size, V vocab_size. The letters of
attention stand in engine/models/layers/attention.py.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.models.config import ModelConfig
from engine.models.dense import Dense
from engine.models.layers.attention import Attention, BatchMetadata, KVCache, OutputRows
from engine.models.layers.embedding import Embedding, LMHead
from engine.models.layers.layer_inputs import LayerInputGate, LayerInputs
from engine.models.layers.mlp import MLP, take_mlp
from engine.models.layers.moe import MLPBesideExperts
from engine.models.layers.norm import norm_before, take_norm
from engine.models.layers.operators import FastOperators, Operators, take_optional
from engine.models.layers.position import PositionTables, position_tables
from engine.models.recorded_decodes import NextTokens, RecordedDecodes
from engine.models.recorded_steps import RecordedSteps
from kernels.dispatch import cpu_kernels
from kernels.elementwise.rows import add, limit, take_rows
from kernels.quantized.weight import Weight

RunLayers = Callable[[Tensor, BatchMetadata, Sequence[KVCache]], Tensor]
MakeAttention = Callable[[ModelConfig, dict[str, Weight], int, PositionTables, Operators], Any]


class DecoderLayer:
    """Attention and MLP around one residual stream.

    parallel_residual:  r += attention(norm(r)) + mlp(norm(r))
    pre_norm:           r += attention(norm(r));    r += mlp(norm(r))
    no input_norms:     r += norm(attention(r));    r += norm(mlp(r))
    neither:            x = norm(x + attention(x)); x = norm(x + mlp(x))

    config.post_norms (with pre_norm) adds a norm behind attention and one behind the MLP, before the addition. Layers
    with experts beside the MLP, with inputs by token or with a scalar (Gemma 4) run forward_extended.
    """

    __slots__ = (
        "add", "attention", "attn_norm", "attn_post_norm", "beside", "input_gate", "mlp", "mlp_norm", "mlp_post_norm",
        "scalar",
    )  # fmt: skip

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, Weight],
        layer: int,
        positions: PositionTables,
        operators: Operators,
        attention: MakeAttention,
    ) -> None:
        prefix = f"layers.{layer}"
        inputs = config.input_norms
        self.attn_norm = take_norm(config, weights, f"{prefix}.attn_norm") if inputs else None
        self.attention: Any = attention(config, weights, layer, positions, operators)
        self.mlp_norm = take_norm(config, weights, f"{prefix}.mlp_norm") if inputs and config.mlp_norm else None
        self.mlp = take_mlp(config, weights, layer, operators)
        self._fuse_scaling(config.pre_norm and not config.parallel_residual)
        post = config.post_norms
        self.attn_post_norm = take_norm(config, weights, f"{prefix}.attn_post_norm") if post else None
        self.mlp_post_norm = take_norm(config, weights, f"{prefix}.mlp_post_norm") if post else None
        ranks = operators.ranks
        self.add = add if ranks is None else lambda attended, mlp: ranks.all_reduce(add(attended, mlp))
        moe, gated = config.experts(layer), config.layer_input_size > 0
        self.beside = MLPBesideExperts(config, weights, layer, operators) if moe and moe.beside_mlp else None
        self.input_gate = LayerInputGate(config, weights, prefix, operators) if gated else None
        scalar = take_optional(weights, f"{prefix}.scalar.weight")
        self.scalar = scalar.item() if scalar is not None and scalar.device.type == "cpu" else scalar

    def _fuse_scaling(self, sequential: bool) -> None:
        """Let a norm whose output goes to one linear layer alone round it to e4m3, where that layer takes it so."""
        if not sequential or self.attn_norm is None:
            return
        self.attn_norm = norm_before(self.attention.qkv, self.attn_norm)
        if self.mlp_norm is not None and isinstance(self.mlp, MLP):
            self.mlp_norm = norm_before(self.mlp.mlp_in, self.mlp_norm)

    def forward_pre_norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        metadata: BatchMetadata,
        kv_cache: KVCache,
        outputs: OutputRows | None,
    ) -> tuple[Tensor, Tensor]:
        """x (T, C), residual (T, C) or None -> the same two, or (R, C) each with `outputs`.

        x is the term that the previous layer leaves to add to the residual; the x returned is this layer's.
        """
        assert self.attn_norm is not None
        x, residual = self.attn_norm(x, residual)  # (T, C), (T, C) -> normed sum (T, C), sum (T, C)
        x = self.attention(x, metadata, kv_cache, outputs)  # (T, C) -> (R, C)
        if self.attn_post_norm is not None:
            x, _ = self.attn_post_norm(x)  # (R, C) -> (R, C)
        if outputs is not None:
            residual = take_rows(residual, outputs.indices)  # (T, C) -> (R, C)
        assert self.mlp_norm is not None, "only a parallel residual works without mlp_norm"
        x, residual = self.mlp_norm(x, residual)  # (R, C), (R, C) -> normed sum (R, C), sum (R, C)
        x = self.mlp(x)  # (R, C) -> (R, C)
        if self.mlp_post_norm is not None:
            x, _ = self.mlp_post_norm(x)  # (R, C) -> (R, C)
        return x, residual  # (R, C), (R, C)

    def forward_extended(
        self,
        x: Tensor,
        metadata: BatchMetadata,
        kv_cache: KVCache,
        outputs: OutputRows | None,
        inputs: Tensor | None,
    ) -> Tensor:
        """forward_pre_norm with post_norms and the parts that need the whole sum. x, the residual, (T, C), and the
        layer's inputs by token (T, P) -> (T, C), or (R, C) with `outputs`."""
        assert self.attn_norm is not None and self.mlp_norm is not None
        assert self.attn_post_norm is not None and self.mlp_post_norm is not None
        attended = self.attention(self.attn_norm(x)[0], metadata, kv_cache, outputs)  # (T, C) -> (R, C)
        if outputs is not None:
            x = take_rows(x, outputs.indices)  # (T, C) -> (R, C)
        attended, _ = self.attn_post_norm(attended)  # (R, C) -> (R, C)
        hidden, residual = self.mlp_norm(attended, x)  # (R, C), (R, C) -> normed sum (R, C), sum (R, C)
        hidden = self.mlp(hidden)  # (R, C) -> (R, C)
        if self.beside is not None:
            hidden = self.beside.join(hidden, residual)  # (R, C), (R, C) -> (R, C)
        x = add(residual, self.mlp_post_norm(hidden)[0])  # (R, C) + (R, C)
        if self.input_gate is not None and inputs is not None:
            rows = inputs if outputs is None else take_rows(inputs, outputs.indices)  # (T, P) -> (R, P)
            x = add(x, self.input_gate(x, rows))  # (R, C) + (R, C)
        if isinstance(self.scalar, Tensor):
            return x * self.scalar  # (R, C)
        if self.scalar is not None:
            limit(x, self.scalar, 0.0)  # x is a new tensor
        return x  # (R, C)

    def forward_parallel(
        self,
        x: Tensor,
        residual: Tensor | None,
        metadata: BatchMetadata,
        kv_cache: KVCache,
        outputs: OutputRows | None,
    ) -> tuple[Tensor, Tensor]:
        """Arguments and result of forward_pre_norm."""
        assert self.attn_norm is not None
        x, residual = self.attn_norm(x, residual)  # (T, C), (T, C) -> normed sum (T, C), sum (T, C)
        attended = self.attention(x, metadata, kv_cache, outputs)  # (T, C) -> (R, C)
        if outputs is not None:
            x, residual = (take_rows(rows, outputs.indices) for rows in (x, residual))  # (T, C) -> (R, C) each
        if self.mlp_norm is not None:
            x, _ = self.mlp_norm(residual)  # (R, C) -> (R, C)
        return self.add(attended, self.mlp(x)), residual  # (R, C) + (R, C), (R, C)

    def forward_post_norm(
        self, x: Tensor, metadata: BatchMetadata, kv_cache: KVCache, outputs: OutputRows | None
    ) -> Tensor:
        """x (T, C) -> (T, C), or (R, C) with `outputs`."""
        residual = x if outputs is None else take_rows(x, outputs.indices)  # (T, C) -> (R, C)
        x = self.attention(x, metadata, kv_cache, outputs)  # (T, C) -> (R, C)
        assert self.attn_norm is not None and self.mlp_norm is not None
        x, _ = self.attn_norm(x, residual)  # (R, C), (R, C) -> normed sum (R, C)
        x, _ = self.mlp_norm(self.mlp(x), x)  # (R, C), (R, C) -> normed sum (R, C)
        return x

    def forward_output_norms(
        self, x: Tensor, metadata: BatchMetadata, kv_cache: KVCache, outputs: OutputRows | None
    ) -> Tensor:
        """x, the residual, (T, C) -> (T, C), or (R, C) with `outputs`."""
        assert self.attn_post_norm is not None and self.mlp_post_norm is not None
        attended, _ = self.attn_post_norm(self.attention(x, metadata, kv_cache, outputs))  # (T, C) -> (R, C)
        x = add(attended, x if outputs is None else take_rows(x, outputs.indices))  # (R, C) + (R, C)
        return add(x, self.mlp_post_norm(self.mlp(x))[0])  # (R, C) + (R, C)


class Decoder:
    """Weights on one device, and the forward pass over a batch of sequences of any lengths."""

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, Weight],
        device: torch.device,
        max_positions: int | None = None,
        operators: Operators | None = None,
        attention: MakeAttention = Attention,
    ) -> None:
        """`weights` holds the tensors of config.parameter_shapes() and is emptied, so that packed copies replace them.

        max_positions is the number of rows of tables by position, at most config.max_positions; None for the config's
        own maximum. operators: None for FastOperators. attention: the class of attention, another one in an encoder.
        """
        self.config = config
        self.operators = operators = operators or FastOperators()
        self.embedding = Embedding(config, weights, operators)
        types = take_optional(weights, "token_type_embedding.weight")
        self.token_type = None if types is None else types[0].clone()  # type 0: every sequence is a single text
        self.embedding_norm = take_norm(config, weights, "embedding_norm") if config.embedding_norm else None
        num_positions = min(config.max_positions, max_positions or config.max_position_embeddings)
        self.positions = position_tables(config, num_positions, device)
        self.layers = [
            DecoderLayer(config, weights, i, self.positions, operators, attention) for i in range(config.num_layers)
        ]
        self.layer_inputs = LayerInputs(config, weights, operators) if config.layer_input_size else None
        self.final_norm = take_norm(config, weights, "final_norm") if config.final_norm else None
        self.lm_head = LMHead(config, weights, self.embedding.weight, operators) if config.causal else None
        pre_norm = config.pre_norm and config.input_norms
        self.run_layers: RunLayers = self._run_pre_norm if pre_norm else self._run_plain  # without layer_inputs
        if config.has_extended_layers:
            self.run_layers = self._run_extended
        self.recorded: RecordedDecodes | None = None
        self.recorded_steps: RecordedSteps | None = None  # with prompts
        self.dense: Sequence[Dense] = ()  # layers behind the pooling of embeddings, on the host

    @property
    def vector_size(self) -> int:
        """Numbers in an embedding."""
        return len(self.dense[-1].weight) if self.dense else self.config.hidden_size

    def record_steps(self, kv_caches: Sequence[KVCache], max_rows: int, max_blocks: int) -> None:
        """Run steps on these caches as recorded programs, where a CPU has compiled kernels for them. max_rows: those of
        the largest step of decodes; max_blocks: the width of the widest block table. A program holds no sum over ranks.
        The programs of an earlier call go, with its caches."""
        cpu = cpu_kernels() if self.operators.ranks is None and kv_caches[0][0].device.type == "cpu" else None
        if cpu is not None and cpu.program.SUPPORTED:
            adapters = self.operators.adapters
            self.recorded = RecordedDecodes(self, kv_caches, max_rows, max_blocks, adapters)
            self.recorded_steps = RecordedSteps(self, adapters)
            if adapters is None and self.config.moe is None:  # padding would be routed to experts
                self.recorded_steps.pad(kv_caches, max_rows, max_blocks)

    def forget_recorded(self) -> None:
        """Drop the recorded programs, which own the caches that they were recorded with."""
        self.recorded = self.recorded_steps = None

    @torch.inference_mode()
    def forward(self, input_ids: Tensor, metadata: BatchMetadata, kv_caches: Sequence[KVCache]) -> Tensor:
        """input_ids int64 (T), one KV cache per layer -> normed hidden states (R, C).

        R = T without metadata.outputs; else the last layer computes the rows of metadata.outputs alone. Writes the
        step's keys and values into the caches.
        """
        hidden = None if self.recorded is None else self.recorded.forward(input_ids, metadata, kv_caches)
        if hidden is None and self.recorded_steps is not None:
            hidden = self.recorded_steps.forward(input_ids, metadata, kv_caches)
        return self._forward(input_ids, metadata, kv_caches) if hidden is None else hidden

    def decode_tokens(
        self, input_ids: Tensor, metadata: BatchMetadata, kv_caches: Sequence[KVCache], drawn: bool = False
    ) -> NextTokens | None:
        """`forward`, `compute_logits` and the sampling of a step of decodes alone in one call. None, and nothing is
        done, for a step that is not recorded. drawn: by RecordedDecodes.draw, not greedily."""
        return None if self.recorded is None else self.recorded.tokens(input_ids, metadata, kv_caches, drawn)

    def _forward(self, input_ids: Tensor, metadata: BatchMetadata, kv_caches: Sequence[KVCache]) -> Tensor:
        metadata = metadata.for_forward_pass()
        x = self.embed(input_ids, metadata.positions)  # (T), (T) -> (T, C)
        return self.run(input_ids, x, metadata, kv_caches)  # (T), (T, C) -> (R, C)

    def run(self, input_ids: Tensor, x: Tensor, metadata: BatchMetadata, kv_caches: Sequence[KVCache]) -> Tensor:
        """`forward` behind `embed`: x (T, C) -> (R, C)."""
        if self.layer_inputs is not None:
            inputs = self.layer_inputs(input_ids, x)  # (T), (T, C) -> (T, L, P)
            return self._run_extended(x, metadata, kv_caches, inputs)  # (T, C) -> (R, C)
        return self.run_layers(x, metadata, kv_caches)  # (T, C) -> (R, C)

    def embed(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """(T), (T) -> the input of layer 0 (T, C)."""
        x = self.embedding(input_ids, positions)  # (T), (T) -> (T, C)
        if self.token_type is not None:
            x = x + self.token_type  # (T, C) + (C)
        if self.embedding_norm is not None:
            x, _ = self.embedding_norm(x)  # (T, C) -> (T, C)
        return x

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden (R, C) -> logits (R, V), see LMHead."""
        assert self.lm_head is not None, "an encoder has no logits"
        return self.lm_head(hidden)  # (R, C) -> (R, V)

    def _run_pre_norm(self, x: Tensor, metadata: BatchMetadata, kv_caches: Sequence[KVCache]) -> Tensor:
        residual: Tensor | None = None
        forward = DecoderLayer.forward_parallel if self.config.parallel_residual else DecoderLayer.forward_pre_norm
        for layer, kv_cache, outputs in self._schedule(metadata, kv_caches):
            x, residual = forward(layer, x, residual, metadata, kv_cache, outputs)  # (T, C) -> (T, C); last: (R, C)
        if self.final_norm is not None:
            return self.final_norm(x, residual)[0]  # (R, C), (R, C) -> normed sum (R, C)
        return x if residual is None else add(x, residual)  # (R, C)

    def _run_plain(self, x: Tensor, metadata: BatchMetadata, kv_caches: Sequence[KVCache]) -> Tensor:
        """Layers that take and return one tensor: no norm follows their last addition, or that norm belongs to them."""
        forward = DecoderLayer.forward_output_norms if self.config.pre_norm else DecoderLayer.forward_post_norm
        for layer, kv_cache, outputs in self._schedule(metadata, kv_caches):
            x = forward(layer, x, metadata, kv_cache, outputs)  # (T, C) -> (T, C); last layer: (R, C)
        return x if self.final_norm is None else self.final_norm(x)[0]  # (R, C)

    def _run_extended(
        self, x: Tensor, metadata: BatchMetadata, kv_caches: Sequence[KVCache], inputs: Tensor | None = None
    ) -> Tensor:
        for i, (layer, kv_cache, outputs) in enumerate(self._schedule(metadata, kv_caches)):
            layer_inputs = None if inputs is None else inputs[:, i]  # (T, L, P) -> (T, P)
            x = layer.forward_extended(x, metadata, kv_cache, outputs, layer_inputs)  # (T, C) -> (T, C); last: (R, C)
        return x if self.final_norm is None else self.final_norm(x)[0]  # (R, C)

    def _schedule(
        self, metadata: BatchMetadata, kv_caches: Sequence[KVCache]
    ) -> Iterator[tuple[DecoderLayer, KVCache, OutputRows | None]]:
        """(layer, its cache, the rows wanted of it). Only the last layer may skip rows: the keys and values of each
        layer need every row of the layer before."""
        last = len(self.layers) - 1
        for i, (layer, kv_cache) in enumerate(zip(self.layers, kv_caches, strict=True)):
            yield layer, kv_cache, metadata.outputs if i == last else None
