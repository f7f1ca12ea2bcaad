"""VirtualLoop: an asyncio event loop whose clock jumps to the next timer when nothing is ready.

No sockets, no threads, no waiting: hours of timeouts pass in microseconds, and callbacks run in the same order every
time. `run_in_executor` (asyncio.to_thread) runs its function at once.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from tests.sim.violation import fail


class _Clock:
    """Takes the place of the selector: it never has events, and to wait is to move the time on."""

    def __init__(self) -> None:
        self.now = 0.0
        self.deadline = float("inf")
        self.check: Callable[[], None] = lambda: None  # called in every turn of the loop; may raise

    def select(self, timeout: float | None) -> list[Any]:
        self.check()
        if timeout is None:
            fail("deadlock", f"everybody waits for somebody else, at {self.now:.0f} s")
        self.now += max(0.0, timeout)
        if self.now > self.deadline:
            fail("liveness", f"requests have not ended by {self.deadline:.0f} s")
        return []


class VirtualLoop(asyncio.BaseEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self._selector = self.clock = _Clock()

    def time(self) -> float:
        return self.clock.now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def _process_events(self, event_list: list[Any]) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """Wakes a selector from another thread: there is neither."""
