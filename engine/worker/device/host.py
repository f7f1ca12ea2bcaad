"""Cores and memory of the host, and the step limits of each kind of device. Must be importable without torch."""

import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.config import EngineConfig

LARGE_GPU_BYTES = 70 << 30
# Iterations that a waiting thread of libgomp spins before it sleeps. The default spins some milliseconds. On shared
# cores that uses up the time slice of the thread waited for: on 2 cores with 8 runnable processes, 16 steps took 30 s,
# now 2 s. Ten times this count is 5 % faster for one stream of a 90 M model and 10 % slower for a busy server of a
# small model.
SPIN_COUNT = "2000"
# oneDNN compiles a linear layer for every number of rows, some 0.6 MB each. oneDNN keeps 1,024 of them by default, and
# torch as many again: a Worker that has seen prompts of every length grows by a GiB. Compiling takes less time than
# computing: 3,000 layers of a 90 M model with 600 random lengths took 14.0 s and 1,042 MiB; with 128 kept, 13.3 s and
# 402 MiB. 128 are 25 numbers of rows of a model with five shapes, enough for a batch that shrinks one by one.
PRIMITIVES_KEPT = "128"


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest numbers of sequences and of tokens of one step."""

    max_num_seqs: int
    max_num_batched_tokens: int


def resolve_step_limits(config: EngineConfig, device_type: str, device_bytes: int) -> StepLimits:
    """The settings or their defaults by device: a large GPU needs longer steps to be busy, a CPU shorter ones."""
    max_num_seqs = config.max_num_seqs or (128 if device_type == "cpu" else 256)
    large = device_type == "cuda" and device_bytes >= LARGE_GPU_BYTES
    max_num_batched_tokens = config.max_num_batched_tokens or (8192 if large else 2048)
    return StepLimits(min(max_num_seqs, max_num_batched_tokens), max_num_batched_tokens)


def set_threads(cpu_threads: int | None, num_processes: int = 1) -> int:
    """Set and return the number of threads of torch and numba. Call before either is imported.

    The number is cpu_threads, else OMP_NUM_THREADS, else this process's share of the cores that it may use with
    `num_processes` - 1 others.
    """
    inherited = os.environ.get("OMP_NUM_THREADS", "")
    given = cpu_threads or (int(inherited) if inherited.isdigit() else 0)
    threads = given or max(1, usable_cores() // num_processes)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ[name] = str(threads)
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    return threads


def limit_primitive_caches() -> None:
    """Bound the memory of compiled linear layers on a CPU. Call before torch is imported."""
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):  # oneDNN's cache, torch's cache
        os.environ.setdefault(name, PRIMITIVES_KEPT)


def usable_cores() -> int:
    """Cores that this process may use: its affinity mask, limited by the CPU quota of its control groups."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in cgroup_folders("cpu"):
        quota = _read(folder / "cpu.max") or _read(folder / "cpu.cfs_quota_us")
        period = _read(folder / "cpu.cfs_period_us") or "100000"
        parts = [*quota.split(), period]
        if quota and parts[0] not in ("max", "-1"):
            cores = min(cores, max(1, round(int(parts[0]) / int(parts[1]))))
    return cores


def available_host_bytes() -> int:
    """Bytes of memory that may still be allocated, by the machine and by the limits of the control groups."""
    fields = dict(line.split(":", 1) for line in _read(Path("/proc/meminfo")).splitlines() if ":" in line)
    available = int(fields["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in fields else 4 << 30
    for folder in cgroup_folders("memory"):
        limit = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
        used = _read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")
        if limit.isdigit() and used.isdigit():
            available = min(available, max(0, int(limit) - int(used) + _reclaimable_bytes(folder)))
    return available


def cgroup_folders(controller: str, root: Path = Path("/sys/fs/cgroup")) -> Iterator[Path]:
    """Yields the folders of the control groups (version 2 or 1) of this process, from the innermost to the root."""
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        names = controllers.split(",")
        if controllers and controller not in names:
            continue
        base = root / controllers if controllers else root
        folder = base / path.lstrip("/")
        while folder.is_relative_to(base):
            yield folder
            folder = folder.parent


def _reclaimable_bytes(folder: Path) -> int:
    """Bytes of file pages that count as used, but that the kernel drops first."""
    for line in _read(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def return_freed_memory() -> None:
    """Return what this process has freed to the system. glibc keeps freed blocks of up to 32 MiB for later ones: the
    keys of a layer may be one. This does nothing with a C library that has no such call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
