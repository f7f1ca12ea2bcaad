"""What the machine offers: cores and memory, and the step sizes that depend on the kind of device. No torch here."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.config import EngineConfig

LARGE_GPU_BYTES = 70 << 30
# How long a thread of libgomp spins before it sleeps. The default, some milliseconds, burns the time slice of the very
# thread it waits for wherever cores are shared: on 2 cores with 8 runnable processes, 16 steps took 30 s in place of 2.
# Ten times as much is 5 % faster for one stream of a 90 M model and 10 % slower for a busy server of a small one.
SPIN_COUNT = "2000"
# oneDNN compiles a linear layer anew for every number of rows, some 0.6 MB each, and keeps 1,024 of them by default, as
# does torch on top of it: a Worker that has seen every length of prompt is a GiB larger. Compiling takes less than the
# rows: 3,000 layers of a 90 M model with 600 random lengths took 14.0 s and 1,042 MiB, with 128 kept 13.3 s, 402 MiB.
# These are 25 numbers of rows of a model with five shapes, enough for a batch that shrinks one by one.
PRIMITIVES_KEPT = "128"


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Most sequences and most tokens of one step."""

    max_num_seqs: int
    max_num_batched_tokens: int


def resolve_step_limits(config: EngineConfig, device_type: str, device_bytes: int) -> StepLimits:
    """The defaults depend on the device: a large GPU needs longer steps to be busy, a CPU shorter ones."""
    max_num_seqs = config.max_num_seqs or (128 if device_type == "cpu" else 256)
    large = device_type == "cuda" and device_bytes >= LARGE_GPU_BYTES
    max_num_batched_tokens = config.max_num_batched_tokens or (8192 if large else 2048)
    return StepLimits(min(max_num_seqs, max_num_batched_tokens), max_num_batched_tokens)


def set_threads(cpu_threads: int | None) -> int:
    """Number of threads that torch and numba will use; must be called before either is imported.

    As asked, else as OMP_NUM_THREADS says, else the cores that this process may use.
    """
    inherited = os.environ.get("OMP_NUM_THREADS", "")
    threads = cpu_threads or (int(inherited) if inherited.isdigit() and int(inherited) else usable_cores())
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ[name] = str(threads)
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    return threads


def limit_primitive_caches() -> None:
    """Keep the memory of a CPU's linear layers flat; must be called before torch is imported."""
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):  # oneDNN's own, and torch's
        os.environ.setdefault(name, PRIMITIVES_KEPT)


def usable_cores() -> int:
    """Cores this process may use: its affinity mask, cut by the CPU quota of its control group."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in cgroup_folders("cpu"):
        quota = _read(folder / "cpu.max") or _read(folder / "cpu.cfs_quota_us")
        period = _read(folder / "cpu.cfs_period_us") or "100000"
        parts = [*quota.split(), period]
        if quota and parts[0] not in ("max", "-1"):
            cores = min(cores, max(1, round(int(parts[0]) / int(parts[1]))))
    return cores


def available_host_bytes() -> int:
    """Memory that may still be taken: of the machine, or what is left below a control group's limit."""
    fields = dict(line.split(":", 1) for line in _read(Path("/proc/meminfo")).splitlines() if ":" in line)
    available = int(fields["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in fields else 4 << 30
    for folder in cgroup_folders("memory"):
        limit = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
        used = _read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")
        if limit.isdigit() and used.isdigit():
            available = min(available, max(0, int(limit) - int(used) + _reclaimable_bytes(folder)))
    return available


def cgroup_folders(controller: str, root: Path = Path("/sys/fs/cgroup")) -> Iterator[Path]:
    """The control groups, of version 2 or 1, that hold this process, from the innermost up to the root."""
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
    """File pages that the kernel drops first: they count as used, but are not in the way."""
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
