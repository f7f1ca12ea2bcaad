"""LayerNorm (Ba et al., 2016), with the residual addition that precedes it in a decoder layer."""

import torch.nn.functional as F
from torch import Tensor


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Normalise the last axis of `x` [..., hidden] to mean 0 and variance 1, then scale and shift.

    With `residual` (the shape of x): residual := x + residual comes first, and the pair (normed, residual) is returned.
    Inputs are left untouched. torch's own kernel keeps fp32 statistics and is one pass on every device.
    """
    if residual is not None:
        x = residual = x + residual
    normed = F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return normed if residual is None else (normed, residual)


def layer_norm_reference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """The same, written out in fp32."""
    if residual is not None:
        x = residual = x + residual
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    normed = centred / (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    if weight is not None:
        normed = normed * weight.float()
    if bias is not None:
        normed = normed + bias.float()
    return normed.to(x.dtype) if residual is None else (normed.to(x.dtype), residual)
