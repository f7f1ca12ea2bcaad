"""LayerNorm (Ba et al., 2016), with the residual addition that precedes it in a decoder layer."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.aot_configuration import AotConfiguration, power_of_2
from kernels.dependent_launch import launch_options, pdl_constants, wait_for_inputs
from kernels.dispatch import as_rows, cpu_kernels, row_warps, tl, triton, use_triton
from kernels.elementwise.rms_norm import load_residual_row


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Normalise the last axis of `x` [..., hidden] to mean 0 and variance 1, then scale and shift.

    With `residual` (the shape of x): residual := x + residual comes first, and the pair (normed, residual) is returned.
    On a GPU the sum overwrites a contiguous `residual`, which is then returned; no other argument is changed.
    Statistics are fp32 whatever the dtype, and a row's result does not depend on the other rows.
    """
    if use_triton(x):
        return _launch(x, weight, bias, eps, residual)
    cpu = cpu_kernels() if x.device.type == "cpu" else None
    if cpu and cpu.norms.supports_layer_norm(x, weight, bias, residual):
        return cpu.norms.layer_norm(x, weight, bias, eps, residual)
    if residual is not None:
        x = residual = x + residual
    normed = F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return normed if residual is None else (normed, residual)


def _launch(x, weight, bias, eps, residual):
    hidden, rows = x.shape[-1], as_rows(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if residual is not None:
        residual = residual.contiguous()
    if len(rows):
        block = power_of_2(hidden)
        layer_norm_kernel[(len(rows),)](
            rows, residual, weight, bias, out, rows.stride(0), eps,
            HIDDEN=hidden, BLOCK=block, num_warps=row_warps(block), **launch_options(x.device),
        )  # fmt: skip
    return out if residual is None else (out, residual)


@triton.jit
def layer_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    x_stride_row,
    eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (num_rows,): one row, held in registers, so that the variance is computed from centred values.

    Memory traffic is minimal: reads x and residual, writes residual and out. Any of residual_ptr, weight_ptr and
    bias_ptr may be None.
    """
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    mask = offs < HIDDEN
    x = load_residual_row(x_ptr + row * x_stride_row + offs, residual_ptr, row * HIDDEN + offs, mask)
    centred = tl.where(mask, x - tl.sum(x, 0) / HIDDEN, 0.0)
    normed = centred * tl.rsqrt(tl.sum(centred * centred, 0) / HIDDEN + eps)
    if weight_ptr is not None:
        normed *= tl.load(weight_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        normed += tl.load(bias_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * HIDDEN + offs, normed.to(out_ptr.dtype.element_ty), mask=mask)


def layer_norm_reference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """layer_norm in fp32."""
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


def aot_configurations(capability: int) -> Iterator[AotConfiguration]:
    """Yields hidden sizes of today's models and the largest size. MPT's norms have no bias, OLMo's no weight either;
    the second norm of a parallel residual has no addition."""
    for dtype, hidden, bias, residual, *absent in (
        ("bf16", 4096, True, True), ("bf16", 4096, False, False), ("bf16", 2560, True, False),
        ("fp16", 5120, True, True), ("bf16", 16384, True, True), ("fp32", 8192, True, True),
        ("bf16", 4096, False, True), ("bf16", 2048, False, True, "weight_ptr"),
    ):  # fmt: skip
        block = power_of_2(hidden)
        absent += ["residual_ptr"] * (not residual) + ["bias_ptr"] * (not bias)
        yield AotConfiguration(
            layer_norm_kernel, f"hidden {hidden}" + " residual" * residual + " bias" * bias, dtype,
            {"HIDDEN": hidden, "BLOCK": block} | pdl_constants(capability) | dict.fromkeys(absent),
            num_warps=row_warps(block), types={"eps": "fp32"}, multiples_of_16=("x_stride_row",), quick=hidden == 16384,
        )  # fmt: skip
