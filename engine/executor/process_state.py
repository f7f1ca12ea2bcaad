"""Reads from Linux whether a process was killed for lack of memory, is stopped by a signal, or is debugged."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

LOOK_SECONDS = 0.5  # between two looks at a process
STOPPED_LOOKS = 5  # so many looks in a row find it stopped: it has two seconds at least to be continued


class ProcessStoppedError(Exception):
    """A signal stopped the process, and no signal continued it."""


def count_oom_kills() -> int | None:
    """Count the processes that the kernel has killed for lack of memory since boot, in any cgroup; None if unknown."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


class OomKills:
    """Counts the processes that the kernel kills for lack of memory after this object was made."""

    def __init__(self) -> None:
        self._before = count_oom_kills()

    @property
    def number(self) -> int | None:
        """The number of processes killed so far; None if unknown."""
        now = count_oom_kills()
        return None if self._before is None or now is None else now - self._before


def stopped_at(pid: int) -> int | None:
    """The processor time, in clock ticks, of a process that a signal (SIGSTOP) has stopped; None for any other process.

    A process that a debugger holds (state t) is not stopped in this sense: the debugger will continue it.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # after the name, which may hold any character
    return int(fields[11]) + int(fields[12]) if fields[0] == "T" else None


def is_traced(pid: int) -> bool:
    """True if a debugger holds the process: then it may stand still for any time."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    return any(line.startswith("TracerPid:") and line.split()[1] != "0" for line in lines)


class StoppedLooks:
    """Looks at a process, LOOK_SECONDS apart.

    Looks are counted, not seconds. Our own process may stand still, too: Ctrl-Z stops the whole group, a container is
    paused, a machine sleeps. When it continues there is a single look, and before the next look the other process
    continues as well. A process that used processor time between two looks was not stopped in between.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._num_looks, self._before = 0, -1

    def look(self) -> bool:
        """Look once. True if the last STOPPED_LOOKS looks in a row found the process stopped."""
        now = stopped_at(self._pid)
        self._num_looks = 0 if now is None else self._num_looks + 1 if now == self._before else 1
        self._before = -1 if now is None else now
        return self._num_looks >= STOPPED_LOOKS


async def wait_until_stopped(pid: int) -> None:
    """Return once STOPPED_LOOKS looks in a row found the process stopped; never for most processes."""
    looks, stopped = StoppedLooks(pid), False
    while not stopped:
        await asyncio.sleep(LOOK_SECONDS)
        stopped = looks.look()


async def unless_stopped(pid: int, coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of `coroutine`, which waits for a process. Raises ProcessStoppedError if that is stopped."""
    work = asyncio.ensure_future(coroutine)
    watch = asyncio.ensure_future(wait_until_stopped(pid))
    try:
        await asyncio.wait([work, watch], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (work, watch):
            task.cancel()  # has no effect on a task that has ended
        await asyncio.gather(work, watch, return_exceptions=True)
    if work.cancelled():
        raise ProcessStoppedError(f"process {pid} was stopped")
    return work.result()
