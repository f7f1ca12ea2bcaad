"""The feed-forward part of a layer: a gated MLP (SwiGLU and relatives), a plain MLP or a mixture of experts."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.models.config import ModelConfig
from engine.models.layers.moe import MoE
from engine.models.layers.operators import (
    Linear,
    Operators,
    rounded_inputs,
    summed,
    take_gated_linear,
    take_linear,
    take_tensor,
)
from engine.models.parallel.ranks import Summed
from kernels.elementwise.activation import ACTIVATIONS, gated_activation
from kernels.elementwise.quantized_rows import gated_activation_quantized
from kernels.elementwise.xielu import coefficients, xielu
from kernels.quantized.linear import FEW_ROWS
from kernels.quantized.weight import Weight


class MLP:
    """[num_tokens, hidden] -> [num_tokens, hidden]. Gate and up projections are one matrix, [gate | up].

    activate is None if `mlp_in` computes the activation, too.
    """

    __slots__ = ("activate", "mlp_in", "mlp_out")

    def __init__(self, config: ModelConfig, weights: dict[str, Weight], prefix: str, operators: Operators) -> None:
        self.activate: Callable[[Tensor], Tensor] | None = None
        gated, name = config.gated_mlp and config.activation in ACTIVATIONS, f"{prefix}.mlp_in"
        fused = take_gated_linear(weights, name, config.activation, operators) if gated else None
        if fused is None:
            self.activate = take_activation(config, weights, prefix, operators)
        self.mlp_in: Linear = fused or take_linear(weights, name, operators)
        mlp_out = take_linear(weights, f"{prefix}.mlp_out", operators)
        self.mlp_out: Linear | Summed = mlp_out
        if gated and (to := rounded_inputs(mlp_out)) is not None:
            self.activate = partial(activate_rounded, name=config.activation, to=to)

    def __call__(self, x: Tensor) -> Tensor:
        inner = self.mlp_in(x)
        return self.mlp_out(inner if self.activate is None else self.activate(inner))


def activate_rounded(x: Tensor, name: str, to: torch.dtype) -> Any:
    """gated_activation before a linear layer whose inputs are rounded to `to`: more than FEW_ROWS rows leave it as
    QuantizedRows."""
    return gated_activation(x, name) if len(x) <= FEW_ROWS else gated_activation_quantized(x, name, to)


def take_activation(
    config: ModelConfig, weights: dict[str, Weight], prefix: str, operators: Operators
) -> Callable[[Tensor], Tensor]:
    """Make the activation of a layer, rows of mlp_in -> rows for mlp_out, and drop its learned numbers."""
    if config.activation != "xielu":
        activate, name = operators.activation(config.gated_mlp), config.activation
        return lambda x: activate(x, name)
    positive, negative = coefficients(take_tensor(weights, f"{prefix}.xielu.weight"))
    return operators.elementwise(partial(xielu, positive=positive, negative=negative))


def take_mlp(config: ModelConfig, weights: dict[str, Weight], layer: int, operators: Operators) -> MLP | MoE | Summed:
    """Make the MLP of a layer, or the mixture of experts in its place, and drop its entries from `weights`. With
    ranks, its output is the sum over them; in a parallel residual the rank's term of that sum."""
    mlp = _take_own(config, weights, layer, operators)
    if config.parallel_residual:
        return mlp
    if isinstance(mlp, MoE):
        return summed(mlp, operators)
    mlp.mlp_out = summed(mlp.mlp_out, operators)
    return mlp


def _take_own(config: ModelConfig, weights: dict[str, Weight], layer: int, operators: Operators) -> MLP | MoE:
    moe = config.experts(layer)
    if moe is None or moe.beside_mlp:
        return MLP(config, weights, f"layers.{layer}", operators)
    shared = MLP(config, weights, f"layers.{layer}.shared", operators) if moe.shared_size else None
    return MoE(moe, weights, f"layers.{layer}", config.activation, operators, shared)
