"""Kernels for CPUs, compiled by numba and run on torch's own OpenMP threads.

Only `kernels.dispatch.cpu_kernels` imports this package, and only if numba is installed. Beside each launcher stands a
`supports_*` function: True if the compiled code covers the layout and dtype of the given tensors.
"""

from kernels.cpu import decode_rows, elementwise, program, quantize, tokens
from kernels.cpu.attention import launch as attention
from kernels.cpu.attention import tiles as attention_tiles
from kernels.cpu.features import HAS_BF16_DOT
from kernels.cpu.linear import compressed as compressed_linear
from kernels.cpu.linear import lora
from kernels.cpu.linear import panels as linear
from kernels.cpu.parallel import ParallelKernel
from kernels.cpu.quantized import code_linear, code_rows, scales
from kernels.cpu.sampling import draw, logprobs, penalties, token_mask

# The modules with kernels that this processor can run.
MODULES = [attention, decode_rows, draw, elementwise, logprobs, penalties, program, quantize, token_mask, tokens]
if HAS_BF16_DOT:
    MODULES += [attention_tiles, code_linear, code_rows, compressed_linear, linear, lora, scales]

__all__ = [
    "MODULES", "ParallelKernel", "attention", "code_linear", "code_rows", "compressed_linear", "decode_rows", "draw",
    "elementwise", "linear", "logprobs", "lora", "penalties", "program", "quantize", "scales", "token_mask", "tokens",
]  # fmt: skip
