"""The features of this processor, and its instructions that LLVM's portable operations do not reach."""

from llvmlite import binding, ir

binding.initialize_native_asmparser()  # needed by `instruction`
_FEATURES = binding.get_host_cpu_features()
HAS_BF16_DOT = bool(_FEATURES.get("avx512bf16"))  # vdpbf16ps, vcvtneps2bf16
HAS_BF16_TILES = bool(_FEATURES.get("amx-bf16"))  # AMX: several times as fast with many rows


def instruction(builder, text, constraints, result, *args):
    """One instruction in assembly: LLVM's own intrinsics for it have types that llvmlite lacks or that changed."""
    asm = ir.InlineAsm(ir.FunctionType(result, [arg.type for arg in args]), text, constraints)
    return builder.call(asm, args)
