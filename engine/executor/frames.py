"""Frames: how every message crosses a socket pair, 4 bytes of length (little-endian) and then the body.

The Worker, the grammar checker and the template helper are spoken to in frames. `read_frame` reads a frame from an
asyncio stream, a FrameSocket reads frames from a blocking socket. No asyncio here: helper processes start quickly.
"""

import socket
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

FRAME_HEADER = struct.Struct("<I")  # length of the body in bytes
MAX_FRAME_BYTES = 1 << 30
READ_BYTES = 1 << 18


class FrameError(ValueError):
    """The other end announced a frame that is longer than MAX_FRAME_BYTES: it does not speak in frames."""


def pack_frame(body: bytes) -> bytes:
    """The frame of a body."""
    return FRAME_HEADER.pack(len(body)) + body


def frame_length(received: bytes | bytearray) -> int:
    """The length of the body, in bytes, from the header that `received` begins with. Raises FrameError."""
    length: int = FRAME_HEADER.unpack_from(received)[0]
    if length > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {length} bytes was announced; at most {MAX_FRAME_BYTES} are allowed")
    return length


async def read_frame(reader: "asyncio.StreamReader") -> bytes:
    """The body of the next frame. Raises asyncio.IncompleteReadError at the end of the stream, FrameError."""
    return await reader.readexactly(frame_length(await reader.readexactly(FRAME_HEADER.size)))


class FrameSocket:
    """Reads frames from a blocking socket; one thread reads."""

    def __init__(self, sock: socket.socket, on_silence: Callable[[], None] | None = None) -> None:
        """`on_silence` is called whenever the socket's timeout passes without a byte; it may raise."""
        self._socket = sock
        self._on_silence = on_silence
        self._received = bytearray()

    @property
    def has_received(self) -> bool:
        """True if bytes of a frame were received that `read_frame` has not returned."""
        return bool(self._received)

    def read_frame(self) -> memoryview | None:
        """The body of the next frame; None if the other end has closed. Raises FrameError, OSError."""
        if not self._receive(FRAME_HEADER.size):
            return None
        end = FRAME_HEADER.size + frame_length(self._received)
        if not self._receive(end):
            return None
        frame, self._received = self._received, self._received[end:]
        return memoryview(frame)[FRAME_HEADER.size : end]

    def _receive(self, num_bytes: int) -> bool:
        """Receive until `num_bytes` are there; False if the other end closed before."""
        while len(self._received) < num_bytes:
            try:
                data = self._socket.recv(READ_BYTES)
            except TimeoutError:
                if self._on_silence is None:
                    raise
                self._on_silence()
                continue
            if not data:
                return False
            self._received += data
        return True
