"""Decodes an HTTP/1.1 response to its payload, and the payload to server-sent events. Incremental: input may be split
anywhere."""


class ProtocolError(Exception):
    """The peer broke the framing of HTTP."""


class ResponseDecoder:
    """Decodes one response: chunked, with a Content-Length, or ended by the peer's close (RFC 9112, section 6.3).

    `complete`: the whole response has been fed. Trailers are refused: no model server sends them.
    """

    def __init__(self) -> None:
        self.status = 0
        self.keep_alive = True
        self.complete = False
        self._buffer = b""
        self._in_body = False
        self.chunked = False
        self._ends_by_close = False
        self._left = 0  # bytes to the end of the body, or to the end of the chunk and its CRLF

    def feed(self, data: bytes) -> bytes:
        """Add bytes; returns the payload in them, without framing. Raises ProtocolError."""
        if not self._in_body:
            self._buffer += data
            head, separator, data = self._buffer.partition(b"\r\n\r\n")
            if not separator:
                return b""
            self._buffer = b""
            self._read_head(head)
        if self.chunked:
            return self._feed_chunked(data)
        if self._ends_by_close:
            return data
        payload, self._left = data[: self._left], max(0, self._left - len(data))
        self.complete = self._left == 0
        return payload

    def close(self) -> None:
        """The peer closed the connection, which completes a response without length and chunks."""
        self.complete = self.complete or self._ends_by_close

    def _read_head(self, head: bytes) -> None:
        lines = head.decode("latin-1").split("\r\n")
        fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        parts = lines[0].split(" ", 2)
        if len(parts) < 2 or not parts[0].startswith("HTTP/1.") or not parts[1].isdigit():
            raise ProtocolError(f"not an HTTP response: {lines[0][:60]!r}")
        self._in_body, self.status = True, int(parts[1])
        self.keep_alive = fields.get("connection", "").lower() != "close" and parts[0] == "HTTP/1.1"
        self.chunked = "chunked" in fields.get("transfer-encoding", "").lower()
        length = fields.get("content-length")
        if length is not None and not length.isdigit():
            raise ProtocolError(f"bad Content-Length {length[:60]!r}")
        self._left = 0 if self.chunked else int(length or 0)
        self._ends_by_close = not self.chunked and length is None and self.status != 204
        self.keep_alive = self.keep_alive and not self._ends_by_close

    def _feed_chunked(self, data: bytes) -> bytes:
        payload = []
        data, position = self._buffer + data, 0
        while not self.complete and position < len(data):
            if self._left:
                if self._left > 2:
                    payload.append(data[position : position + self._left - 2])
                step = min(self._left, len(data) - position)
                self._left -= step
                position += step
                continue
            end = data.find(b"\r\n", position)
            size = _chunk_size(data[position:end]) if end >= 0 else 0
            if end < 0 or (size == 0 and len(data) < end + 4):
                break
            position, self._left = end + 2, size + 2
            if size == 0:
                if data[position : position + 2] != b"\r\n":
                    raise ProtocolError("trailers after the last chunk are not supported")
                self.complete, self._left = True, 0
        self._buffer = b"" if self.complete else data[position:]
        return b"".join(payload)


def _chunk_size(line: bytes) -> int:
    try:
        return int(line.partition(b";")[0], 16)
    except ValueError:
        raise ProtocolError(f"bad chunk size {line[:60]!r}") from None


class EventDecoder:
    """Decodes a payload to the `data` of each event, in the subset of SSE that model servers write: single-line data,
    comments, both kinds of line end."""

    def __init__(self) -> None:
        self._tail = b""

    def feed(self, payload: bytes) -> list[bytes]:
        """Add bytes; returns the data of every event line that they complete."""
        lines = (self._tail + payload).split(b"\n")
        self._tail = lines.pop()
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
