"""RMSNorm (Zhang and Sennrich, 2019), with the residual addition that precedes it in a decoder layer."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.aot_configuration import AotConfiguration, power_of_2
from kernels.dependent_launch import launch_options, pdl_constants, wait_for_inputs
from kernels.dispatch import as_rows, cpu_kernels, row_warps, tl, triton, use_triton


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, weight_offset: float = 0.0
) -> Tensor | tuple[Tensor, Tensor]:
    """Normalise the last axis of `x` [..., hidden] by its root mean square and multiply by weight_offset + weight.

    With `residual` (the shape of x): residual := x + residual comes first, and the pair (normed, residual) is returned.
    On a GPU the sum overwrites a contiguous `residual`, which is then returned; no other argument is changed.
    Statistics are fp32 whatever the dtype, and a row's result does not depend on the other rows.
    """
    if use_triton(x):
        return _launch(x, weight, eps, residual, weight_offset)
    cpu = cpu_kernels() if x.device.type == "cpu" else None
    if cpu and cpu.norms.supports_rms_norm(x, weight, residual):
        return cpu.norms.rms_norm(x, weight, eps, residual, weight_offset)
    return rms_norm_reference(x, weight, eps, residual, weight_offset)


def _launch(x, weight, eps, residual, weight_offset):
    hidden, rows = x.shape[-1], as_rows(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if residual is not None:
        residual = residual.contiguous()
    if len(rows):
        block = power_of_2(hidden)
        rms_norm_kernel[(len(rows),)](
            rows, residual, weight, out, rows.stride(0), eps,
            HIDDEN=hidden, WEIGHT_OFFSET=weight_offset, BLOCK=block, num_warps=row_warps(block),
            **launch_options(x.device),
        )  # fmt: skip
    return out if residual is None else (out, residual)


@triton.jit
def rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    x_stride_row,
    eps,
    HIDDEN: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (num_rows,): one row, held in registers between the sum and the scaling.

    Memory traffic is minimal: reads x and residual, writes residual and out; the weight comes from L2. residual_ptr
    None: no sum.
    """
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    normed = normalise_row(x_ptr, residual_ptr, weight_ptr, row, offs, x_stride_row, eps, HIDDEN, WEIGHT_OFFSET)
    tl.store(out_ptr + row * HIDDEN + offs, normed.to(out_ptr.dtype.element_ty), mask=offs < HIDDEN)


@triton.jit
def normalise_row(
    x_ptr, residual_ptr, weight_ptr, row, offs, x_stride_row, eps, HIDDEN: tl.constexpr, WEIGHT_OFFSET: tl.constexpr
):
    """Row `row` of x, with the residual added, normed and scaled: fp32 [BLOCK], 0 from HIDDEN on."""
    mask = offs < HIDDEN
    x = load_residual_row(x_ptr + row * x_stride_row + offs, residual_ptr, row * HIDDEN + offs, mask)
    weight = tl.load(weight_ptr + offs, mask=mask, other=0.0)
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / HIDDEN + eps)
    return scale_normed(normed, weight, WEIGHT_OFFSET)


@triton.jit
def load_residual_row(x_ptrs, residual_ptr, offsets, mask):
    """x in fp32; with a residual the sum x + residual, rounded as it is stored."""
    x = tl.load(x_ptrs, mask=mask, other=0.0)
    if residual_ptr is not None:
        before = tl.load(residual_ptr + offsets, mask=mask, other=0.0)
        x = (x.to(tl.float32) + before.to(tl.float32)).to(x.dtype)
        tl.store(residual_ptr + offsets, x, mask=mask)
    return x.to(tl.float32)


@triton.jit
def scale_normed(normed, weight, WEIGHT_OFFSET: tl.constexpr):
    """fp32 `normed` * (weight_offset + weight), in fp32. LLaMA rounds `normed` to the weight's dtype first, Gemma does
    not."""
    if WEIGHT_OFFSET == 0.0:
        return normed.to(weight.dtype).to(tl.float32) * weight.to(tl.float32)
    else:
        return normed * (weight.to(tl.float32) + WEIGHT_OFFSET)


def rms_norm_reference(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, weight_offset: float = 0.0
) -> Tensor | tuple[Tensor, Tensor]:
    """rms_norm in torch. LLaMA rounds before the weight; Gemma (weight_offset 1) multiplies in fp32 and rounds last."""
    if residual is not None:
        x = residual = x + residual
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    normed = (normed * (weight.float() + weight_offset)).to(x.dtype) if weight_offset else normed.to(x.dtype) * weight
    return normed if residual is None else (normed, residual)


def aot_configurations(capability: int) -> Iterator[AotConfiguration]:
    """Yields hidden sizes of today's models, one that is no power of two, and the largest size."""
    for dtype, hidden, offset, residual in (
        ("bf16", 4096, 0.0, True), ("bf16", 1024, 0.0, False), ("fp16", 5120, 0.0, True), ("bf16", 3584, 1.0, True),
        ("bf16", 16384, 0.0, True), ("fp32", 8192, 0.0, True),
    ):  # fmt: skip
        block = power_of_2(hidden)
        constants = {"HIDDEN": hidden, "WEIGHT_OFFSET": offset, "BLOCK": block} | pdl_constants(capability)
        yield AotConfiguration(
            rms_norm_kernel, f"hidden {hidden}" + " residual" * residual, dtype,
            constants if residual else constants | {"residual_ptr": None}, num_warps=row_warps(block),
            types={"eps": "fp32"}, multiples_of_16=("x_stride_row",), quick=hidden in (4096, 16384),
        )  # fmt: skip
