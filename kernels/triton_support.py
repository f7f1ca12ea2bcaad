"""The one place that decides whether Triton is loaded, so that a CPU process starts without it.

Kernel files write `from kernels.triton_support import tl, triton`. The names are the real modules where kernels can run
or are being compiled, and inert stand-ins elsewhere: a decorated kernel is then a plain function that nobody calls.
"""

import os
import sys
from types import SimpleNamespace

import torch

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"

# Whoever imports triton first wants the kernels themselves (kernels.aot does, on a machine without a GPU).
HAS_TRITON = INTERPRET or "triton" in sys.modules or torch.cuda.is_available()

if HAS_TRITON:
    import triton
    import triton.language as tl
else:
    triton = SimpleNamespace(jit=lambda fn: fn)  # type: ignore[assignment]
    tl = SimpleNamespace(constexpr=None)  # type: ignore[assignment]

__all__ = ["HAS_TRITON", "INTERPRET", "tl", "triton", "use_triton"]


def use_triton(x: torch.Tensor) -> bool:
    """True where `x` must go to a Triton kernel: a CUDA tensor, or any tensor under TRITON_INTERPRET=1."""
    return x.is_cuda or INTERPRET
