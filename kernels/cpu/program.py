"""Programs: kernel calls recorded first, and then run as one call, in one parallel region, as often as wanted.

Between two kernels that Python starts, the threads sleep or spin, and Python takes 10 to 30 us, or 100 where the
kernels before have filled the caches; a step has a hundred kernels. A program runs them one after the other on the same
threads. A kernel begins once all items of the one before are done; a thread that has no core at that moment is not
waited for, so that other processes slow a step by little. Like a CUDA graph, a program reads the addresses that it was
recorded with: the caller writes the inputs of a step to fixed tensors.

Only kernels of this package may compute while a program is recorded, and none of them runs. An operator of torch would
run at once, on results that are not there yet, so it raises NotRecordable.
"""

import ctypes
import math
import platform
import sys
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.cpu import parallel, simd
from kernels.cpu.parallel import ParallelKernel, parallel_kernel
from kernels.cpu.simd import I64Pointer, advance

ALIGNMENT = 64
SUPPORTED = parallel.has_threads()
SPINS = 4096  # pauses, some 100 us, before a waiting thread sleeps
SLEEP_MICROSECONDS = 50
HEADER = 8  # words before the kernels
ENTRY = 8  # words of a kernel, a cache line: address, arguments, threads inside
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
        self._blocks: list[np.ndarray[Any, Any]] = []  # the smallest first; a tensor made of one owns a reference to it
        self._sizes: list[int] = []  # the bytes of each block

    @property
    def num_bytes(self) -> int:
        return sum(self._sizes)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, pitch: int | None = None) -> Tensor:
        """Like torch.empty, from the smallest unused block that is large enough. pitch: see parallel.Recorder."""
        size = (math.prod(shape) if pitch is None else shape[0] * pitch) * dtype.itemsize
        if not size:
            return torch.empty(shape, dtype=dtype)
        for i in range(bisect_left(self._sizes, size), len(self._sizes)):
            if sys.getrefcount(self._blocks[i]) == 2:  # the list's, and the argument's: no tensor refers to it
                block = self._blocks[i]
                break
        else:
            block = self._add_block(size)
        numbers = torch.frombuffer(block, dtype=dtype, count=size // dtype.itemsize)
        return numbers.view(shape) if pitch is None else numbers.view(-1, pitch)[:, : math.prod(shape[1:])].view(shape)

    def _add_block(self, size: int) -> "np.ndarray[Any, Any]":
        raw = np.empty(size + ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        place = bisect_left(self._sizes, size)
        self._sizes.insert(place, size)
        self._blocks.insert(place, raw[start : start + size])
        return self._blocks[place]


class Recording(TorchDispatchMode):
    """Kernel calls in order, while they are recorded. NotRecordable for every operator of torch that computes."""

    def __init__(self, workspace: Workspace) -> None:
        super().__init__()
        self.calls: list[tuple[ParallelKernel, Any]] = []
        self._workspace = workspace

    def add(self, kernel: ParallelKernel, packed: Any) -> None:
        """Note a call; `packed` holds its arguments."""
        self.calls.append((kernel, packed))

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, pitch: int | None = None) -> Tensor:
        """See parallel.Recorder."""
        with no_dispatch():
            return self._workspace.empty(shape, dtype, pitch)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: otherwise torch imports torch._dynamo (1.5 s) at the first operator, to keep its compiler away."""
        return False

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in VIEWS:
            raise NotRecordable(f"{func} computes outside our kernels")
        return func(*args, **(kwargs or {}))


class Program:
    """Recorded kernel calls. Call it to run them; its result is the tensor that the recorded function returned."""

    def __init__(self, calls: list[tuple[ParallelKernel, Any]], result: Any, memory: tuple[Any, ...]) -> None:
        """memory: objects that own what the kernels read and write."""
        self.result, self._memory = result, memory
        arguments = [np.frombuffer(packed.raw[:-1], np.int64) for _, packed in calls]
        self._arguments = np.concatenate(arguments) if arguments else np.empty(0, np.int64)
        # The first argument of a kernel counts the items that were given out.
        self._counters = np.cumsum([0, *map(len, arguments)])[:-1]
        self._words = np.zeros(HEADER + ENTRY * len(calls), np.int64)
        self._words[:2] = len(calls), _USLEEP
        entries = self._words[HEADER:].reshape(-1, ENTRY)
        entries[:, 0] = [kernel.address for kernel, _ in calls]
        entries[:, 1] = self._arguments.ctypes.data + 8 * self._counters

    def __call__(self) -> Any:
        self._arguments[self._counters] = 0
        parallel.run_region(_run_kernels.address, self._words.ctypes.data)
        return self.result


def record(work: Callable[[], Any], workspace: Workspace) -> Program:
    """Record the kernel calls of `work`, which computes nothing meanwhile. NotRecordable where it calls an operator of
    torch that computes."""
    recording = Recording(workspace)
    with recording, parallel.recording_to(recording):
        result = work()
    return Program(recording.calls, result, (work, workspace))


_I64 = ir.IntType(64)
_USLEEP = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p).value or 0


@intrinsic
def _call_kernel(typingctx, address, args):
    """Call the machine code of a kernel with its arguments; both are addresses."""

    def codegen(context, builder, sig, values):
        function = ir.FunctionType(ir.VoidType(), [_I64.as_pointer()]).as_pointer()
        builder.call(builder.inttoptr(values[0], function), [builder.inttoptr(values[1], _I64.as_pointer())])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def _sleep(typingctx, usleep, microseconds):
    """Call usleep, whose address is given."""

    def codegen(context, builder, sig, values):
        i32 = ir.IntType(32)
        function = builder.inttoptr(values[0], ir.FunctionType(i32, [i32]).as_pointer())
        builder.call(function, [builder.trunc(values[1], i32)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def _add(typingctx, counter, value):
    """Atomically add to a counter that threads share. A thread that reads the new value sees all earlier writes of this
    thread."""

    def codegen(context, builder, sig, values):
        builder.atomic_rmw("add", values[0], values[1], "acq_rel")
        return context.get_dummy_value()

    return types.void(I64Pointer, types.int64), codegen


@intrinsic
def _read(typingctx, counter):
    """The value of a counter that threads share."""

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


@parallel_kernel("q")
def _run_kernels(args):
    """Every thread goes through all kernels, and shares the items of each with the threads that are there.

    All items of a kernel are done when all are given out and no thread is inside. A thread that comes later finds no
    item left, and does not enter.
    """
    for i in range(args[0]):
        entry = advance(args, HEADER + i * ENTRY)
        arguments, inside = simd.pointer_i64(entry[1]), advance(entry, 2)
        if _read(arguments) < arguments[1]:
            _add(inside, 1)
            _call_kernel(entry[0], entry[1])
            _add(inside, -1)
        tries = 0
        while _read(inside) > 0:
            tries += 1
            if tries < SPINS:
                _pause()
            else:
                _sleep(args[1], SLEEP_MICROSECONDS)
