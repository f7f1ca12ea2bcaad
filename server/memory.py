"""Memory that the server's process has freed goes back to the system.

glibc keeps what was freed for the next call: in as many arenas as there were threads at work, and with a threshold for
blocks of their own that grows with the blocks that it sees. After one large request a process would stay large. On
other systems, and with another C library, nothing is done: theirs give it back by themselves, or cannot be told to.
"""

import asyncio
import ctypes
import logging
import os
import platform

logger = logging.getLogger(__name__)

# Of malloc.h. Blocks of a quarter of a megabyte and more are mapped, so that each goes back as soon as it is freed.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
MMAP_BYTES = 256 << 10
MAX_ARENAS = 2
PERIOD_SECONDS = 2.0
GROWTH_BYTES = 8 << 20  # since the last time, from where trimming is worth its few milliseconds
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
    after = anonymous_bytes()
    while True:
        await asyncio.sleep(PERIOD_SECONDS)
        if anonymous_bytes() - after >= GROWTH_BYTES:
            await asyncio.to_thread(libc.malloc_trim, 0)
            after = anonymous_bytes()
        after = min(after, anonymous_bytes())


def anonymous_bytes() -> int:
    """Of memory that no file stands behind."""
    with open(STATM, encoding="ascii") as statm:
        resident, shared = map(int, statm.read().split()[1:3])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")
