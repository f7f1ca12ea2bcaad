"""What Linux tells about a process that died or stands still: was it somebody from outside?"""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

LOOK_SECONDS = 0.5  # between two looks at a process
STOPPED_LOOKS = 5  # in a row that find it stopped: two seconds at least, for whoever stops it to let it go on


class ProcessStoppedError(Exception):
    """A signal stopped the process, and nobody let it go on."""


def count_oom_kills() -> int | None:
    """Processes that the kernel has killed for lack of memory since boot, in any cgroup; None where it does not say."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def stopped_at(pid: int) -> int | None:
    """The processor time, in clock ticks, of a process that a signal (SIGSTOP) has stopped; None for any other.

    A debugger (state t) is not meant: it is there to let the process go on.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # after the name, which may hold anything
    return int(fields[11]) + int(fields[12]) if fields[0] == "T" else None


def is_traced(pid: int) -> bool:
    """Whether a debugger holds the process: it may stand still for as long as its user thinks."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    return any(line.startswith("TracerPid:") and line.split()[1] != "0" for line in lines)


class StoppedLooks:
    """Looks at a process, LOOK_SECONDS apart.

    Looks are counted, not time. If this very process stood still (Ctrl-Z stops the whole group, a container is paused,
    a machine sleeps), there is one look when it goes on, and by the next the other process has gone on, too. A process
    that used processor time between two looks was not stopped all the while.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._num_looks, self._before = 0, -1

    def look(self) -> bool:
        """Whether this is the last of STOPPED_LOOKS in a row that found it stopped."""
        now = stopped_at(self._pid)
        self._num_looks = 0 if now is None else self._num_looks + 1 if now == self._before else 1
        self._before = -1 if now is None else now
        return self._num_looks >= STOPPED_LOOKS


async def wait_until_stopped(pid: int) -> None:
    """Return once STOPPED_LOOKS looks in a row found the process stopped; for most, never."""
    looks, stopped = StoppedLooks(pid), False
    while not stopped:
        await asyncio.sleep(LOOK_SECONDS)
        stopped = looks.look()


async def unless_stopped(pid: int, coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of `coroutine`, which waits for the process. Raises ProcessStoppedError when that is stopped."""
    work = asyncio.ensure_future(coroutine)
    watch = asyncio.ensure_future(wait_until_stopped(pid))
    try:
        await asyncio.wait([work, watch], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (work, watch):
            task.cancel()  # nothing for one that has ended
        await asyncio.gather(work, watch, return_exceptions=True)
    if work.cancelled():
        raise ProcessStoppedError(f"process {pid} was stopped")
    return work.result()
