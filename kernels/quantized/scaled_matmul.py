"""Products of e4m3 weights with inputs that are rounded to e4m3, too: twice the rate of 16 bits on cards that have it.

Each row of the input has a scale (kernels/elementwise/fp8_rows.py), and torch._scaled_mm (cuBLASLt) multiplies the sums
by both scales. Not measured yet.
"""

import torch
from torch import Tensor

from kernels.card import E4M3_CAPABILITY
from kernels.dispatch import device_sizes
from kernels.elementwise.fp8_rows import Fp8Rows, quantize_rows
from kernels.quantized.weight import QuantizedWeight

MULTIPLE = 16  # cuBLASLt takes sizes that are multiples of it


def multiplies_e4m3(device: torch.device) -> bool:
    """True for a GPU with matrix instructions for e4m3."""
    return device.type == "cuda" and device_sizes(device)[0] >= E4M3_CAPABILITY


def supports_scaled_matmul(weight: QuantizedWeight) -> bool:
    """True for an e4m3 matrix with one scale per row."""
    return (
        weight.codes.dtype == torch.float8_e4m3fn
        and len(weight.shape) == 2
        and weight.group_size == weight.in_features
        and weight.offsets is None
        and weight.permutation is None
        and not any(size % MULTIPLE for size in weight.shape)
    )


class ScaledMatmul:
    """A matrix [out_features, in_features] of e4m3 codes with a scale per row."""

    def __init__(self, weight: QuantizedWeight) -> None:
        """weight: see supports_scaled_matmul."""
        self.codes = weight.codes.contiguous()
        self.scales = weight.scales.float().view(1, -1)

    def __call__(self, x: Tensor | Fp8Rows, bias: Tensor | None) -> Tensor:
        """x [num_rows, in_features] in bf16 or fp16, or rounded from it -> [num_rows, out_features] in that dtype."""
        rows = x if isinstance(x, Fp8Rows) else quantize_rows(x)
        return torch._scaled_mm(rows.codes, self.codes.T, rows.scales, self.scales, bias=bias, out_dtype=rows.dtype)
