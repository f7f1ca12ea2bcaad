"""StandardStreams: relays stdout and stderr of a server, so that a slow reader of the log never blocks the server.

A log pipe without a reader is full after 64 KiB, and the next line would block the process, or the Worker in the middle
of a step. A server therefore writes to pipes of its own, which a thread always empties; child processes, C libraries
and crash reports write there, too. A second thread writes the lines to the real stream. Only this thread waits for the
reader; lines beyond MAX_BYTES are dropped and counted. A full device, a reader that has gone and a stream that was
closed from the start also lose lines and have no other effect.
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
MAX_BYTES = 1 << 20  # most bytes of lines that wait for the reader, per stream
RESUME_BYTES = MAX_BYTES // 2  # after a dropped line, lines are kept again once the queue is down to this
MAX_LINE_BYTES = 64 << 10  # longer lines are passed on in pieces
WRITE_BYTES = 64 << 10
PARTIAL_LINE_MS = 200  # how long to wait for the rest of a line
CLOSE_SECONDS = 2.0  # how long the reader may take for the remaining lines at the end
NOTICE = "{time} WARNING server.process.standard_streams: {count} lines are missing here: {reason}\n"

_open: list["StandardStreams"] = []
lines_dropped: Counter[str] = Counter()  # stream name -> lines of this process and its children


class Relay:
    """One stream. Bytes written to the descriptor `fd` pass through a pipe and a queue to the old target of `fd`."""

    def __init__(self, fd: int) -> None:
        self._fd, self._name = fd, STREAMS[fd]
        self._target = os.dup(fd)
        self._source, inlet = os.pipe()
        with contextlib.suppress(OSError):  # not always permitted; the default size works, too
            fcntl.fcntl(inlet, fcntl.F_SETPIPE_SZ, MAX_BYTES)
        os.set_blocking(self._source, False)
        os.dup2(inlet, fd)
        os.close(inlet)
        self._end_read, self._end_write = os.pipe()
        self._lines: deque[tuple[int, bytes]] = deque()  # (number of lines dropped before this line, line)
        self._num_bytes = 0  # bytes in _lines
        self._num_dropped = 0  # lines dropped after the last of _lines
        self._changed = threading.Condition()
        self._closing = False
        self._num_lost, self._why = 0, ""  # lost lines that no NOTICE has reported yet, and the reason
        self._torn = False  # the last written line is incomplete
        self._threads = [
            threading.Thread(target=target, name=f"{self._name}-{target.__name__[1:]}", daemon=True)
            for target in (self._read, self._write)
        ]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Connect `fd` to its old target again. The threads still pass on the bytes written before."""
        os.dup2(self._target, self._fd)
        os.write(self._end_write, b"x")

    def join(self, deadline: float) -> None:
        """Wait for the threads until time.monotonic() `deadline`. If the target still blocks then, connect `fd` to
        /dev/null, so that the exit of the process does not block either."""
        self._threads[0].join(max(0.0, deadline - time.monotonic()))
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._threads[1].join(max(0.0, deadline - time.monotonic()))
        if self._threads[1].is_alive():
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), self._fd)

    # The reading thread: waits only for new bytes.

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
            except BlockingIOError:  # the pipe is empty, so poll() reported the byte of end()
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

    # The writing thread: may block forever.

    def _write(self) -> None:
        while True:
            with self._changed:
                while not self._lines and not self._num_dropped and not self._closing:
                    self._changed.wait()
                if not self._lines and not self._num_dropped:
                    return
                num_dropped, lines = self._take_lines()
            if num_dropped:
                self._num_lost, self._why = self._num_lost + num_dropped, "not read in time"
            self._send(lines)

    def _take_lines(self) -> tuple[int, list[bytes]]:
        """Remove lines from the front of the queue: (lines dropped before them, consecutive lines)."""
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
        """Write lines. Lines that cannot be written are lost; the next successful write starts with a NOTICE."""
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
        """(number of bytes written, reason why the rest was not written or "")."""
        left = memoryview(data)
        try:
            while left:
                try:
                    left = left[os.write(self._target, left) :]
                except BlockingIOError:  # another process with the same pipe made it non-blocking
                    poll = select.poll()
                    poll.register(self._target, select.POLLOUT)
                    poll.poll(1000)
        except OSError as error:
            return len(data) - len(left), error.strerror or str(error)
        return len(data), ""


class StandardStreams:
    """A context that relays stdout and stderr of this process and of all its children."""

    def __enter__(self) -> "StandardStreams":
        self._relays = [Relay(fd) for fd in STREAMS]
        _open.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self, seconds: float | None = None) -> None:
        """Pass on all lines written so far, in at most `seconds` (CLOSE_SECONDS). A second call does nothing."""
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
    """Pass on all lines written so far. Call it before os._exit, which skips the exit of contexts."""
    for streams in list(_open):
        streams.close(seconds)


def open_missing_streams() -> None:
    """Connect stdin, stdout and stderr to /dev/null if the process was started without them (`>&-`).

    Otherwise the next file or socket to be opened would get such a descriptor, and all printed text.
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
