"""SIGINT and SIGTERM: the first drains the server, the second ends the process whatever its threads do.

Handlers run in the main thread between two instructions of Python, so also where the event loop is held up. They start
a thread and do nothing else: neither the loop nor a lock is touched inside of whatever they interrupt.
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
LAST_SECONDS = 1.4  # from the second signal to the end, for streams to hear of it and the Worker to go
LOG_SECONDS = 0.3  # behind that, for the last lines of the log to be read
EXIT_SECONDS = 2.0  # from the end of an orderly stop to that of the process, for threads that still work


class EndSignals:
    """`kill` ends the processes that this one has started."""

    def __init__(self, kill: Callable[[], None]) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self._kill = kill
        self._numbers: list[int] = []

    @property
    def status(self) -> int:
        """The exit status after the signals that came: of the last one, where it cut the drain short."""
        return 128 + self._numbers[-1] if len(self._numbers) > 1 else 0

    def install(self) -> None:
        """In the main thread, on the running loop."""
        self._loop = asyncio.get_running_loop()
        for number in SIGNALS:
            signal.signal(number, self._on_signal)

    def end_soon(self, status: int) -> None:
        """End the process in EXIT_SECONDS, if a signal has come and it is still there: some thread does not end."""
        if self._numbers:
            _thread.start_new_thread(self._end, (EXIT_SECONDS, status))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._numbers.append(number)
        _thread.start_new_thread(self._tell, (len(self._numbers), number))

    def _tell(self, count: int, number: int) -> None:
        event = self.first if count == 1 else self.second
        with contextlib.suppress(RuntimeError):  # the loop has closed
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
