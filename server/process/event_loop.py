"""The event loop of the server, its load generator and the benchmarks. Imports no engine."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


def run(main: Coroutine[Any, Any, _T]) -> _T:
    """asyncio.run, on uvloop if it is installed: uvloop wakes a stream's reader in a third of the time and sends a
    segment in half."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)
