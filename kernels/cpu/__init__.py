"""Kernels for CPUs, compiled by numba and run on torch's own OpenMP threads.

Imported by `kernels.dispatch.cpu_kernels` only, and only where numba is installed. Each launcher here has a
`supports_*` beside it, which says whether the tensors at hand have a layout and dtype that the compiled code covers.
"""

from kernels.cpu import attention, elementwise, quantize
from kernels.cpu.parallel import ParallelKernel

__all__ = ["ParallelKernel", "attention", "elementwise", "quantize"]
