"""The features of the processor that kernels are compiled for, and its instructions that LLVM's portable operations do
not reach."""

from llvmlite import binding, ir
from numba.core import codegen, config

from kernels.processor import may_use_tiles

binding.initialize_native_asmparser()  # needed by `instruction`
# numba compiles for this machine, or for what NUMBA_CPU_FEATURES says: "+avx2,+fma,-avx512f".
_FEATURES = set((config.CPU_FEATURES or codegen.get_host_cpu_features()).split(","))
HAS_BF16_DOT = "+avx512bf16" in _FEATURES  # vdpbf16ps, vcvtneps2bf16
HAS_AVX512 = {"+avx512bw", "+avx512dq"} <= _FEATURES  # 32 registers of 64 bytes
HAS_INT8_DOT = HAS_AVX512 and "+avx512vnni" in _FEATURES  # vpdpbusd
HAS_AVX2 = {"+avx2", "+fma", "+f16c"} <= _FEATURES  # 16 registers of 32 bytes
HAS_BF16_TILES = {"+amx-tile", "+amx-bf16"} <= _FEATURES and may_use_tiles()  # tdpbf16ps
HAS_INT8_TILES = HAS_BF16_TILES and "+amx-int8" in _FEATURES  # tdpbsud
# Kernels multiply pairs of bf16 numbers, by one instruction or by several (kernels/cpu/dots.py).
MULTIPLIES_PAIRS = HAS_BF16_DOT or HAS_AVX2


def instruction(builder, text, constraints, result, *args):
    """One instruction in assembly: LLVM's own intrinsics for it have types that llvmlite lacks or that changed."""
    asm = ir.InlineAsm(ir.FunctionType(result, [arg.type for arg in args]), text, constraints)
    return builder.call(asm, args)
