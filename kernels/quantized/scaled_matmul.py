"""Products of e4m3 weights with inputs that are rounded to e4m3, too: twice the rate of 16 bits on cards that have it.

Each row of the input gets a scale, and torch._scaled_mm (cuBLASLt) multiplies the sums by both scales. Not measured
yet.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.aot_configuration import AotConfiguration, power_of_2
from kernels.cache.quantize import encode_e4m3
from kernels.dispatch import as_rows, row_warps, tl, triton, use_triton
from kernels.quantized.weight import QuantizedWeight

CAPABILITY = 89  # the first cards that multiply e4m3
MAX_E4M3 = 448.0
TINY = 1e-12  # the smallest scale: a row of zeros
MULTIPLE = 16  # cuBLASLt takes sizes that are multiples of it


def supports_scaled_matmul(weight: QuantizedWeight, capability: int) -> bool:
    """True for an e4m3 matrix with one scale per row, on cards that multiply e4m3."""
    return (
        capability >= CAPABILITY
        and weight.codes.dtype == torch.float8_e4m3fn
        and len(weight.shape) == 2
        and weight.group_size == weight.in_features
        and weight.offsets is None
        and not any(size % MULTIPLE for size in weight.shape)
    )


class ScaledMatmul:
    """A matrix [out_features, in_features] of e4m3 codes with a scale per row."""

    def __init__(self, weight: QuantizedWeight) -> None:
        """weight: see supports_scaled_matmul."""
        self.codes = weight.codes.contiguous()
        self.scales = weight.scales.float().view(1, -1)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [num_rows, in_features] -> [num_rows, out_features] in the dtype of x, bf16 or fp16."""
        codes, scales = quantize_rows(x)
        return torch._scaled_mm(codes, self.codes.T, scales, self.scales, bias=bias, out_dtype=x.dtype)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """[num_rows, n] -> (e4m3 codes [num_rows, n], fp32 scales [num_rows, 1]); the largest number of a row becomes
    448."""
    if not use_triton(x):
        return quantize_rows_reference(x)
    x = as_rows(x)
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((len(x), 1), dtype=torch.float32, device=x.device)
    if len(x):
        block = power_of_2(x.shape[1])
        quantize_rows_kernel[(len(x),)](
            x, codes.view(torch.uint8), scales, x.shape[1], x.stride(0), BLOCK=block, num_warps=row_warps(block)
        )
    return codes, scales


def quantize_rows_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """quantize_rows in torch."""
    wide = x.float()
    scales = wide.abs().amax(-1, keepdim=True).clamp_min(TINY) / MAX_E4M3
    return (wide / scales).to(torch.float8_e4m3fn), scales


@triton.jit
def quantize_rows_kernel(x_ptr, codes_ptr, scales_ptr, n, x_stride, BLOCK: tl.constexpr):
    """Grid (num_rows,)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + columns, mask=columns < n, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 0), 1e-12) / 448.0
    tl.store(scales_ptr + row, scale)
    tl.store(codes_ptr + row * n + columns, encode_e4m3(tl.div_rn(x, scale)).to(tl.uint8), mask=columns < n)


def aot_configurations(capability: int) -> Iterator[AotConfiguration]:
    """Yields the inputs of Llama-3-8B's layers, for cards that multiply e4m3."""
    for n in (4096, 14336) if capability >= CAPABILITY else ():
        block = power_of_2(n)
        yield AotConfiguration(
            quantize_rows_kernel, f"{n}", "bf16", {"BLOCK": block}, row_warps(block),
            types={"codes_ptr": "*u8", "scales_ptr": "*fp32"}, multiples_of_16=("n", "x_stride"), quick=n == 4096,
        )  # fmt: skip
