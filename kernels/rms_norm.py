"""RMSNorm (Zhang and Sennrich, 2019), with the residual addition that precedes it in a decoder layer."""

import torch
from torch import Tensor

from kernels.dispatch import cpu_kernels


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, weight_offset: float = 0.0
) -> Tensor | tuple[Tensor, Tensor]:
    """Normalise the last axis of `x` [..., hidden] by its root mean square and multiply by weight_offset + weight.

    With `residual` (the shape of x): residual := x + residual comes first, and the pair (normed, residual) is returned.
    Inputs are left untouched. Statistics are fp32 whatever the dtype.
    """
    cpu = cpu_kernels() if x.device.type == "cpu" else None
    if cpu and cpu.elementwise.supports_rms_norm(x, weight, residual):
        return cpu.elementwise.rms_norm(x, weight, eps, residual, weight_offset)
    return rms_norm_reference(x, weight, eps, residual, weight_offset)


def rms_norm_reference(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, weight_offset: float = 0.0
) -> Tensor | tuple[Tensor, Tensor]:
    """The same in torch. LLaMA rounds before the weight; Gemma (weight_offset 1) multiplies in fp32 and rounds last."""
    if residual is not None:
        x = residual = x + residual
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    normed = (normed * (weight.float() + weight_offset)).to(x.dtype) if weight_offset else normed.to(x.dtype) * weight
    return normed if residual is None else (normed, residual)
