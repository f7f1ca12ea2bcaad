"""Chooses the implementation: Triton for CUDA tensors, numba for CPU tensors, torch for the rest.

Kernel files write `from kernels.dispatch import tl, triton`. These are the real modules where kernels can run or are
compiled, and inert stand-ins elsewhere, so that a CPU process starts without Triton: a decorated kernel is then a plain
function that is never called.
"""

import os
import sys
from collections.abc import Callable
from functools import cache
from types import ModuleType, SimpleNamespace

import torch

from kernels.card import read_card

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"

# If triton is imported already, the real kernels are wanted (kernels.aot does this on a machine without a GPU).
HAS_TRITON = INTERPRET or "triton" in sys.modules or torch.cuda.is_available()

if HAS_TRITON:
    import triton
    import triton.language as tl
    from triton.runtime.errors import OutOfResources

    TRITON_VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
else:
    TRITON_VERSION = (0, 0)

    class OutOfResources(Exception):  # type: ignore[no-redef]
        """Stands in for Triton's error where no kernel is launched."""

    # works as @triton.jit and as @triton.jit(do_not_specialize=[...])
    triton = SimpleNamespace(jit=lambda fn=None, **options: fn or (lambda fn: fn))  # type: ignore[assignment]
    tl = SimpleNamespace(constexpr=None)  # type: ignore[assignment]

__all__ = [
    "HAS_TRITON",
    "INTERPRET",
    "TRITON_VERSION",
    "OutOfResources",
    "as_rows",
    "cpu_kernels",
    "record_graph",
    "row_warps",
    "tl",
    "triton",
    "use_triton",
]


def use_triton(x: torch.Tensor) -> bool:
    """True if `x` must go to a Triton kernel: a CUDA tensor, or any tensor under TRITON_INTERPRET=1."""
    return x.is_cuda or INTERPRET


def row_warps(block: int) -> int:
    """Number of warps of a program that holds a row of `block` elements in registers: 16 to 32 elements per thread."""
    return max(1, min(16, block // 512))


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """[..., n] -> [rows, n] with a dense last axis: a view if possible, else a copy."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def record_graph(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of the work, whose kernels must be compiled already. RuntimeError if the device cannot record it."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            work()
    finally:
        torch.cuda.set_stream(stream)  # a recording that fails at its end leaves its own stream current
    return graph


@cache
def cpu_kernels() -> ModuleType | None:
    """The package kernels.cpu, loaded at first use; None if numba is not installed: torch does the work then."""
    try:
        from kernels import cpu
    except ImportError:
        return None
    return cpu


def device_sizes(device: torch.device) -> tuple[int, int]:
    """(compute capability, number of SMs) of the device's Card."""
    card = read_card(device)
    return card.capability, card.num_sms
