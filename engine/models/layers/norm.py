"""RMSNorm and LayerNorm, fused with the residual addition before them."""

from typing import Any

import torch
from torch import Tensor

from engine.models.config import ModelConfig
from engine.models.layers.operators import Linear, rounded_inputs, take_optional, take_tensor
from kernels.elementwise.layer_norm import layer_norm
from kernels.elementwise.quantized_rows import rms_norm_quantized
from kernels.elementwise.rms_norm import rms_norm
from kernels.quantized.linear import FEW_ROWS
from kernels.quantized.weight import Weight


class RMSNorm:
    """[..., size] -> (normed, residual). With a residual: residual := x + residual, then its norm; without: of x."""

    __slots__ = ("eps", "weight", "weight_offset")

    def __init__(self, weight: Tensor, eps: float, weight_offset: float) -> None:
        self.weight = weight
        self.eps = eps
        self.weight_offset = weight_offset

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if residual is None:
            alone: Any = rms_norm(x, self.weight, self.eps, None, self.weight_offset)
            return alone, x
        both: Any = rms_norm(x, self.weight, self.eps, residual, self.weight_offset)
        return both[0], both[1]


class LayerNorm:
    """LayerNorm with or without weight and bias; arguments and result of RMSNorm."""

    __slots__ = ("bias", "eps", "weight")

    def __init__(self, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
        self.weight = weight
        self.bias = bias
        self.eps = eps

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if residual is None:
            alone: Any = layer_norm(x, self.weight, self.bias, self.eps)
            return alone, x
        both: Any = layer_norm(x, self.weight, self.bias, self.eps, residual)
        return both[0], both[1]


class RoundedRMSNorm:
    """An RMSNorm before a linear layer whose inputs are rounded to `to`: more than FEW_ROWS rows leave it so."""

    __slots__ = ("norm", "to")

    def __init__(self, norm: RMSNorm, to: torch.dtype) -> None:
        self.norm, self.to = norm, to

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Any, Tensor]:
        """RMSNorm's arguments and result; the normed rows are a Tensor or QuantizedRows."""
        norm = self.norm
        if len(x) <= FEW_ROWS:
            return norm(x, residual)
        return rms_norm_quantized(x, norm.weight, norm.eps, self.to, residual, norm.weight_offset)


Norm = RMSNorm | LayerNorm | RoundedRMSNorm


def norm_before(linear: Linear, norm: Norm) -> Norm:
    """The norm as it feeds the linear layer alone."""
    to = rounded_inputs(linear)
    return RoundedRMSNorm(norm, to) if isinstance(norm, RMSNorm) and to is not None else norm


def take_norm(config: ModelConfig, weights: dict[str, Weight], name: str) -> Norm:
    """Make the norm called `name` and drop its entries from `weights`."""
    if config.norm == "rms":
        return RMSNorm(take_tensor(weights, f"{name}.weight"), config.norm_eps, config.norm_weight_offset)
    weight, bias = take_optional(weights, f"{name}.weight"), take_optional(weights, f"{name}.bias")
    if config.norm_weight_offset and weight is not None:  # in the weight's dtype, as in Nemotron
        weight = weight + config.norm_weight_offset
    return LayerNorm(weight, bias, config.norm_eps)
