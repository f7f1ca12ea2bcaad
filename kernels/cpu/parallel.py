"""Compiles a kernel to machine code once, keeps the code on disk, and runs it on torch's threads.

numba's own thread pool would compete with torch's for the same cores: torch's idle OpenMP threads spin for a moment
after each operator, just when the next kernel needs the core. So a kernel is a plain C function, and `GOMP_parallel`,
which every OpenMP runtime under torch exports, calls it once per thread of torch's pool. The threads take work items
from one atomic counter (`next_item`), so an uneven batch stays balanced.
"""

import ctypes
import hashlib
import os
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numba
import torch
from numba import types
from torch import Tensor

from kernels.cpu.simd import I64Pointer, fetch_add

jit = numba.njit(error_model="numpy", inline="never", nogil=True)


@jit
def next_item(args):
    """The index of the next unclaimed work item; args[0] is the shared counter, args[1] the number of items."""
    return fetch_add(args, 1)


@jit
def in_runs(item, num_items, num_runs):
    """The item in place of `item`, a bijection: items that are claimed one after the other come from `num_runs` runs of
    neighbours in turns.

    With as many runs as threads, each thread reads memory from a place of its own on, in order. If threads read
    neighbouring panels, the hardware's prefetches behind the end of a panel read what another thread reads.
    """
    run = item % num_runs
    return run * (num_items // num_runs) + min(run, num_items % num_runs) + item // num_runs


class ParallelKernel:
    """A kernel body `fn(args)`, compiled on first use.

    `fn` takes a pointer to int64: args[0] is the work counter, args[1] the number of items. `arguments` describes the
    rest in struct format: "q" an integer or an address, "d" a float64 (read by `simd.as_float`).
    """

    def __init__(self, fn: Callable, arguments: str) -> None:
        self.fn = fn
        self.pack = struct.Struct("qq" + arguments).pack

    def __call__(self, num_items: int, *arguments: int | float) -> None:
        """Run the body on torch's threads, at most one per item; returns when all items are done."""
        packed = ctypes.create_string_buffer(self.pack(0, num_items, *arguments))
        if _recording is not None:
            _recording.add(self, packed)
        num_threads = min(torch.get_num_threads(), num_items)
        if num_threads > 1 and _GOMP_PARALLEL is not None:
            _GOMP_PARALLEL(self.address, packed, num_threads, 0)
        elif num_items:
            self.entry(packed)

    def compile(self) -> None:
        """Compile or load the machine code before the first call."""
        _ = self.address

    @cached_property
    def address(self) -> int:
        """Address of the machine code. The first call compiles it or loads it from disk."""
        return _compile(self.fn).address

    @cached_property
    def entry(self) -> Callable:
        """The machine code as a ctypes function."""
        return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.address)


def parallel_kernel(arguments: str) -> Callable[[Callable], ParallelKernel]:
    """A decorator that makes a ParallelKernel."""
    return lambda fn: ParallelKernel(fn, arguments)


class Recorder(Protocol):
    """Takes every kernel call while a program is recorded (kernels/cpu/program.py)."""

    def add(self, kernel: ParallelKernel, packed: Any) -> None:
        """Note a call; `packed` holds its arguments."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory for a result, at an address that stays valid."""


_recording: Recorder | None = None


@contextmanager
def recording_to(recorder: Recorder) -> Iterator[None]:
    """Give every kernel call of the block to `recorder`, too."""
    global _recording
    _recording = recorder
    try:
        yield
    finally:
        _recording = None


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor for the result of a kernel, not initialised."""
    return torch.empty(shape, dtype=dtype) if _recording is None else _recording.empty(tuple(shape), dtype)


def _compile(fn: Callable):
    signature, options = types.void(I64Pointer), {"nopython": True, "error_model": "numpy"}
    try:
        numba.config.CACHE_DIR = _cache_dir()
        return numba.cfunc(signature, cache=True, **options)(fn)
    except (RuntimeError, OSError):  # without a writable folder, compile for this process only
        return numba.cfunc(signature, **options)(fn)


def _cache_dir() -> str:
    """A cache folder named after all sources: numba's own cache misses a change in a function that a kernel calls."""
    folder = Path(__file__).parent
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(folder.rglob("*.py")))).hexdigest()[:12]
    roots = (os.environ.get("NUMBA_CACHE_DIR"), folder / "__pycache__", Path.home() / ".cache" / "pageserve")
    for root in filter(None, roots):
        path = Path(root) / f"kernels-{digest}"
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(path, os.W_OK):
            return str(path)
    raise OSError("no writable cache folder")


def _find_gomp_parallel() -> Callable | None:
    """GOMP_parallel(fn, data, num_threads, flags) of the OpenMP runtime that torch has loaded; None if not found."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    for path in re.findall(r"/\S*lib(?:gomp|iomp5|omp)\b\S*", maps):
        function = getattr(ctypes.CDLL(path), "GOMP_parallel", None)
        if function is not None:
            function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            function.restype = None
            return function
    return None


_GOMP_PARALLEL = _find_gomp_parallel()


def has_threads() -> bool:
    """True if kernels run on torch's threads, and not on the calling thread alone."""
    return _GOMP_PARALLEL is not None


def run_region(address: int, data: int) -> None:
    """Call the machine code at `address` with the address `data` once on each of torch's threads."""
    assert _GOMP_PARALLEL is not None
    _GOMP_PARALLEL(address, data, torch.get_num_threads(), 0)
