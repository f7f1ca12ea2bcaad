"""The bytes of a stream, as its client reads them from the socket."""

import subprocess
import sys

import pytest

from tests.server.live import completion_body
from tests.server.raw_requests import send_raw


def http_chunks(raw: bytes) -> list[bytes]:
    """The chunks of a response (RFC 9112, section 7.1); the last is empty."""
    rest, chunks = raw.partition(b"\r\n\r\n")[2], [b"-"]
    while chunks[-1]:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        chunks.append(rest[:length])
        assert rest[length : length + 2] == b"\r\n"
        rest = rest[length + 2 :]
    assert not rest
    return chunks[1:]


def stream_chunks(server, **fields) -> list[bytes]:
    raw = b""
    with send_raw(server, completion_body(stream=True, **fields)) as connection:
        while not raw.endswith(b"\r\n0\r\n\r\n"):
            raw += connection.recv(1 << 16)
    return http_chunks(raw)


@pytest.mark.parametrize("n", [1, 3])
def test_the_last_tokens_come_with_the_end(server, n):
    *earlier, last, end = stream_chunks(server, n=n, max_tokens=4)
    assert end == b""
    assert b'"finish_reason":"length"' in last and last.endswith(b"data: [DONE]\n\n")
    assert b"".join([*earlier, last]).count(b'"finish_reason":"length"') == n


def test_a_prompt_that_ends_first_does_not_wait_for_the_others(server):
    *earlier, last, _ = stream_chunks(server, prompt=["a", "b"], max_tokens=3)
    assert last == b"data: [DONE]\n\n"
    assert b"".join(earlier).count(b'"finish_reason":"length"') == 2


def test_the_first_request_does_not_wait_for_imports():
    """anyio imports its part for an event loop when the first task asks for a time limit."""
    program = (
        "import asyncio, sys; from server.serve import load_models; asyncio.run(load_models([])); "
        "sys.exit('anyio._backends._asyncio' not in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
