"""RestingThread: work that holds the GIL, off the event loop, with rests that let the event loop run."""

import time
from collections.abc import Callable
from typing import TypeVar

from engine.text.text_threads import FairThreads

T = TypeVar("T")

REST_FROM_SECONDS, REST_SECONDS = 0.005, 0.25


def rest_for(seconds: float) -> None:
    """Sleep, in a thread, for as long as its last work took.

    Work in C may have held the GIL all the time. An answer needs the event loop several times, so without a rest the
    answer would wait for the GIL as often.
    """
    if seconds > REST_FROM_SECONDS:
        time.sleep(min(seconds, REST_SECONDS))


class RestingThread:
    """One thread for work that may hold the GIL. Tenants use the thread in turns, and it rests between two jobs."""

    def __init__(self, name: str) -> None:
        self._thread = FairThreads(1, name)
        self._seconds = self._ended = 0.0  # duration and end of the last job

    async def run(self, tenant: str, work: Callable[[], T]) -> T:
        """The result of `work`."""
        return await self._thread.run(tenant, self._work, work)

    def _work(self, work: Callable[[], T]) -> T:
        rest_for(self._ended + self._seconds - time.perf_counter())
        start = time.perf_counter()
        try:
            return work()
        finally:
            self._ended = time.perf_counter()
            self._seconds = self._ended - start
