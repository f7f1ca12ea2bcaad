"""Memory that the server's process has freed goes back to the system.

glibc keeps what was freed for the next call: in as many arenas as there were threads at work, and with a threshold for
blocks of their own that grows with the blocks that it sees. After one large request a process would stay large. On
other systems, and with another C library, nothing is done: theirs give it back by themselves, or cannot be told to.
"""

import asyncio
import ctypes
import gc
import logging
import os
import platform
import time

logger = logging.getLogger(__name__)

# Of malloc.h. Blocks of a quarter of a megabyte and more are mapped, so that each goes back as soon as it is freed.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
MMAP_BYTES = 256 << 10
MAX_ARENAS = 2
PERIOD_SECONDS = 2.0
GROWTH_BYTES = 8 << 20  # more than the least there ever was, from where trimming is worth its few milliseconds
FUTILE_BYTES, FUTILE_PERIODS = 1 << 20, 4  # what was freed cannot be seen: after a try in vain, so long until the next
# More than the least there ever was, from where a round of the garbage collector is worth tens of milliseconds:
# connections that have ended refer to themselves, with what they had read, and an idle server would never come to its
# next long round. Where nothing has changed since the last one, there is none.
COLLECT_BYTES, CHANGED_BYTES = 24 << 20, 4 << 20
COLLECT_SECONDS = 6.0  # between two rounds, at least
STATM = "/proc/self/statm"


def _glibc() -> ctypes.CDLL | None:
    """Calls through it release the GIL."""
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None


def set_allocator() -> None:
    """Before threads are started. What an operator has set in the environment (MALLOC_...) stands."""
    if (libc := _glibc()) is None or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    settings = (M_ARENA_MAX, MAX_ARENAS), (M_MMAP_THRESHOLD, MMAP_BYTES), (M_TRIM_THRESHOLD, MMAP_BYTES)
    if not all(libc.mallopt(*setting) for setting in settings):
        logger.warning("the C library does not take the settings of its allocator")


async def keep_trimmed() -> None:
    """Give back what was freed, off the event loop, whenever the process has grown; until it is cancelled."""
    if (libc := _glibc()) is None:
        return
    least = collected = anonymous_bytes()
    collected_at, periods = 0.0, 0
    while True:
        await asyncio.sleep(PERIOD_SECONDS)
        now, periods = anonymous_bytes(), periods - 1
        least = min(least, now)
        changed = abs(now - collected) >= CHANGED_BYTES and time.monotonic() - collected_at >= COLLECT_SECONDS
        if collects := changed and now - least >= COLLECT_BYTES:
            gc.collect()
            collected_at = time.monotonic()
        if collects or (now - least >= GROWTH_BYTES and periods <= 0):
            await asyncio.to_thread(libc.malloc_trim, 0)
            after = anonymous_bytes()
            collected = after if collects else collected
            periods = 0 if now - after >= FUTILE_BYTES else FUTILE_PERIODS


def anonymous_bytes() -> int:
    """Of memory that no file stands behind."""
    with open(STATM, encoding="ascii") as statm:
        resident, shared = map(int, statm.read().split()[1:3])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")
