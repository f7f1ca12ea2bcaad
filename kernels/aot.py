"""`python -m kernels.aot` (`make kernels-aot`): compile every Triton kernel for every architecture of kernels/card.py
and print its resources. Needs no GPU.

Prints a line per configuration: registers per thread, bytes of stack (above 0: a spill), shared memory per program,
programs that an SM holds at once, matrix instructions, asynchronous copies and 16-byte accesses in the code, and the
number of copies under way during computation. The exit status is 1 if a kernel breaks a promise of its configuration or
needs more than the device has, or if a kernel has no configuration.
"""

import argparse
import importlib
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import starmap
from pathlib import Path
from types import ModuleType

import triton  # before any kernel file: kernels.dispatch then hands out the real Triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from kernels.aot_configuration import AotConfiguration
from kernels.card import BF16_CAPABILITY, CARDS
from kernels.dispatch import TRITON_VERSION

# name in AotConfiguration.needs (a field of Report) -> message if the code lacks it
NEEDS = {
    "mma": "has no mma instruction",
    "wgmma": "has no wgmma instruction",
    "tcgen05": "has no tcgen05.mma instruction",
    "async_copies": "has no asynchronous copy",
    "wide": "has no access of 16 bytes",
    "tma": "has no copy by the copy engine (TMA)",
    "ahead": "waits for every copy before it computes: more stages are needed to fetch ahead",
}
BEFORE_AMPERE = {"async_copies", "ahead", "wide"}  # sm_75 has no such copies, and its tiles are small
TUNED = (3, 9)  # the tables of tiles are made with this Triton; with another one, only errors of the compiler count
H100, A100 = 90, 80  # the architectures that `make test` compiles most for
TENSOR_MEMORY = 512  # columns of sm_100's memory for the results of matrix instructions


@dataclass(frozen=True)
class Report:
    """Resources of one compiled kernel, read from ptxas and the PTX.

    programs: number that an SM holds at once. tensor_memory: columns of it that a program uses. wide: accesses of 16
    bytes per thread to device memory. ahead: the largest number of groups of asynchronous copies still under way when
    the kernel waits for a group; 0: loads and arithmetic take turns, whatever num_stages says.
    """

    registers: int
    spilled: int
    shared_memory: int
    tensor_memory: int
    programs: int
    mma: int
    wgmma: int
    tcgen05: int
    async_copies: int
    wide: int
    ahead: int
    tma: int = 0


def kernel_modules() -> Iterator[ModuleType]:
    """The modules with Triton kernels that offer aot_configurations."""
    return (module for module in gpu_modules() if hasattr(module, "aot_configurations"))


def gpu_modules() -> Iterator[ModuleType]:
    """Every module of this package except the CPU's and this one."""
    folder = Path(__file__).parent
    for path in sorted(folder.rglob("*.py")):
        name = ".".join(path.relative_to(folder).with_suffix("").parts)
        if path.stem != "__init__" and name != "aot" and not name.startswith("cpu."):
            yield importlib.import_module(f"kernels.{name}")


def configurations(capability: int, quick: bool = False, name: str = "") -> list[AotConfiguration]:
    """All configurations for one kind of device; `name` keeps the kernels whose name contains it.

    A card without bf16 gets the bf16 configurations in fp16, and each only once. `quick` keeps the quick ones for H100;
    for A100 those of kernels that multiply tiles, and one variant of each other kernel; for other cards one variant of
    each kernel that multiplies tiles: those differ between cards.
    """
    found = [
        configuration if capability >= BF16_CAPABILITY else _in_fp16(configuration)
        for module in kernel_modules()
        for configuration in module.aot_configurations(capability)
        if (configuration.quick or not quick) and name in configuration.kernel.__name__
    ]
    if quick and capability != H100:
        tiles, others = ([c for c in found if bool(c.needs) == needs] for needs in (True, False))
        found = [*tiles, *_one_of_each(others)] if capability == A100 else _one_of_each(tiles)
    return list({(id(c.kernel), c.label, c.dtype): c for c in found}.values())


def _one_of_each(found: list[AotConfiguration]) -> list[AotConfiguration]:
    """The first configuration of each kernel."""
    return list({id(c.kernel): c for c in reversed(found)}.values())


def _in_fp16(configuration: AotConfiguration) -> AotConfiguration:
    types = {name: kind.replace("bf16", "fp16") for name, kind in configuration.types.items()}
    return replace(configuration, dtype=configuration.dtype.replace("bf16", "fp16"), types=types)


def uncovered_kernels() -> list[str]:
    """Kernels (functions named *_kernel under triton.jit) of this package that no configuration compiles."""
    known = {id(c.kernel) for capability in CARDS for c in configurations(capability)}
    missing = set()
    for module in gpu_modules():
        for key, value in vars(module).items():
            if isinstance(value, triton.JITFunction) and key.endswith("_kernel") and id(value) not in known:
                missing.add(f"{module.__name__}.{key}")
    return sorted(missing)


def compile_kernel(configuration: AotConfiguration, capability: int) -> Report:
    """Compile for one architecture and read the resources back from the binary."""
    compiled = build(configuration, capability)
    ptx, shared_memory = compiled.asm["ptx"], compiled.metadata.shared
    registers, spilled = _resources(compiled.asm["cubin"])
    programs = CARDS[capability].programs(shared_memory, configuration.num_warps, registers)
    return Report(
        registers=registers, spilled=spilled, shared_memory=shared_memory,
        tensor_memory=getattr(compiled.metadata, "tmem_size", None) or 0, programs=programs,
        mma=len(re.findall(r"\bmma\.sync", ptx)), wgmma=len(re.findall(r"wgmma\.mma_async", ptx)),
        tcgen05=len(re.findall(r"tcgen05\.mma", ptx)),
        async_copies=len(re.findall(r"cp\.async\.(?:c[ga]|bulk)", ptx)),
        wide=len(re.findall(r"cp\.async\.cg\.shared\.global [^;]*, 0x10\b|(?:ld|st)\.global\S*\.v4\.b32", ptx)),
        ahead=max(map(int, re.findall(r"cp\.async\.wait_group\s+(\d+)", ptx)), default=0),
        tma=len(re.findall(r"cp\.async\.bulk\.tensor", ptx)),
    )  # fmt: skip


def build(configuration: AotConfiguration, capability: int) -> CompiledKernel:
    """Compile for one architecture; `asm` of the result holds the PTX and the binary."""
    fn = configuration.kernel
    source = ASTSource(
        fn=fn,
        signature={name: _type(name, configuration) for name in fn.arg_names},
        constexprs=dict(configuration.constants),
        attrs={(i,): [["tt.divisibility", 16]] for i in _aligned_arguments(configuration)},
    )
    options = {
        "num_warps": configuration.num_warps,
        "num_stages": configuration.num_stages,
        "enable_fp_fusion": True,  # the default of the JIT
    }
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def problems(configuration: AotConfiguration, capability: int, report: Report) -> list[str]:
    """The problems of a compiled kernel, in words; empty if there are none."""
    found = []
    limit = min(CARDS[capability].shared_memory, configuration.max_shared_memory)
    if report.spilled > configuration.max_spill:
        found.append(f"spills {report.spilled} bytes, {configuration.max_spill} are allowed")
    if report.shared_memory > limit:
        found.append(f"needs {report.shared_memory} bytes of shared memory, the limit is {limit}")
    if report.tensor_memory > TENSOR_MEMORY:
        found.append(f"needs {report.tensor_memory} columns of tensor memory, the device has {TENSOR_MEMORY}")
    absent = BEFORE_AMPERE if capability < 80 else set()
    found += [NEEDS[need] for need in configuration.needs if need not in absent and not getattr(report, need)]
    return found


def _type(name: str, configuration: AotConfiguration) -> str:
    if name in configuration.constants:
        return "constexpr"
    default = "*" + configuration.dtype if name.endswith("_ptr") else "i32"
    return configuration.types.get(name, default)


def _aligned_arguments(configuration: AotConfiguration) -> Iterator[int]:
    """Positions of the arguments that the JIT compiler would find to be multiples of 16."""
    for i, param in enumerate(configuration.kernel.params):
        exempt = param.do_not_specialize or param.do_not_specialize_on_alignment
        aligned = param.name.endswith("_ptr") or param.name in configuration.multiples_of_16
        aligned = aligned and not configuration.types.get(param.name, "").startswith("tensordesc")
        if aligned and not exempt and param.name not in configuration.constants:
            yield i


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


def compile_all(
    capabilities: Sequence[int], quick: bool, name: str, jobs: int
) -> Iterator[tuple[AotConfiguration, int, Report | str]]:
    """Every configuration with its report, or the compiler's error, in order. Kernels cannot cross processes: each
    process finds them by number."""
    work = [
        (capability, quick, name, i)
        for capability in capabilities
        for i in range(len(configurations(capability, quick, name)))
    ]
    if jobs == 1:
        yield from starmap(_compile_numbered, work)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        for (capability, _, _, i), report in zip(work, pool.map(_report_numbered, work), strict=True):
            yield configurations(capability, quick, name)[i], capability, report


def _report_numbered(item: tuple[int, bool, str, int]) -> Report | str:
    return _compile_numbered(*item)[2]


def _compile_numbered(capability: int, quick: bool, name: str, i: int) -> tuple[AotConfiguration, int, Report | str]:
    configuration = configurations(capability, quick, name)[i]
    try:
        return configuration, capability, compile_kernel(configuration, capability)
    except Exception as error:  # the compiler raises many kinds
        return configuration, capability, f"{type(error).__name__}: {error}"


def main() -> int:
    """Print the table, then the problems."""
    parser = argparse.ArgumentParser(prog="python -m kernels.aot", description="Compile every Triton kernel.")
    parser.add_argument("--quick", action="store_true", help="a few shapes of each kernel, as `make test` does")
    parser.add_argument("--kernel", default="", metavar="NAME", help="only kernels whose name contains this")
    parser.add_argument(
        "--sm", type=int, nargs="+", choices=CARDS, default=list(CARDS), help="only these architectures"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes to compile in")
    args = parser.parse_args()
    failures = [f"{name}: no configuration compiles it" for name in uncovered_kernels() if not args.kernel]
    notes: list[str] = []
    print(f"triton {triton.__version__}")
    print(f"{'kernel':<28}{'shape':<50}{'dtype':<6}{'sm':>4}{'regs':>6}{'spill':>6}{'smem':>8}{'prog/SM':>8}"
          f"{'mma':>5}{'wgmma':>6}{'tcgen05':>8}{'copies':>7}{'wide':>6}{'ahead':>6}")  # fmt: skip
    started, reports = time.monotonic(), []
    for configuration, capability, report in compile_all(args.sm, args.quick, args.kernel, args.jobs):
        kernel, label = configuration.kernel.__name__, configuration.label
        where = f"{kernel} {label} {configuration.dtype} sm_{capability}"
        if isinstance(report, str):
            failures.append(f"{where}: does not compile: {report}")
            continue
        reports.append(report)
        print(
            f"{kernel:<28}{label:<50}{configuration.dtype:<6}{capability:>4}{report.registers:>6}{report.spilled:>6}"
            f"{report.shared_memory:>8}{report.programs:>8}{report.mma:>5}{report.wgmma:>6}{report.tcgen05:>8}"
            f"{report.async_copies:>7}{report.wide:>6}{report.ahead:>6}",
            flush=True,
        )
        noticed = failures if TRITON_VERSION == TUNED else notes
        noticed += [f"{where}: {problem}" for problem in problems(configuration, capability, report)]
    for note in notes:
        print(f"NOTE {note}")
    for failure in failures:
        print(f"FAILED {failure}")
    spilling, wgmma = sum(r.spilled > 0 for r in reports), sum(r.wgmma > 0 for r in reports)
    print(f"{len(reports)} compiled in {time.monotonic() - started:.0f} s; {spilling} spill, {wgmma} use wgmma, "
          f"{len(failures)} failures")  # fmt: skip
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
