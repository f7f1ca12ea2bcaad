"""A probe: `python -m tests.attacks.probe FILE HOST PORT INTERVAL BODY KEY` asks the same again and again.

BODY "" asks GET /health, any other is a completion with the key KEY. Every other request has a new connection, so that
both new and kept ones are tried. FILE gets a line of JSON for each: when it began (time.monotonic, which all processes
of a machine share), its seconds, its status (0: the connection failed), and how much too late the probe woke up before
it. That lateness is the machine's, not the server's: where it is large, the figures say little. The probe goes before
all other processes where it may.
"""

import json
import os
import socket
import sys
import time
from contextlib import suppress
from typing import IO

NICENESS = -10
TIMEOUT = 120.0


class Connection:
    """One request after the other, in blocking calls: nothing of the probe's own stands between it and the server."""

    def __init__(self, address: tuple[str, int], raw: bytes) -> None:
        self._address, self._raw = address, raw
        self._socket: socket.socket | None = None

    def ask(self, anew: bool) -> int:
        """The status, once the whole answer is there; 0 where the connection fails, which is tried once more if it was
        a kept one that the server had closed meanwhile."""
        kept = self._socket is not None and not anew
        status = self._try(anew)
        return self._try(True) if kept and not status else status

    def _try(self, anew: bool) -> int:
        try:
            if anew or self._socket is None:
                self.close()
                self._socket = socket.create_connection(self._address, TIMEOUT)
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.sendall(self._raw)
            return self._read(self._socket)
        except (OSError, ValueError):
            self.close()
            return 0

    def _read(self, sock: socket.socket) -> int:
        received = b""
        while b"\r\n\r\n" not in received:
            received += self._receive(sock)
        head, _, body = received.partition(b"\r\n\r\n")
        lines = head.lower().split(b"\r\n")
        length = next(int(line.partition(b":")[2]) for line in lines if line.startswith(b"content-length:"))
        while len(body) < length:
            body += self._receive(sock)
        if b"connection: close" in lines:
            self.close()
        return int(lines[0].split()[1])

    @staticmethod
    def _receive(sock: socket.socket) -> bytes:
        if not (piece := sock.recv(65536)):
            raise ConnectionResetError
        return piece

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def request(host: str, body: str, key: str) -> bytes:
    if not body:
        return f"GET /health HTTP/1.1\r\nhost: {host}\r\n\r\n".encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {key}\r\n"
    return f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()


def run(found: IO[str], connection: Connection, interval: float) -> None:
    """Until the process is ended."""
    late, anew = 0.0, False
    while True:
        start = time.monotonic()
        status = connection.ask(anew)
        found.write(json.dumps([start, time.monotonic() - start, status, late]) + "\n")
        found.flush()
        anew = not anew
        due = time.monotonic() + interval
        time.sleep(interval)
        late = time.monotonic() - due


def main() -> None:
    path, host, port, interval, body, key = sys.argv[1:]
    with suppress(PermissionError):
        os.nice(NICENESS)
    with open(path, "w", encoding="utf-8") as found:
        run(found, Connection((host, int(port)), request(host, body, key)), float(interval))


if __name__ == "__main__":
    main()
