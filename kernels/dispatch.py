"""Which implementation runs: Triton for CUDA tensors, numba for CPU tensors, torch for what neither covers.

Kernel files write `from kernels.dispatch import tl, triton`. The names are the real modules where kernels can run or
are being compiled, and inert stand-ins elsewhere, so that a CPU process starts without Triton: a decorated kernel is
then a plain function that nobody calls.
"""

import os
import sys
from functools import cache
from types import ModuleType, SimpleNamespace

import torch

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"

# Whoever imports triton first wants the kernels themselves (kernels.aot does, on a machine without a GPU).
HAS_TRITON = INTERPRET or "triton" in sys.modules or torch.cuda.is_available()

if HAS_TRITON:
    import triton
    import triton.language as tl
else:
    # with and without options: @triton.jit and @triton.jit(do_not_specialize=[...])
    triton = SimpleNamespace(jit=lambda fn=None, **options: fn or (lambda fn: fn))  # type: ignore[assignment]
    tl = SimpleNamespace(constexpr=None)  # type: ignore[assignment]

__all__ = [
    "HAS_TRITON",
    "INTERPRET",
    "as_rows",
    "cpu_kernels",
    "row_warps",
    "tl",
    "triton",
    "use_triton",
]


def use_triton(x: torch.Tensor) -> bool:
    """True where `x` must go to a Triton kernel: a CUDA tensor, or any tensor under TRITON_INTERPRET=1."""
    return x.is_cuda or INTERPRET


def row_warps(block: int) -> int:
    """Warps for a program that holds one row of `block` elements in registers: 16 to 32 elements per thread."""
    return max(1, min(16, block // 512))


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """[..., n] -> [rows, n] whose last axis has no gaps: a view where that is possible, else a copy."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


@cache
def cpu_kernels() -> ModuleType | None:
    """The package kernels.cpu, loaded at first use; None where numba is not installed (torch does the work then)."""
    try:
        from kernels import cpu
    except ImportError:
        return None
    return cpu


@cache
def device_sizes(device: torch.device) -> tuple[int, int]:
    """(compute capability, number of SMs). The interpreter counts as a small sm_80, so that its tests see both one
    split and several."""
    if device.type != "cuda":
        return 80, 8
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor, torch.cuda.get_device_properties(device).multi_processor_count
