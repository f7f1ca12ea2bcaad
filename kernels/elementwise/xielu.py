"""xIELU: an activation with two learned numbers a layer (Huang and Schlag 2024, section 3).

positive * x^2 + beta * x                  for x > 0
negative * (exp(x) - 1 - x) + beta * x     for the others
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.aot_configuration import AotConfiguration, power_of_2
from kernels.dependent_launch import launch_options, pdl_constants, wait_for_inputs
from kernels.dispatch import as_rows, cpu_kernels, tl, triton, use_triton

BETA = 0.5  # slope at 0
MAX_BLOCK = 1024  # elements per program, see kernels/elementwise/activation.py


def coefficients(parameters: Tensor) -> tuple[float, float]:
    """alpha_p and alpha_n of a checkpoint [2] -> (positive, negative), computed in the checkpoint's dtype."""
    positive, negative = F.softplus(parameters).tolist()
    return positive, torch.tensor(BETA + negative, dtype=parameters.dtype).item()


def xielu(x: Tensor, positive: float, negative: float) -> Tensor:
    """Apply xIELU to every element of x [num_tokens, size], whose rows may have gaps between them."""
    if use_triton(x):
        return _launch(x, positive, negative)
    cpu = cpu_kernels() if x.device.type == "cpu" else None
    if cpu and cpu.activations.supports_rows(x):
        return cpu.activations.xielu(x, positive, negative, BETA)  # type: ignore[no-any-return]
    return xielu_reference(x, positive, negative)


def xielu_reference(x: Tensor, positive: float, negative: float) -> Tensor:
    """xielu in fp32, rounded once."""
    wide = x.float()
    curve = torch.where(wide > 0, positive * wide * wide, negative * (torch.expm1(wide.clamp(max=0)) - wide))
    return (curve + BETA * wide).to(x.dtype)


def _launch(x: Tensor, positive: float, negative: float) -> Tensor:
    x = as_rows(x)
    num_tokens, size = x.shape
    out = torch.empty((num_tokens, size), dtype=x.dtype, device=x.device)
    if out.numel():
        block = min(MAX_BLOCK, power_of_2(size))
        xielu_kernel[(num_tokens, -(-size // block))](
            x, out, x.stride(0), positive, negative, SIZE=size, BETA=BETA, BLOCK=block, num_warps=4,
            **launch_options(x.device),
        )  # fmt: skip
    return out


@triton.jit
def xielu_kernel(
    x_ptr,
    out_ptr,
    x_stride_row,
    positive,
    negative,
    SIZE: tl.constexpr,
    BETA: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (num_tokens, ceil(SIZE / BLOCK)): computes a part of one row in fp32, rounded once. Moves 2 SIZE elements a
    row."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < SIZE
    x = tl.load(x_ptr + row * x_stride_row + offs, mask=mask, other=0.0).to(tl.float32)
    # exp(x) - 1 - x loses its digits near 0, so a series replaces it there (next term: 2e-8 of the sum).
    low = tl.minimum(x, 0.0)
    series = low * low * (0.5 + low * (1 / 6 + low * (1 / 24 + low * (1 / 120 + low * (1 / 720)))))
    below = tl.where(low > -0.25, series, tl.exp(low) - 1.0 - low)
    result = tl.where(x > 0, positive * x * x, negative * below) + BETA * x
    tl.store(out_ptr + row * SIZE + offs, result.to(out_ptr.dtype.element_ty), mask=mask)


def aot_configurations(capability: int) -> Iterator[AotConfiguration]:
    """Yields the dtypes."""
    for dtype in ("bf16", "fp16", "fp32"):
        yield AotConfiguration(
            xielu_kernel, "21504", dtype,
            {"SIZE": 21504, "BETA": BETA, "BLOCK": MAX_BLOCK} | pdl_constants(capability), num_warps=4,
            types={"positive": "fp32", "negative": "fp32"}, multiples_of_16=("x_stride_row",), quick=dtype == "bf16",
        )  # fmt: skip
