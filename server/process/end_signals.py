"""EndSignals: the first SIGINT or SIGTERM drains the server, the second ends the process regardless of its threads.

Python runs signal handlers in the main thread between two bytecode instructions, even while the event loop is blocked.
A handler here only starts a thread: it must not touch the event loop or a lock of the code that it interrupts.
"""

import _thread
import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from types import FrameType

from server.process.standard_streams import close_streams

SIGNALS = (signal.SIGINT, signal.SIGTERM)
LAST_SECONDS = 1.4  # from the second signal to the kill: clients get their last event, the Worker ends
LOG_SECONDS = 0.3  # after the kill, for the reader of the log to take the last lines
EXIT_SECONDS = 2.0  # from the end of an orderly stop to the forced exit, for threads that still run


class EndSignals:
    """`kill` ends the child processes of the server."""

    def __init__(self, kill: Callable[[], None]) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self._kill = kill
        self._numbers: list[int] = []

    @property
    def status(self) -> int:
        """The exit status after the signals so far: 0 for one, 128 + the number of the last signal for more."""
        return 128 + self._numbers[-1] if len(self._numbers) > 1 else 0

    def install(self) -> None:
        """Install the handlers. Call it in the main thread, inside the event loop."""
        self._loop = asyncio.get_running_loop()
        for number in SIGNALS:
            signal.signal(number, self._on_signal)

    def end_soon(self, status: int) -> None:
        """If a signal has come, force the exit after EXIT_SECONDS, in case a thread does not end."""
        if self._numbers:
            _thread.start_new_thread(self._end, (EXIT_SECONDS, status))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._numbers.append(number)
        _thread.start_new_thread(self._set_event, (len(self._numbers), number))

    def _set_event(self, count: int, number: int) -> None:
        event = self.first if count == 1 else self.second
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(event.set)
        if count == 2:
            self._end(LAST_SECONDS, 128 + number)

    def _end(self, seconds: float, status: int) -> None:
        time.sleep(seconds)
        try:
            self._kill()
            close_streams(LOG_SECONDS)
        finally:
            os._exit(status)
