"""with_timeout: asyncio.wait_for that loses no cancellation."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def with_timeout(seconds: float, coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of `coroutine`. Cancels it and raises asyncio.TimeoutError after `seconds`.

    Before Python 3.12, asyncio.wait_for returns a result to a task that is cancelled in the same turn of the loop in
    which that result came (cpython issue 86296). A caller that waits for the end of such a task waits for ever.
    """
    task = asyncio.ensure_future(coroutine)
    try:
        await asyncio.wait([task], timeout=seconds)
    finally:
        task.cancel()  # has no effect on a task that has ended
        await asyncio.gather(task, return_exceptions=True)
    if task.cancelled():
        raise asyncio.TimeoutError
    return task.result()
