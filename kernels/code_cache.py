"""The folder that keeps the machine code of the CPU kernels, and the locks under which processes write to it.

The folder's name is a digest of everything that decides the code: the sources in kernels/cpu, the versions of Python,
numba and LLVM, the processor's name and features, and whether the system grants AMX. So a disk that machines share, or
an image, may hold a folder for each kind of machine, and none reads the code of another. (numba alone keeps one index
per function for all processors: two machines that write it at the same time can mix up their code.) This module imports
neither torch nor numba.
"""

import fcntl
import hashlib
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from kernels.processor import may_use_tiles

SOURCES = Path(__file__).parent / "cpu"
_COMPLETE = "complete"
_POLL_SECONDS = 0.02
# True in a process of the lowest priority: it gives a lock back at once. On a busy machine such a process may stand
# still for long, and a server that needs the kernel would wait for it; so the server compiles the kernel, too.
lets_others_pass = False


def folder() -> Path:
    """The folder of this machine: the first that holds every kernel or can be written. OSError: there is none."""
    roots = [SOURCES / "__pycache__"]
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        roots.insert(0, Path(chosen))
    with suppress(RuntimeError):  # this user has no home
        roots.append(Path.home() / ".cache" / "pageserve")
    for root in roots:
        path = root / f"kernels-{digest()}"
        if is_complete(path):  # an image may ship it read-only
            return path
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(path, os.W_OK):
            return path
    raise OSError("no writable cache folder")


def is_complete(path: Path) -> bool:
    """True if the folder holds every kernel."""
    return (path / _COMPLETE).exists()


def mark_complete(path: Path) -> None:
    """Note that the folder holds every kernel."""
    (path / _COMPLETE).touch()


@contextmanager
def lock(path: Path, seconds: float = float("inf")) -> Iterator[bool]:
    """Hold the lock of a file against other processes and threads. Yields False without the lock: another holds it for
    longer than `seconds`, or the file system has no locks or cannot be written. A lock ends with its process."""
    try:
        file = path.open("a")
    except OSError:
        yield False
        return
    with file:
        deadline = time.monotonic() + seconds
        locked = _try_lock(file.fileno(), deadline)
        if locked and lets_others_pass:
            fcntl.flock(file, fcntl.LOCK_UN)
        yield locked


def _try_lock(descriptor: int, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)
        except OSError:
            return False


@cache
def digest() -> str:
    """The name of what decides the machine code."""
    import llvmlite
    from llvmlite import binding

    result = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(SOURCES.rglob("*.py"))))
    features = binding.get_host_cpu_features().flatten()
    chosen = [os.environ.get(f"NUMBA_CPU_{part}") for part in ("NAME", "FEATURES")]  # instead of the machine's
    processor = binding.get_host_cpu_name(), features, chosen, may_use_tiles()
    result.update(repr((sys.version, _version("numba"), llvmlite.__version__, *processor)).encode())
    return result.hexdigest()[:12]


def _version(package: str) -> str:
    from importlib.metadata import version

    return version(package)
