"""`python -m kernels.aot`: compile every Triton kernel for sm_80 and sm_90 and print what each costs. Needs no GPU.

One line per kernel and shipped tile: registers per thread, bytes of stack (anything above 0 is a spill), shared memory
per program, and which matrix instructions the compiler chose. `--quick` takes one shape of each kernel.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import triton  # before the kernels: it tells them to define their Triton halves
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import copy_blocks, paged_attention, prefill_attention, reshape_and_cache

SHARED_MEMORY_LIMIT = {80: 163 * 1024, 90: 227 * 1024}  # bytes one program may use
_ELEMENT_SIZE = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class Configuration:
    """One kernel with the compile-time arguments that its launcher passes for some model."""

    kernel: object
    label: str
    dtype: str
    constants: dict[str, int | bool]
    num_warps: int
    num_stages: int = 3
    pointers: dict[str, str] = field(default_factory=dict)  # name -> element type; the others are `dtype`


@dataclass(frozen=True)
class Report:
    """What ptxas and the PTX say about one compiled kernel."""

    registers: int
    spilled: int
    shared_memory: int
    mma: int
    wgmma: int
    async_copies: int


_INTEGER_POINTERS = {"block_tables_ptr": "i32", "seq_lens_ptr": "i32", "cu_seqlens_q_ptr": "i32",
                     "slot_mapping_ptr": "i64", "table_ptr": "i64", "sources_ptr": "i64", "targets_ptr": "i64",
                     "blocks_ptr": "i64", "alibi_slopes_ptr": "fp32", "partial_ptr": "fp32"}  # fmt: skip
_FLOATS = ("scale", "softcap")
_ALIGNED = re.compile(r".*(_ptr|_stride_row|_stride_head)$")  # multiples of 16, which the launcher's tensors always are


def decode_configuration(dtype: str, group: int, head_dim: int, block_size: int = 16, **flags: bool) -> Configuration:
    """The decode kernel as `paged_attention` would launch it for one model."""
    constants = paged_attention.constants(group, head_dim, block_size, None, 0, 0.0) | flags
    constants |= {"SPLIT_SIZE": 256, "BLOCK_N": paged_attention.block_n(constants["BLOCK_D"], _ELEMENT_SIZE[dtype])}
    label = f"group {group} d {head_dim} block {block_size} BN {constants['BLOCK_N']} {_names(flags)}"
    num_warps = paged_attention.decode_warps(_ELEMENT_SIZE[dtype])
    return Configuration(paged_attention.paged_attention_kernel, label, dtype, constants, num_warps)


def prefill_configuration(
    capability: int, dtype: str, group: int, head_dim: int, num_tokens: int, block_size: int = 16, **flags: bool
) -> Configuration:
    """The prefill kernel as `prefill_attention` would launch it for chunks of `num_tokens` on one kind of device."""
    constants = paged_attention.constants(group, head_dim, block_size, None, 0, 0.0) | flags
    element_size = _ELEMENT_SIZE[dtype]
    tile = prefill_attention.tile_shape(num_tokens * group, group, constants["BLOCK_D"], element_size, capability)
    num_warps, num_stages = tile.pop("num_warps"), tile.pop("num_stages")
    label = f"group {group} d {head_dim} BM {tile['BLOCK_M']} BN {tile['BLOCK_N']} {_names(flags)}"
    kernel = prefill_attention.prefill_attention_kernel
    return Configuration(kernel, label, dtype, constants | tile, num_warps, num_stages)


def _names(flags: dict[str, bool]) -> str:
    return " ".join(name.removeprefix("HAS_").lower() for name in flags)


def configurations(capability: int, quick: bool) -> Iterator[Configuration]:
    """What we ship: the shapes of today's models, every option, every dtype."""
    yield decode_configuration("bf16", 4, 128)
    yield prefill_configuration(capability, "bf16", 4, 128, 2048)
    yield Configuration(
        reshape_and_cache.reshape_and_cache_kernel, "8 heads d 128", "bf16",
        {"NUM_KV_HEADS": 8, "HEAD_DIM": 128, "BLOCK_SIZE": 16, "BLOCK_H": 8, "BLOCK_D": 128}, num_warps=4,
    )  # fmt: skip
    yield Configuration(
        copy_blocks.copy_blocks_kernel, "any", "bf16", {"WORDS": copy_blocks.WORDS_PER_PROGRAM}, num_warps=4
    )
    yield Configuration(
        copy_blocks.pack_blocks_kernel, "any", "u8", {"WORDS": copy_blocks.WORDS_PER_PROGRAM, "PACK": True}, num_warps=4
    )
    yield Configuration(
        paged_attention.reduce_splits_kernel, "d 128", "bf16",
        {"SPLIT_SIZE": 256, "HEAD_DIM": 128, "BLOCK_D": 128}, num_warps=2,
    )  # fmt: skip
    if quick:
        return
    every = {"HAS_ALIBI": True, "HAS_SOFTCAP": True, "HAS_WINDOW": True}
    for group, head_dim in ((1, 64), (3, 64), (8, 80), (1, 256)):
        yield decode_configuration("bf16", group, head_dim)
        yield prefill_configuration(capability, "bf16", group, head_dim, 2048)
    for dtype in ("fp16", "fp32"):
        yield decode_configuration(dtype, 4, 128)
        yield prefill_configuration(capability, dtype, 4, 128, 2048)
    for flags in (every, {"HAS_WINDOW": True}):
        yield decode_configuration("bf16", 4, 128, 32, **flags)
        yield prefill_configuration(capability, "bf16", 4, 128, 2048, 32, **flags)
    for num_tokens in (4, 16):
        yield prefill_configuration(capability, "bf16", 4, 128, num_tokens)


def compile_kernel(configuration: Configuration, capability: int) -> Report:
    """Compile for sm_80 or sm_90 and read the resources back from the binary."""
    fn = configuration.kernel
    signature = {name: _type(name, configuration) for name in fn.arg_names}
    attributes = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(fn.arg_names) if _ALIGNED.match(name)
    }  # what the launcher's tensors would tell the JIT compiler
    if "alibi_slopes_ptr" in signature and not configuration.constants["HAS_ALIBI"]:
        signature["alibi_slopes_ptr"] = "constexpr"
        attributes.pop((fn.arg_names.index("alibi_slopes_ptr"),))
        constants = configuration.constants | {"alibi_slopes_ptr": None}
    else:
        constants = configuration.constants
    source = ASTSource(fn=fn, signature=signature, constexprs=constants, attrs=attributes)
    options = {
        "num_warps": configuration.num_warps,
        "num_stages": configuration.num_stages,
        "enable_fp_fusion": True,  # the JIT's default
    }
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = compiled.asm["ptx"]
    registers, spilled = _resources(compiled.asm["cubin"])
    return Report(
        registers, spilled, compiled.metadata.shared, len(re.findall(r"\bmma\.sync", ptx)),
        len(re.findall(r"wgmma\.mma_async", ptx)), len(re.findall(r"cp\.async\.c[ga]", ptx)),
    )  # fmt: skip


def _type(name: str, configuration: Configuration) -> str:
    if name in configuration.constants:
        return "constexpr"
    if name.endswith("_ptr"):
        return "*" + _INTEGER_POINTERS.get(name, configuration.dtype)
    return "fp32" if name in _FLOATS else "i32"


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes, as cuobjdump (part of Triton's wheel) prints them."""
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [cuobjdump, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump printed no resource usage: {text!r}")
    return int(found[1]), int(found[2])


def main() -> int:
    """Print the table; the exit status is 1 where a kernel needs more shared memory than the device has."""
    parser = argparse.ArgumentParser(prog="python -m kernels.aot", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one shape of each kernel")
    args = parser.parse_args()
    print(f"{'kernel':<26}{'shape':<48}{'dtype':<6}{'sm':>3}{'regs':>6}{'spill':>6}{'smem':>8}{'mma':>5}{'wgmma':>6}")
    status = 0
    for capability, limit in SHARED_MEMORY_LIMIT.items():
        for configuration in configurations(capability, args.quick):
            report = compile_kernel(configuration, capability)
            status |= report.shared_memory > limit
            print(
                f"{configuration.kernel.__name__:<26}{configuration.label:<48}{configuration.dtype:<6}{capability:>3}"
                f"{report.registers:>6}{report.spilled:>6}{report.shared_memory:>8}{report.mma:>5}{report.wgmma:>6}",
                flush=True,
            )
    return status


if __name__ == "__main__":
    sys.exit(main())
