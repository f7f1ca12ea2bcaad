"""Programs: kernel calls recorded once and run again as one call, in one parallel region.

Between two kernels that Python starts, the threads sleep or spin, and Python takes 10 to 30 us; a decode step of one
sequence has a hundred kernels. A program runs them one after the other on the same threads, which meet at a barrier
behind each kernel. Like a CUDA graph, it reads the addresses that it was recorded with: the caller writes the step's
inputs to fixed tensors.

Only kernels of this package may compute while a program is recorded. An operator of torch would run once, at recording,
so it raises NotRecordable.
"""

import ctypes
import math
import platform
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.cpu import parallel, simd
from kernels.cpu.parallel import ParallelKernel, parallel_kernel
from kernels.cpu.simd import I64Pointer

ALIGNMENT = 64
SUPPORTED = parallel.NUM_THREADS_ADDRESS != 0  # torch's threads can be used directly
SPINS = 4096  # pauses at a barrier before a thread offers its core to others
HEADER = 5  # words before the kernels: arrivals, kernels, omp_get_num_threads, sched_yield, spins
# Operators that only describe memory: they compute nothing.
_ATEN = torch.ops.aten
VIEWS = {
    _ATEN.view.default, _ATEN.view.dtype, _ATEN.slice.Tensor, _ATEN.split_with_sizes.default, _ATEN.split.Tensor,
    _ATEN.unsqueeze.default, _ATEN.select.int, _ATEN.as_strided.default, _ATEN.t.default, _ATEN.transpose.int,
    _ATEN.alias.default, _ATEN.detach.default, _ATEN._unsafe_view.default, _ATEN.expand.default, _ATEN.chunk.default,
}  # fmt: skip


class NotRecordable(Exception):
    """The work to record called an operator of torch."""


class Workspace:
    """The memory of results inside programs. Programs that share a Workspace never run at the same time: each reuses
    the memory of all others, and within a program memory is reused as soon as no tensor refers to it."""

    def __init__(self) -> None:
        self._blocks: list[np.ndarray[Any, Any]] = []

    @property
    def num_bytes(self) -> int:
        return sum(block.nbytes for block in self._blocks)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Like torch.empty, from the smallest unused block that is large enough."""
        size = math.prod(shape) * dtype.itemsize
        unused = [i for i in range(len(self._blocks)) if self._blocks[i].nbytes >= size and self._is_unused(i)]
        if unused:
            block = self._blocks[min(unused, key=lambda i: self._blocks[i].nbytes)]
        else:
            raw = np.empty(size + ALIGNMENT, np.uint8)
            start = -raw.ctypes.data % ALIGNMENT
            block = raw[start : start + size]
            self._blocks.append(block)
        return torch.from_numpy(block)[:size].view(dtype).view(shape)

    def _is_unused(self, i: int) -> bool:
        """True if no tensor refers to the block: a tensor made by torch.from_numpy owns a reference to its array."""
        return sys.getrefcount(self._blocks[i]) == 2  # the list's, and the argument's


class Recording(TorchDispatchMode):
    """Kernel calls in order, while they are recorded. NotRecordable for every operator of torch that computes."""

    def __init__(self, workspace: Workspace) -> None:
        super().__init__()
        self.calls: list[tuple[ParallelKernel, Any]] = []
        self._workspace = workspace
        self._allocates = False

    def add(self, kernel: ParallelKernel, packed: Any) -> None:
        """Note a call; `packed` holds its arguments."""
        self.calls.append((kernel, packed))

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory for a result, at an address that stays valid."""
        self._allocates = True
        try:
            return self._workspace.empty(shape, dtype)
        finally:
            self._allocates = False

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in VIEWS and not self._allocates:
            raise NotRecordable(f"{func} computes outside our kernels")
        return func(*args, **(kwargs or {}))


class Program:
    """Recorded kernel calls. Call it to run them; its result is the tensor that the recorded function returned."""

    def __init__(self, calls: list[tuple[ParallelKernel, Any]], result: Any, memory: tuple[Any, ...]) -> None:
        """memory: objects that own what the kernels read and write."""
        self.result, self._memory = result, memory
        self._buffers = [packed for _, packed in calls]
        words = [0, len(calls), parallel.NUM_THREADS_ADDRESS, _SCHED_YIELD, SPINS]
        for kernel, packed in calls:
            ctypes.c_int64.from_buffer(packed).value = 0
            words += [kernel.address, ctypes.addressof(packed)]
        self._words = (ctypes.c_int64 * len(words))(*words)

    def __call__(self) -> Any:
        self._words[0] = 0
        parallel.run_region(_run_kernels.address, self._words)
        return self.result


def record(work: Callable[[], Any], workspace: Workspace) -> Program:
    """Run `work` and record its kernel calls. NotRecordable where it calls anything else; nothing is recorded then."""
    recording = Recording(workspace)
    with recording, parallel.recording_to(recording):
        result = work()
    return Program(recording.calls, result, (work, workspace))


_I64 = ir.IntType(64)
_SCHED_YIELD = ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0


@intrinsic
def _call_kernel(typingctx, address, args):
    """Call the machine code of a kernel with its arguments; both are addresses."""

    def codegen(context, builder, sig, values):
        function = ir.FunctionType(ir.VoidType(), [_I64.as_pointer()]).as_pointer()
        builder.call(builder.inttoptr(values[0], function), [builder.inttoptr(values[1], _I64.as_pointer())])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def _call_plain(typingctx, address):
    """Call a C function without arguments, which returns an int."""

    def codegen(context, builder, sig, values):
        function = ir.FunctionType(ir.IntType(32), []).as_pointer()
        return builder.sext(builder.call(builder.inttoptr(values[0], function), []), _I64)

    return types.int64(types.int64), codegen


@intrinsic
def _arrive(typingctx, counter):
    """Atomically add one to a counter that threads share, and publish all that this thread wrote; the old value."""

    def codegen(context, builder, sig, values):
        return builder.atomic_rmw("add", values[0], ir.Constant(_I64, 1), "acq_rel")

    return types.int64(I64Pointer), codegen


@intrinsic
def _read_counter(typingctx, counter):
    """The counter's value; this thread sees all that others wrote before they arrived."""

    def codegen(context, builder, sig, values):
        return builder.load_atomic(values[0], "acquire", 8)

    return types.int64(I64Pointer), codegen


@intrinsic
def _pause(typingctx):
    """Tell the processor that the thread spins."""

    def codegen(context, builder, sig, values):
        if platform.machine() in ("x86_64", "AMD64"):
            builder.call(ir.InlineAsm(ir.FunctionType(ir.VoidType(), []), "pause", "~{memory}", side_effect=True), [])
        return context.get_dummy_value()

    return types.void(), codegen


@parallel_kernel("3q")
def _run_kernels(args):
    """Every thread runs all kernels in order, and shares the items of each with the others."""
    num_kernels, sched_yield, spins = args[1], args[3], args[4]
    num_threads = _call_plain(args[2])
    for i in range(num_kernels):
        address, arguments = args[HEADER + 2 * i], args[HEADER + 2 * i + 1]
        _call_kernel(address, arguments)
        everyone = (i + 1) * num_threads
        if _arrive(args) == everyone - 1:  # all threads have left the kernel: its items are counted from 0 next time
            simd.pointer_i64(arguments)[0] = 0
        tries = 0
        while _read_counter(args) < everyone:
            tries += 1
            if tries < spins:
                _pause()
            else:
                _call_plain(sched_yield)
