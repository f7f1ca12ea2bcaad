"""Frames over a socket pair, from a blocking socket and from an asyncio stream."""

import asyncio
import socket

import pytest

from engine.executor.frames import FRAME_HEADER, MAX_FRAME_BYTES, FrameError, FrameSocket, pack_frame, read_frame

BODIES = [b"", b"a", b"plan" * 1000, b"x" * 300_000]


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize("size", [1, 3, 1000, 1 << 20])
def test_bodies_come_out_as_they_went_in_however_they_are_cut(pair, size):
    ours, theirs = pair
    ours.settimeout(0.001)
    data = b"".join(map(pack_frame, BODIES[:3]))
    pieces = [data[i : i + size] for i in range(0, len(data), size)]
    frames = FrameSocket(ours, lambda: theirs.sendall(pieces.pop(0)))
    assert [bytes(frames.read_frame()) for _ in range(3)] == BODIES[:3]
    assert not frames.has_received and not pieces


def test_the_start_of_the_next_frame_is_kept(pair):
    ours, theirs = pair
    frames = FrameSocket(ours)
    theirs.sendall(pack_frame(b"one") + pack_frame(b"two"))
    assert frames.read_frame() == b"one" and frames.has_received
    assert frames.read_frame() == b"two" and not frames.has_received


@pytest.mark.parametrize("sent", [b"", b"\x01", pack_frame(b"whole")[:-1]])
def test_the_other_end_may_close_at_any_byte(pair, sent):
    ours, theirs = pair
    theirs.sendall(sent)
    theirs.close()
    assert FrameSocket(ours).read_frame() is None


def test_silence_without_a_handler_is_an_error(pair):
    ours, _ = pair
    ours.settimeout(0.001)
    with pytest.raises(TimeoutError):
        FrameSocket(ours).read_frame()


async def test_an_asyncio_stream_gives_the_same_bodies():
    reader = asyncio.StreamReader()
    reader.feed_data(b"".join(map(pack_frame, BODIES)))
    reader.feed_eof()
    assert [await read_frame(reader) for _ in BODIES] == BODIES
    with pytest.raises(asyncio.IncompleteReadError):
        await read_frame(reader)


async def test_an_endless_frame_is_refused_before_its_body_comes(pair):
    ours, theirs = pair
    header = FRAME_HEADER.pack(MAX_FRAME_BYTES + 1)
    theirs.sendall(header)
    with pytest.raises(FrameError, match="at most"):
        FrameSocket(ours).read_frame()
    reader = asyncio.StreamReader()
    reader.feed_data(header)
    with pytest.raises(FrameError, match="at most"):
        await read_frame(reader)
