"""Connections that never get to the point, and heads that never end."""

import json
import socket
import time
from urllib.parse import urlsplit

import pytest

from tests.server.live import LiveServer, completion_body, events, expected_text


def connect(live: LiveServer) -> socket.socket:
    url = urlsplit(live.url)
    connection = socket.create_connection((url.hostname, url.port))
    connection.settimeout(10)
    return connection


def read_all(connection: socket.socket) -> bytes:
    """Until the server closes."""
    received = b""
    try:
        while piece := connection.recv(65536):
            received += piece
    except ConnectionResetError:
        pass
    return received


def assert_refused(raw: bytes, status: int) -> None:
    head, _, body = raw.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), raw[:200]
    assert b"connection: close" in head and b"\r\nx-request-id: req-" in head
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


def send_until_refused(connection: socket.socket, head: bytes, piece: bytes, times: int) -> bytes:
    try:
        connection.sendall(head)
        for _ in range(times):
            connection.sendall(piece)
    except (BrokenPipeError, ConnectionResetError):
        pass
    return read_all(connection)


@pytest.mark.parametrize(
    "raw",
    [
        b"GARBAGE\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
        b"GET /\xff HTTP/1.1\r\nbad header\r\n\r\n",
    ],
)
def test_what_is_not_http_is_a_400_in_the_envelope(server, raw):
    with connect(server) as connection:
        connection.sendall(raw)
        assert_refused(read_all(connection), 400)


def test_too_many_headers(server):
    with connect(server) as connection:
        received = send_until_refused(connection, b"GET /health HTTP/1.1\r\n", b"x-a: 1\r\n" * 10, 2000)
        assert_refused(received, 431)
    with connect(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + b"x-a: 1\r\n" * 120 + b"\r\n")
        assert read_all(connection).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("num_bytes, status", [(65_000, 200), (65_537, 431), (70_000, 431), (200_000, 431)])
def test_headers_that_are_too_long(server, num_bytes, status):
    with connect(server) as connection:
        head = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\nx-a: %b\r\n\r\n" % (b"a" * num_bytes)
        received = send_until_refused(connection, head, b"", 0)
        assert received.startswith(b"HTTP/1.1 %d " % status) or (received == b"" and status == 431)  # reset before


@pytest.mark.parametrize("num_bytes", [65_536, 70_000, 200_000])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_url_that_is_too_long(server, num_bytes, at_once):
    url = b"/" + b"a" * (num_bytes - 1)
    with connect(server) as connection:
        if at_once:
            received = send_until_refused(connection, b"GET " + url + b" HTTP/1.1\r\nHost: x\r\n\r\n", b"", 1)
        else:
            received = send_until_refused(connection, b"GET /", url[1:1001], num_bytes // 1000 + 2)
        assert received == b"" or received.startswith(b"HTTP/1.1 431"), "not a 400 that speaks of HTTP"
        if at_once and num_bytes < 100_000:
            assert_refused(received, 431)
    with connect(server) as connection:
        connection.sendall(b"GET /" + b"a" * 30_000 + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert read_all(connection).startswith(b"HTTP/1.1 404")


def test_a_header_that_never_ends(server):
    with connect(server) as connection:
        received = send_until_refused(connection, b"GET /health HTTP/1.1\r\nx-a: ", b"a" * 10_000, 2000)
        assert received == b"" or received.startswith(b"HTTP/1.1 431")


@pytest.mark.parametrize("sent", [b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: x\r\n"])
def test_heads_have_a_deadline(server, monkeypatch, sent):
    monkeypatch.setattr("server.http.http_protocol.HEAD_SECONDS", 0.2)
    with connect(server) as connection:
        start = time.monotonic()
        connection.sendall(sent)
        assert_refused(read_all(connection), 408)
        assert 0.15 < time.monotonic() - start < 3


def test_one_byte_at_a_time_does_not_help(server, monkeypatch):
    monkeypatch.setattr("server.http.http_protocol.HEAD_SECONDS", 0.3)
    with connect(server) as connection:
        start = time.monotonic()
        try:
            for byte in b"GET /health HTTP/1.1\r\nHost: " + b"x" * 200:
                connection.send(bytes([byte]))
                time.sleep(0.01)
        except (BrokenPipeError, ConnectionResetError):
            pass
        assert time.monotonic() - start < 2


def test_a_kept_connection_may_idle_longer_than_a_head(server, monkeypatch):
    monkeypatch.setattr("server.http.http_protocol.HEAD_SECONDS", 0.5)
    with connect(server) as connection:
        for _ in range(2):
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            received = connection.recv(65536)
            while not received.endswith(b'"ok"}'):
                received += connection.recv(65536)
            assert received.startswith(b"HTTP/1.1 200")
            time.sleep(0.8)


def test_a_body_has_a_deadline(server, monkeypatch):
    monkeypatch.setattr("server.http.body.BODY_SECONDS", 0.2)
    with connect(server) as connection:
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n"
        )
        connection.sendall(head + b'{"model')
        assert_refused(read_all(connection), 408)


def test_a_pipelined_request_waits_for_the_stream_before_it(folder, monkeypatch):
    """The deadline of the second head may not cut the first response."""
    monkeypatch.setattr("server.http.http_protocol.HEAD_SECONDS", 0.2)
    with LiveServer(folder, "--step-seconds", "0.01") as live, connect(live) as connection:
        raw = json.dumps(completion_body(stream=True, max_tokens=60)).encode()
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        )
        connection.sendall(head % len(raw) + raw + b"GET /health HT")
        received = read_all(connection)
        chunked, _, refused = received.partition(b"\r\n\r\n")[2].partition(b"0\r\n\r\n")
        lines = [line for line in chunked.split(b"\r\n") if line.startswith(b"data: ") or line.endswith(b"\n\n")]
        assert events(b"".join(lines).decode())[-1] == "[DONE]"
        assert_refused(refused, 408)


def test_chunks_of_a_few_bytes_are_one_body(server):
    raw = json.dumps(completion_body()).encode()
    with connect(server) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        for i in range(0, len(raw), 6):
            piece = raw[i : i + 6]
            connection.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))
        connection.sendall(b"0\r\n\r\n")
        assert read_all(connection).startswith(b"HTTP/1.1 200")


def test_length_and_chunked_together_are_refused(server):
    with connect(server) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n"
        connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n")
        assert_refused(read_all(connection), 400)


@pytest.mark.parametrize("upgrade", [b"", b"Connection: Upgrade\r\nUpgrade: h2c\r\n"])
@pytest.mark.parametrize(
    "version, headers, status",
    [
        (b"1.1", b"", 400),
        (b"1.1", b"Host: x\r\nHost: x\r\n", 400),
        (b"1.0", b"Host: x\r\nHost: y\r\n", 400),
        (b"1.0", b"", 200),
        (b"1.1", b"hOST:\r\n", 200),
        (b"1.1", b"Host: x\r\nTransfer-Encoding: gzip, chunked\r\n", 501),
        (b"1.1", b"Host: x\r\nTransfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n", 501),
        (b"1.1", b"Host: x\r\nTransfer-Encoding: Chunked\r\n", 200),
        (b"1.0", b"Host: x\r\nTransfer-Encoding: chunked\r\n", 400),
    ],
)
def test_hosts_and_transfer_codings(server, version, headers, status, upgrade):
    with connect(server) as connection:
        close = b"" if upgrade else b"Connection: close\r\n"
        body = b"0\r\n\r\n" if b"Transfer" in headers else b""
        connection.sendall(b"GET /health HTTP/%b\r\n%b\r\n%b" % (version, headers + upgrade + close, body))
        if status == 200:
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        else:
            assert_refused(read_all(connection), status)


@pytest.mark.parametrize("stream", [True, False])
def test_http_1_0_gets_no_chunks(server, stream):
    """Its clients would read the sizes of chunks as text."""
    body = json.dumps(completion_body(stream=stream)).encode()
    with connect(server) as connection:
        head = b"POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        connection.sendall(head % len(body) + body)
        head, _, answer = read_all(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200") and b"transfer-encoding" not in head and b"connection: close" in head
    if stream:
        assert answer.startswith(b"data: {") and b"content-length" not in head
        *chunks, done = events(answer.decode())
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        assert done == "[DONE]" and answer.endswith(b"[DONE]\n\n")
    else:
        text = json.loads(answer)["choices"][0]["text"]
    assert text == expected_text(b"hello", 1, 8)


UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAA\r\n"


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("pieces", [1, 2, 40])
def test_who_asks_for_another_protocol_is_answered_in_this_one(server, pieces, chunked):
    """As Java's own client does with every request, and curl with --http2."""
    body = json.dumps(completion_body()).encode()
    framing, sent = b"Content-Length: %d\r\n" % len(body), body
    if chunked:
        framing, sent = b"Transfer-Encoding: chunked\r\n", b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" + framing
    last = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close, Upgrade\r\nUpgrade: h2c\r\n\r\n"
    raw = head + UPGRADE + b"\r\n" + sent + head + b"\r\n" + sent + last
    with connect(server) as connection:
        for i in range(pieces):
            connection.sendall(raw[i * len(raw) // pieces : (i + 1) * len(raw) // pieces])
            time.sleep(0.01 if pieces > 1 else 0.0)
        received = read_all(connection)
    assert received.count(b"HTTP/1.1 200") == 3 and b"HTTP/1.1 4" not in received
    assert received.count(b'"text_completion"') == 2 and received.endswith(b'"ok"}')


def test_who_asks_for_another_protocol_keeps_its_version(server):
    body = json.dumps(completion_body(stream=True)).encode()
    head = b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: %d\r\n" % len(body)
    with connect(server) as connection:
        connection.sendall(head + UPGRADE + b"\r\n" + body)
        received = read_all(connection)
    assert b"transfer-encoding" not in received and received.endswith(b"data: [DONE]\n\n")


def test_a_body_that_is_too_large_is_refused_before_it_is_asked_for(folder):
    with LiveServer(folder, max_body_bytes=4096) as live, connect(live) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(head + b"Content-Length: 5000\r\nExpect: 100-continue\r\n\r\n")
        assert_refused(read_all(connection), 413)
