"""Programmatic dependent launch: a small kernel starts while the kernel before it ends, and waits before it reads.

Without it the device is idle for a microsecond or more between two kernels of a stream. With it, the programs of the
next kernel are already on the SMs and wait in `griddepcontrol.wait` until the kernel before has completed and its
writes are visible (PTX ISA, griddepcontrol). Three rules keep it correct:

1. Every program of such a kernel calls wait_for_inputs first, before any load or store, also if it has nothing to do.
   So a kernel completes after the one before it, and what holds for a stream of ordinary kernels holds here.
2. It allows the next kernel only after its own wait. So at most one kernel before the waiting one is incomplete.
3. An ordinary kernel, a copy or an event after it waits for all of it, as always.

A kernel takes part with a parameter `PDL: tl.constexpr`, the first statement wait_for_inputs(PDL), and a launch with
**launch_options(device). sm_90 and sm_100 alone: older cards lack the instruction, and on sm_120 a CUDA graph with such
launches could not be recorded (sgl-project/sglang, pull request 18596). Speed: not measured yet.
"""

import logging
from collections.abc import Iterator
from functools import cache
from inspect import signature

import torch

from kernels.aot_configuration import AotConfiguration
from kernels.dispatch import HAS_TRITON, INTERPRET, device_sizes, record_graph, tl, triton

try:
    if not HAS_TRITON:
        raise ImportError("no Triton")
    from triton.backends.nvidia.compiler import CUDAOptions
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    # Triton 3.4 has the functions, but its compiler cannot call them (triton-lang/triton, issue 7377).
    AVAILABLE = "launch_pdl" in CUDAOptions.__dataclass_fields__ and "_semantic" in signature(gdc_wait).parameters
except ImportError:  # no Triton
    AVAILABLE = False

logger = logging.getLogger(__name__)

CAPABILITIES = (90, 100)


def pdl_constants(capability: int) -> dict[str, bool]:
    """The value of PDL for kernels.aot."""
    return {"PDL": AVAILABLE and capability in CAPABILITIES}


@cache
def launch_options(device: torch.device) -> dict[str, bool]:
    """The arguments of a launch on this device. The first call must not be inside the recording of a CUDA graph."""
    if INTERPRET or not pdl_constants(device_sizes(device)[0])["PDL"]:
        return {"PDL": False}
    options = {"PDL": True, "launch_pdl": True}
    try:
        problem = "" if _works(device, options) else "wrong results"
    except RuntimeError as error:
        problem = str(error)
    if problem:
        logger.warning("programmatic dependent launch is off, kernels start one after the other: %s", problem)
        return {"PDL": False}
    return options


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """With PDL: wait until the kernel before has completed, then allow the kernel after this one to start."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def probe_kernel(x_ptr, PDL: tl.constexpr):
    """Grid (any,): adds 1 to an int32 of each program; a kernel that starts too early loses an addition."""
    wait_for_inputs(PDL)
    at = x_ptr + tl.program_id(0)
    tl.store(at, tl.load(at) + 1)


def _works(device: torch.device, options: dict[str, bool]) -> bool:
    """True if a CUDA graph of such launches can be recorded and adds up."""
    launches, replays = 16, 4
    x = torch.zeros(1024, dtype=torch.int32, device=device)
    probe_kernel[(len(x),)](x, **options)  # compiles: not possible while recording

    def work() -> None:
        for _ in range(launches):
            probe_kernel[(len(x),)](x, **options)

    graph = record_graph(work)
    for _ in range(replays):
        graph.replay()
    return bool((x == 1 + launches * replays).all())


def aot_configurations(capability: int) -> Iterator[AotConfiguration]:
    """Yields the only variant."""
    yield AotConfiguration(probe_kernel, "", "i32", pdl_constants(capability), num_warps=4, quick=True)
