"""Compiles a kernel to machine code once, keeps the code on disk, and runs it on torch's threads.

numba's own thread pool would compete with torch's for the same cores: torch's idle OpenMP threads spin for a moment
after each operator, just when the next kernel needs the core. So a kernel is a plain C function, and `GOMP_parallel`,
which every OpenMP runtime under torch exports, calls it once per thread of torch's pool. The threads take work items
from one atomic counter (`next_item`), so an uneven batch stays balanced.

If several processes need a kernel at the same time, one compiles it under a lock, and the others load its code.
"""

import ctypes
import hashlib
import math
import re
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numba
import torch
from numba import types
from numba.core import caching, ccallback
from torch import Tensor

from kernels import code_cache
from kernels.cpu.features import HAS_BF16_TILES
from kernels.cpu.simd import I64Pointer, fetch_add

# For functions that kernels call. numba makes no wrappers for calls from Python and C, which take a sixth of the time
# to compile. So Python must not call such a function: `function.py_func` is the one for Python.
jit = numba.njit(error_model="numpy", inline="never", nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)

# L1 has 64 sets of lines. Lines at the same place of rows whose size is a multiple of 1 KiB are in one to four of them.
CONFLICTING_BYTES, LINE_BYTES = 1024, 64
# How long a process waits for another that compiles the same kernel; after that it compiles the kernel, too.
WAIT_SECONDS = 60.0


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
        """Run the body on torch's threads, at most one per item; returns when all items are done. While a program is
        recorded, the call is noted instead."""
        packed = ctypes.create_string_buffer(self.pack(0, num_items, *arguments))
        if (recorder := _local.recorder) is not None:
            recorder.add(self, packed)
            return
        num_threads = min(torch.get_num_threads(), num_items)
        if num_threads > 1 and _GOMP_PARALLEL is not None:
            _GOMP_PARALLEL(self.address, packed, num_threads, 0)
        elif num_items:
            self.entry(packed)

    def compile(self, wait: bool = True) -> bool:
        """Compile or load the machine code before the first call. Without `wait`: False, and nothing is done, while
        another process compiles it."""
        if "address" not in vars(self):
            code = _compile(self.fn, WAIT_SECONDS if wait else None)
            if code is None:
                return False
            self.address = code.address
        return True

    def is_on_disk(self) -> bool:
        """True if the machine code does not have to be compiled."""
        try:
            return Cache(self.fn).index.exists()
        except OSError:
            return False

    @cached_property
    def address(self) -> int:
        """Address of the machine code. The first call compiles it or loads it from disk."""
        return _compile(self.fn, WAIT_SECONDS).address

    @cached_property
    def entry(self) -> Callable:
        """The machine code as a ctypes function."""
        return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.address)


def parallel_kernel(arguments: str) -> Callable[[Callable], ParallelKernel]:
    """A decorator that makes a ParallelKernel."""
    return lambda fn: ParallelKernel(fn, arguments)


class Recorder(Protocol):
    """Takes every kernel call while a program is recorded (kernels/cpu/program.py); none is run then."""

    def add(self, kernel: ParallelKernel, packed: Any) -> None:
        """Note a call; `packed` holds its arguments."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, pitch: int | None = None) -> Tensor:
        """Memory for a result, at an address that stays valid. pitch: numbers from row to row, None for dense rows."""


class _Local(threading.local):
    """The recorder of each thread: others run their kernels while one records."""

    recorder: Recorder | None = None


_local = _Local()


@contextmanager
def recording_to(recorder: Recorder) -> Iterator[None]:
    """Give every kernel call of this thread in the block to `recorder`, and run none."""
    _local.recorder = recorder
    try:
        yield
    finally:
        _local.recorder = None


def is_recording() -> bool:
    """True while this thread's calls are noted in place of running."""
    return _local.recorder is not None


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor for the result of a kernel, not initialised."""
    recorder = _local.recorder
    return torch.empty(shape, dtype=dtype) if recorder is None else recorder.empty(tuple(shape), dtype)


def empty_rows(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """`empty` for rows [num_rows, ...] that a linear layer multiplies. With AMX there may be a gap behind each row.

    A product of tiles reads a few cache lines of each of 32 rows, and reads them again for other columns. L1 keeps
    twelve lines whose addresses differ by multiples of 4 KiB: rows of 4 or 8 KiB without a gap push each other out.
    """
    size = math.prod(shape[1:])
    if not HAS_BF16_TILES or dtype != torch.bfloat16 or size * dtype.itemsize % CONFLICTING_BYTES:
        return empty(shape, dtype)
    pitch, recorder = size + LINE_BYTES // dtype.itemsize, _local.recorder
    if recorder is not None:
        return recorder.empty(tuple(shape), dtype, pitch)
    return torch.empty((shape[0], pitch), dtype=dtype)[:, :size].view(shape)


def _compile(fn: Callable, seconds: float | None) -> Any:
    """The compiled body, from disk if its code is there. seconds: how long to wait for another process that compiles
    it, before this process compiles it too; None: do not wait, and return None."""
    code = ccallback.CFunc(fn, ((I64Pointer,), types.void), {}, {"nopython": True, "error_model": "numpy"})
    try:
        code._cache = Cache(fn)
        with code_cache.lock(code._cache.lock, seconds or 0) as locked:
            if seconds is None and not locked:
                return None
            code.compile()
    except OSError:  # without a writable folder, compile for this process only
        code._cache = caching.NullCache()
        code.compile()
    return code


class _Locator(caching._CacheLocator):
    """Tells numba the folder of kernels.code_cache. A file is named after the line and the source of its function, not
    after the path and the time of the source: these differ between checkouts and machines that share the folder."""

    def __init__(self, fn: Callable, source: str) -> None:
        digest = hashlib.sha256(Path(source).read_bytes()).hexdigest()[:8]
        self._name = f"{fn.__code__.co_firstlineno}-{digest}"
        self._folder = str(code_cache.folder())

    @classmethod
    def from_function(cls, py_func: Callable, py_file: str) -> "_Locator":
        return cls(py_func, py_file)

    def get_cache_path(self) -> str:
        return self._folder

    def get_source_stamp(self) -> str:
        return ""

    def get_disambiguator(self) -> str:
        return self._name


class Cache(caching.FunctionCache):
    """numba's cache of one kernel, in the folder of kernels.code_cache. numba replaces its files as a whole; a file
    that is damaged all the same (the machine crashed) counts as missing."""

    class _impl_class(caching.CompileResultCacheImpl):
        _locator_classes = [_Locator]

    @property
    def index(self) -> Path:
        """The file that is there if the code is."""
        return Path(self.cache_path) / f"{self._impl.filename_base}.nbi"

    @property
    def lock(self) -> Path:
        """The file whose lock a process holds while it compiles or loads the kernel."""
        return self.index.with_suffix(".lock")

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception:
            self.flush()
            return None


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
