"""Returns the memory that the server's process has freed to the system.

glibc keeps freed memory for the next allocation: in one arena per busy thread, and with an mmap threshold that grows
with the freed blocks. After one large request a process would stay large. On other systems and C libraries this module
does nothing: they return memory by themselves, or offer no call for it.
"""

import asyncio
import ctypes
import gc
import logging
import os
import platform
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # from malloc.h
MMAP_BYTES = 256 << 10  # blocks from this size on are mapped: free() returns them to the system at once
MAX_ARENAS = 2
PERIOD_SECONDS = 2.0
GROWTH_BYTES = 8 << 20  # above the process's smallest size so far; then trimming is worth its few milliseconds
# The amount of freed memory cannot be read. If trimming returned less than FUTILE_BYTES, pause for FUTILE_PERIODS.
FUTILE_BYTES, FUTILE_PERIODS = 1 << 20, 4
# From COLLECT_BYTES above the smallest size on, a garbage collection is worth its tens of milliseconds: closed
# connections form reference cycles that hold the data they had read, and an idle server would never start a full
# collection by itself. Without a change of CHANGED_BYTES since the last one there is nothing new to collect.
COLLECT_BYTES, CHANGED_BYTES = 24 << 20, 4 << 20
BUSY_COLLECT_BYTES = 256 << 20  # while many streams are live: a collection visits their objects, too, and stops them
COLLECT_SECONDS = 6.0  # least time between two collections
STATM = "/proc/self/statm"


def _glibc() -> ctypes.CDLL | None:
    """The C library, if it is glibc. Calls through ctypes release the GIL."""
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None


def set_allocator() -> None:
    """Set the thresholds of malloc; call it before threads start. Settings in the environment (MALLOC_...) win."""
    if (libc := _glibc()) is None or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    settings = (M_ARENA_MAX, MAX_ARENAS), (M_MMAP_THRESHOLD, MMAP_BYTES), (M_TRIM_THRESHOLD, MMAP_BYTES)
    if not all(libc.mallopt(*setting) for setting in settings):
        logger.warning("the C library refuses the settings of its allocator")


async def keep_trimmed(is_quiet: Callable[[], bool]) -> None:
    """Whenever the process has grown, return freed memory in a thread; runs until it is cancelled. is_quiet: true while
    a garbage collection stops few streams."""
    if (libc := _glibc()) is None:
        return
    least = collected = anonymous_bytes()
    collected_at, periods = 0.0, 0
    while True:
        await asyncio.sleep(PERIOD_SECONDS)
        now, periods = anonymous_bytes(), periods - 1
        least = min(least, now)
        changed = abs(now - collected) >= CHANGED_BYTES and time.monotonic() - collected_at >= COLLECT_SECONDS
        if collects := changed and now - least >= (COLLECT_BYTES if is_quiet() else BUSY_COLLECT_BYTES):
            gc.collect()
            collected_at = time.monotonic()
        if collects or (now - least >= GROWTH_BYTES and periods <= 0):
            await asyncio.to_thread(libc.malloc_trim, 0)
            after = anonymous_bytes()
            collected = after if collects else collected
            periods = 0 if now - after >= FUTILE_BYTES else FUTILE_PERIODS


def anonymous_bytes() -> int:
    """Resident bytes of this process that are not backed by a file."""
    with open(STATM, encoding="ascii") as statm:
        resident, shared = map(int, statm.read().split()[1:3])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")
