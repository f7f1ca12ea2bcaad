"""Thread pools for tokenizing and rendering: tenants take turns, and short texts never wait for long ones."""

import asyncio
import contextlib
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from engine.errors import STOPPED, UnavailableError
from engine.executor.fair_slots import FairSlots

T = TypeVar("T")
QUICK_CHARS = 1 << 14  # most characters of a short text: 2 to 20 ms, depending on the tokenizer
NUM_QUICK = 2
NUM_LONG = max(1, min(4, (os.cpu_count() or 1) // 4))  # leaves cores to the Worker and the event loop


class FairThreads:
    """A pool of threads. A job waits for its tenant's turn; no tenant holds more than `per_tenant` threads."""

    def __init__(self, num_threads: int, name: str, per_tenant: int | None = None) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._slots = FairSlots(num_threads, per_tenant)
        self._closed = False

    async def run(self, tenant: str, function: Callable[..., T], *args: Any) -> T:
        """Call `function` in a thread; returns its result or raises its error. If the caller is cancelled meanwhile,
        the function runs on and its thread stays in use until the function returns. UnavailableError after `close`."""
        await self._slots.acquire(tenant)
        loop = asyncio.get_running_loop()

        def free(_: Future[T]) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(self._slots.release, tenant)

        try:
            self._require_open()
            job = self._pool.submit(self._work, function, *args)
        except BaseException:
            self._slots.release(tenant)
            raise
        job.add_done_callback(free)
        return await asyncio.wrap_future(job)

    def close(self) -> None:
        """Start no more functions. Does not wait for those that run."""
        self._closed = True
        self._pool.shutdown(wait=False)  # to cancel jobs would cancel the tasks that wait for them

    def _work(self, function: Callable[..., T], *args: Any) -> T:
        self._require_open()
        return function(*args)

    def _require_open(self) -> None:
        if self._closed:
            raise UnavailableError(STOPPED)


class TextThreads:
    """Two thread pools: one for short texts, one for long texts. Encoding releases the GIL."""

    def __init__(self) -> None:
        self._quick = FairThreads(NUM_QUICK, "tokenizer")
        self._long = FairThreads(NUM_LONG, "tokenizer-long")

    async def run(self, tenant: str, num_chars: int, function: Callable[..., T], *args: Any) -> T:
        """Call `function` in a thread; `num_chars` is the length of the text that it reads or writes."""
        threads = self._quick if num_chars <= QUICK_CHARS else self._long
        return await threads.run(tenant, function, *args)

    def close(self) -> None:
        self._quick.close()
        self._long.close()
