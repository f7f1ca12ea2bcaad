"""Kernels for CPUs, compiled by numba and run on torch's own OpenMP threads.

Only `kernels.dispatch.cpu_kernels` imports this package, and only if numba is installed. Beside each launcher stands a
`supports_*` function: True if the compiled code covers the layout and dtype of the given tensors.
"""

from kernels.cpu import decode_rows, features, parallel, program, quantize, tokens
from kernels.cpu.attention import bf16_pairs as attention_pairs
from kernels.cpu.attention import launch as attention
from kernels.cpu.attention import tiles as attention_tiles
from kernels.cpu.elementwise import activations, norms, positions, rows
from kernels.cpu.experts import packed as experts
from kernels.cpu.experts import pairs, routing
from kernels.cpu.linear import compressed as compressed_linear
from kernels.cpu.linear import floats as float_linear
from kernels.cpu.linear import lora
from kernels.cpu.linear import panels as linear
from kernels.cpu.parallel import ParallelKernel
from kernels.cpu.quantized import code_floats, code_linear, code_rows, integer_linear, scales, w8a8
from kernels.cpu.sampling import draw, logprobs, penalties, token_mask

# The modules with kernels that this processor can run.
MODULES = [
    activations, attention, decode_rows, draw, logprobs, norms, penalties, positions, program, quantize, routing, rows,
    token_mask, tokens,
]  # fmt: skip
if features.MULTIPLIES_PAIRS:
    MODULES += [
        attention_tiles, code_floats, code_linear, code_rows, compressed_linear, float_linear, integer_linear, linear,
        lora, pairs, scales,
    ]  # fmt: skip
if features.HAS_BF16_DOT:
    MODULES.append(attention_pairs)
if features.HAS_INT8_DOT:
    MODULES.append(w8a8)

__all__ = [
    "MODULES", "ParallelKernel", "activations", "attention", "attention_pairs", "code_floats", "code_linear",
    "code_rows", "compressed_linear", "decode_rows", "draw", "experts", "features", "float_linear", "integer_linear",
    "linear", "logprobs", "lora", "norms", "pairs", "parallel", "penalties", "positions", "program", "quantize",
    "routing", "rows", "scales", "token_mask", "tokens", "w8a8",
]  # fmt: skip
