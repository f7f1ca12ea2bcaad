"""stdout and stderr of a server: whoever reads them, or does not, never makes anything else wait.

A log pipe that nobody reads is full after 64 KiB, and from then on the next line stops the process, or the Worker, in
the midst of a step. So a server writes to pipes of its own, which a thread empties at all times; its children, C
libraries and crash reports write there, too. A second thread hands the lines on. It alone waits for the reader, and
what is more than MAX_BYTES then is dropped and counted. A full device, a reader that has left and a stream that was
closed from the start lose lines, too, and nothing else.
"""

import contextlib
import fcntl
import os
import select
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from itertools import accumulate, islice
from types import TracebackType
from typing import TextIO

STREAMS = {1: "stdout", 2: "stderr"}
MAX_BYTES = 1 << 20  # of lines that wait for the reader, for each stream
RESUME_BYTES = MAX_BYTES // 2  # once lines are dropped: the next is kept when so few are left
MAX_LINE_BYTES = 64 << 10  # what is longer is handed on in pieces
WRITE_BYTES = 64 << 10
PARTIAL_LINE_MS = 200  # for the rest of a line to come
CLOSE_SECONDS = 2.0  # for the reader to take what is left at the end
NOTICE = "{time} WARNING server.process.standard_streams: {count} lines are missing here: nobody took them ({reason})\n"

_open: list["StandardStreams"] = []
lines_dropped: Counter[str] = Counter()  # by the name of the stream; of this process and its children


class Relay:
    """One stream. What is written to the descriptor `fd` goes through a pipe and a queue to where `fd` led before."""

    def __init__(self, fd: int) -> None:
        self._fd, self._name = fd, STREAMS[fd]
        self._target = os.dup(fd)
        self._source, inlet = os.pipe()
        with contextlib.suppress(OSError):  # the default is enough where this is not allowed
            fcntl.fcntl(inlet, fcntl.F_SETPIPE_SZ, MAX_BYTES)
        os.set_blocking(self._source, False)
        os.dup2(inlet, fd)
        os.close(inlet)
        self._end_read, self._end_write = os.pipe()
        self._lines: deque[tuple[int, bytes]] = deque()  # and how many were dropped before each
        self._num_bytes = 0  # of these
        self._num_dropped = 0  # behind these
        self._changed = threading.Condition()
        self._closing = False
        self._num_lost, self._why = 0, ""  # lines that are gone, and the reader was not told yet
        self._torn = False  # the last line that was written has no end
        self._threads = [
            threading.Thread(target=target, name=f"{self._name}-{target.__name__[1:]}", daemon=True)
            for target in (self._read, self._write)
        ]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """`fd` leads to its old target again. What came before goes on to be handed there."""
        os.dup2(self._target, self._fd)
        os.write(self._end_write, b"x")

    def join(self, deadline: float) -> None:
        """Wait until that is done, up to time.monotonic() `deadline`. A target that takes nothing until then is left
        behind: `fd` leads to nowhere, so that the end of the process does not wait either."""
        self._threads[0].join(max(0.0, deadline - time.monotonic()))
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._threads[1].join(max(0.0, deadline - time.monotonic()))
        if self._threads[1].is_alive():
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), self._fd)

    # What comes: never waits for anything else.

    def _read(self) -> None:
        poll = select.poll()
        for descriptor in (self._source, self._end_read):
            poll.register(descriptor, select.POLLIN)
        rest = b""
        while True:
            ready = poll.poll(PARTIAL_LINE_MS if rest else None)
            if not ready:
                self._put([rest])
                rest = b""
                continue
            try:
                data = os.read(self._source, WRITE_BYTES)
            except BlockingIOError:  # nothing is left, so it was the sign to end
                break
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > MAX_LINE_BYTES:
                self._put([*(line + b"\n" for line in lines), rest])
                rest = b""
            elif lines:
                self._put([line + b"\n" for line in lines])
        if rest:
            self._put([rest])

    def _put(self, lines: list[bytes]) -> None:
        with self._changed:
            for line in lines:
                if self._num_bytes + len(line) > (RESUME_BYTES if self._num_dropped else MAX_BYTES):
                    lines_dropped[self._name] += 1
                    self._num_dropped += 1
                else:
                    self._lines.append((self._num_dropped, line))
                    self._num_bytes += len(line)
                    self._num_dropped = 0
            self._changed.notify()

    # What goes on: may wait for ever.

    def _write(self) -> None:
        while True:
            with self._changed:
                while not self._lines and not self._num_dropped and not self._closing:
                    self._changed.wait()
                if not self._lines and not self._num_dropped:
                    return
                num_dropped, lines = self._take()
            if num_dropped:
                self._num_lost, self._why = self._num_lost + num_dropped, "not read in time"
            self._send(lines)

    def _take(self) -> tuple[int, list[bytes]]:
        """Lines from the front of the queue, none dropped between them, and how many were dropped before them."""
        if not self._lines:
            num_dropped, self._num_dropped = self._num_dropped, 0
            return num_dropped, []
        num_dropped, line = self._lines.popleft()
        lines, size = [line], len(line)
        while self._lines and not self._lines[0][0] and size < WRITE_BYTES:
            lines.append(self._lines.popleft()[1])
            size += len(lines[-1])
        self._num_bytes -= size
        return num_dropped, lines

    def _send(self, lines: list[bytes]) -> None:
        """Lines that cannot be written are gone. The next that can be come behind a line that says so."""
        prefix = b""
        if self._num_lost:
            now = time.strftime("%Y-%m-%d %H:%M:%S")
            prefix = b"\n" if self._torn else b""
            prefix += NOTICE.format(time=now, count=self._num_lost, reason=self._why).encode()
        data = prefix + b"".join(lines)
        num_written, reason = self._write_all(data)
        if num_written >= len(prefix):
            self._num_lost = 0
        if num_written:
            self._torn = data[num_written - 1 : num_written] != b"\n"
        if reason:
            ends = accumulate(map(len, lines), initial=len(prefix))
            num_lost = sum(end > num_written for end in islice(ends, 1, None))
            lines_dropped[self._name] += num_lost
            self._num_lost, self._why = self._num_lost + num_lost, reason

    def _write_all(self, data: bytes) -> tuple[int, str]:
        """How many bytes were written, and why no more."""
        left = memoryview(data)
        try:
            while left:
                try:
                    left = left[os.write(self._target, left) :]
                except BlockingIOError:  # somebody who has the same pipe made it so
                    poll = select.poll()
                    poll.register(self._target, select.POLLOUT)
                    poll.poll(1000)
        except OSError as error:
            return len(data) - len(left), error.strerror or str(error)
        return len(data), ""


class StandardStreams:
    """A context in which stdout and stderr are relayed, for this process and all that it starts."""

    def __enter__(self) -> "StandardStreams":
        self._relays = [Relay(fd) for fd in STREAMS]
        _open.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self, seconds: float | None = None) -> None:
        """Hand on what was written so far, for `seconds` at most (CLOSE_SECONDS); again, it does nothing."""
        deadline = time.monotonic() + (CLOSE_SECONDS if seconds is None else seconds)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        relays, self._relays = self._relays, []
        if self in _open:
            _open.remove(self)
        for relay in relays:
            relay.end()
        for relay in relays:
            relay.join(deadline)


def close_streams(seconds: float) -> None:
    """Hand on what was written so far, before an end that skips the rest of the process (os._exit)."""
    for streams in list(_open):
        streams.close(seconds)


def open_missing_streams() -> None:
    """Let stdin, stdout and stderr lead nowhere where the process was started without them (`>&-`).

    Else the next file or socket that is opened would take the place of one, and get what is printed.
    """
    for descriptor in _closed_descriptors():
        opened = os.open(os.devnull, os.O_RDWR)
        if opened != descriptor:
            os.dup2(opened, descriptor)
            os.close(opened)
        os.set_inheritable(descriptor, True)
    sys.stdout = sys.stdout or _text_stream(1)
    sys.stderr = sys.stderr or _text_stream(2)


def _closed_descriptors() -> Iterator[int]:
    for descriptor in (0, *STREAMS):
        try:
            os.fstat(descriptor)
        except OSError:
            yield descriptor


def _text_stream(descriptor: int) -> TextIO:
    return os.fdopen(descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
