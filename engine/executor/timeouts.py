"""within: asyncio.wait_for, but for the cancellations that it loses."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def within(seconds: float, coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of `coroutine`; asyncio.TimeoutError, and it is cancelled, where it takes longer.

    Before Python 3.12, asyncio.wait_for returns a result to a task that is cancelled in the very turn of the loop in
    which that result came (cpython issue 86296). Whoever waits for the end of such a task waits for ever.
    """
    task = asyncio.ensure_future(coroutine)
    try:
        await asyncio.wait([task], timeout=seconds)
    finally:
        task.cancel()  # nothing for one that has ended
        await asyncio.gather(task, return_exceptions=True)
    if task.cancelled():
        raise asyncio.TimeoutError
    return task.result()
