"""Clients that ask for much and read nothing, or next to nothing."""

import asyncio
import json
import socket

from tests.attacks.frame import Target, attack

STALL_SECONDS = 60.0  # what the server allows
SMALL_BUFFER = 4096  # of the client's socket, so that the answer stays with the server


async def ask_and_never_read(target: Target, raw: bytes) -> asyncio.StreamWriter:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (target.host, target.port))
    _, writer = await asyncio.open_connection(sock=sock, limit=1)
    writer.transport.pause_reading()
    writer.write(raw)
    return writer


def echoed_body(target: Target) -> bytes:
    """Asks for some 35 MB: 80 choices that each repeat a prompt with the logprobs of its tokens."""
    prompt = [7] * (target.max_model_len - 8)
    body = {"model": target.model, "prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 5}
    return json.dumps({**body, "n": (1 << 20) // (6 * len(prompt)) - 1}).encode()


@attack(19, seconds=90.0)
async def unread_answers(target: Target) -> str | None:
    """Pages of metrics and long answers with logprobs that nobody reads: each connection has an end within 60 s."""
    pages = target.head("/metrics", 0, method="GET") * 400
    body = echoed_body(target)
    answers = target.head("/v1/completions", len(body)) + body
    writers = [await ask_and_never_read(target, raw) for raw in [pages] * 8 + [answers] * 2]
    try:
        await asyncio.sleep(STALL_SECONDS + 20.0)
        closed = await asyncio.gather(*map(is_closed, writers))
        open_ones = closed.count(False)
        return f"{open_ones} of {len(writers)} connections are still open" if open_ones else None
    finally:
        for writer in writers:
            writer.transport.abort()


async def is_closed(writer: asyncio.StreamWriter) -> bool:
    """Whether the server has cut the connection: what is sent on it comes back as a reset."""
    try:
        for _ in range(3):
            writer.write(b"\r\n")
            await writer.drain()
            await asyncio.sleep(0.1)
    except OSError:
        return True
    return writer.transport.is_closing()


@attack(19, seconds=40.0)
async def answers_of_logprobs(target: Target) -> str | None:
    """128 samples of the longest answer with 20 alternatives to each token: five million logprobs in one answer."""
    messages = [{"role": "user", "content": "a"}]
    body = {"model": target.model, "messages": messages, "logprobs": True, "top_logprobs": 20, "n": 128}
    tokens = target.max_model_len - 64
    answer = await target.post("/v1/chat/completions", {**body, "max_tokens": tokens, "ignore_eos": True})
    return None if answer.status == 400 else f"it was answered with {answer.status}: {len(answer.body)} bytes"


@attack(19, seconds=30.0)
async def large_answers(target: Target) -> None:
    """Two clients with answers of as many logprobs as are allowed in one."""
    messages = [{"role": "user", "content": "a"}]
    tokens = target.max_model_len - 64
    body = {"model": target.model, "messages": messages, "logprobs": True, "top_logprobs": 20, "n": 20}
    raw = json.dumps({**body, "max_tokens": tokens, "ignore_eos": True}).encode()

    async def again() -> None:
        while True:
            await target.post("/v1/chat/completions", raw)

    await asyncio.gather(again(), again(), return_exceptions=True)
