"""Kernels for CPUs, compiled by numba and run on torch's own OpenMP threads.

Imported by `kernels.dispatch.cpu_kernels` only, and only where numba is installed. Each launcher here has a
`supports_*` beside it, which says whether the tensors at hand have a layout and dtype that the compiled code covers.
"""

from kernels.cpu import elementwise, linear, nucleus, quantize, token_mask
from kernels.cpu.attention import launch as attention
from kernels.cpu.attention import tiles as attention_tiles
from kernels.cpu.dots import HAS_BF16_DOT
from kernels.cpu.parallel import ParallelKernel

MODULES = [attention, elementwise, nucleus, quantize, token_mask]  # whose kernels this processor can run
if HAS_BF16_DOT:
    MODULES += [attention_tiles, linear]

__all__ = ["MODULES", "ParallelKernel", "attention", "elementwise", "linear", "nucleus", "quantize", "token_mask"]
