"""Inputs that each layer gets by token beside the residual, as Gemma 3n and Gemma 4 have them (transformers, gemma4).

    input_ids (T) -> embedding (T, L, P) ---------------.
    x (T, C) -----> projection (T, L, P) -> norm over P -+-> sum / sqrt(2): the inputs of all layers (T, L, P)

At the end of a layer, x += norm(out(activation(gate(x)) * input of the layer)). T tokens, L layers, C hidden_size,
P layer_input_size.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from engine.models.config import ModelConfig
from engine.models.layers.norm import RMSNorm, take_norm
from engine.models.layers.operators import Operators, take_linear, take_tensor
from kernels.elementwise.embedding import embedding
from kernels.elementwise.rows import add, limit, multiply
from kernels.quantized.weight import Weight


class LayerInputs:
    """input_ids int64 (T), embedded x (T, C) -> the inputs of all layers (T, L, P)."""

    __slots__ = ("norm", "projection", "projection_scale", "scale", "shape", "weight")

    def __init__(self, config: ModelConfig, weights: dict[str, Weight], operators: Operators) -> None:
        self.weight = take_tensor(weights, "layer_embedding.weight")
        self.projection = take_linear(weights, "layer_projection", operators)
        norm_weight = take_tensor(weights, "layer_projection_norm.weight")
        self.norm = RMSNorm(norm_weight, config.norm_eps, config.norm_weight_offset)
        self.shape = (config.num_layers, config.layer_input_size)
        # rounded to the embeddings' dtype, as in training
        self.scale = torch.tensor(config.layer_input_size**0.5).to(self.weight.dtype).item()
        self.projection_scale = config.hidden_size**-0.5

    def __call__(self, input_ids: Tensor, x: Tensor) -> Tensor:
        projected = self.projection(x)  # (T, L * P)
        limit(projected, self.projection_scale, 0.0)
        normed, _ = self.norm(projected.view(-1, *self.shape))  # (T, L, P)
        inputs = add(normed.view(len(x), -1), embedding(input_ids, self.weight, self.scale))  # (T, L * P)
        limit(inputs, math.sqrt(0.5), 0.0)
        return inputs.view(-1, *self.shape)  # (T, L, P)


class LayerInputGate:
    """x (R, C), the layer's inputs (R, P) -> the term that x gets (R, C)."""

    __slots__ = ("activate", "gate", "norm", "out")

    def __init__(self, config: ModelConfig, weights: dict[str, Weight], prefix: str, operators: Operators) -> None:
        self.gate = take_linear(weights, f"{prefix}.input_gate", operators)
        self.out = take_linear(weights, f"{prefix}.input_out", operators)
        self.norm = take_norm(config, weights, f"{prefix}.input_norm")
        self.activate: Callable[[Tensor], Tensor] = partial(_activate, operators, config.activation)

    def __call__(self, x: Tensor, inputs: Tensor) -> Tensor:
        return self.norm(self.out(multiply(self.activate(self.gate(x)), inputs)))[0]


def _activate(operators: Operators, name: str, x: Tensor) -> Tensor:
    return operators.activation(gated=False)(x, name)
