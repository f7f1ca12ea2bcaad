"""Asks the system for what it grants of the processor. Imports neither torch nor numba."""

import ctypes
import platform
from functools import cache

ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18  # from Linux' headers for x86-64


@cache
def may_use_tiles() -> bool:
    """Ask Linux for the tiles of AMX, for all threads of this process: it saves their 8 KiB for nobody who has not
    asked (Documentation/arch/x86/xstate.rst). False if it refuses, or the processor has none."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return False
    return ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA) == 0
