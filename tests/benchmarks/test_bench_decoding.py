"""Framing: whatever the pieces, the same payload and the same events."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.commands.bench.decoding import EventDecoder, ProtocolError, ResponseDecoder

EVENTS = [b'{"a":1}', '{"text":"zwölf"}'.encode(), b"[DONE]"]
BODY = b": ping 0\r\n\r\n" + b"".join(b"data: " + event + b"\n\n" for event in EVENTS)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def chunked(body: bytes, size: int) -> bytes:
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def feed_all(raw: bytes, cuts: list[int]) -> tuple[ResponseDecoder, list[bytes]]:
    http, sse, events = ResponseDecoder(), EventDecoder(), []
    edges = [0, *sorted(cut % len(raw) for cut in cuts), len(raw)]
    for start, end in pairwise(edges):
        assert not http.complete
        events += sse.feed(http.feed(raw[start:end]))
    return http, events


@settings(deadline=None)  # a busy machine is no failure
@given(cuts=st.lists(st.integers(0, 10_000), max_size=12), size=st.integers(1, 60))
def test_a_chunked_stream_split_anywhere(cuts, size):
    http, events = feed_all(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(BODY, size), cuts)
    assert (http.status, http.complete, http.keep_alive, events) == (200, True, True, EVENTS)


def test_a_stream_one_byte_at_a_time():
    raw = HEAD + b"transfer-encoding: Chunked\r\n\r\n" + chunked(BODY, 16)
    assert feed_all(raw, list(range(1, len(raw))))[1] == EVENTS


@settings(deadline=None)
@given(cuts=st.lists(st.integers(0, 10_000), max_size=6))
def test_a_content_length_split_anywhere(cuts):
    http, events = feed_all(HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY, cuts)
    assert http.complete and http.keep_alive and events == EVENTS


def test_without_a_length_the_close_is_the_end():
    http = ResponseDecoder()
    assert http.feed(HEAD + b"\r\n" + BODY) == BODY
    assert not http.complete
    http.close()
    assert http.complete and not http.keep_alive


@pytest.mark.parametrize("missing", [1, 2, 4, 5, 20])
def test_a_cut_chunked_body_is_not_complete_even_when_closed(missing):
    http = ResponseDecoder()
    http.feed((HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(BODY, 30))[:-missing])
    http.close()
    assert not http.complete


def test_an_empty_body_is_complete_at_its_head():
    http = ResponseDecoder()
    assert http.feed(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\nConnection: close\r\n\r\n") == b""
    assert (http.status, http.complete, http.keep_alive) == (503, True, False)


@pytest.mark.parametrize(
    "raw, message",
    [
        (b"SSH-2.0-OpenSSH\r\n\r\n", "not an HTTP response"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: ten\r\n\r\n", "bad Content-Length"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "bad chunk size"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nSum: 1\r\n\r\n", "trailers"),
    ],
)
def test_broken_framing_is_named(raw, message):
    with pytest.raises(ProtocolError, match=message):
        ResponseDecoder().feed(raw)


def test_a_chunk_extension_is_skipped():
    http = ResponseDecoder()
    assert http.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2;x=1\r\nab\r\n0\r\n\r\n") == b"ab"
    assert http.complete


def test_events_end_their_lines_either_way():
    assert EventDecoder().feed(b"data: 1\r\n\r\ndata:2\n\nevent: x\nid: 7\n\n") == [b"1", b"2"]
