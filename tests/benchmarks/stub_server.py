"""A tiny OpenAI-like completion server on raw sockets, so that tests decide every byte and every pause.

As a script it is a server for benchmarks/serve.py: python stub_server.py PORT [VOCAB_SIZE].
"""

import asyncio
import contextlib
import json
import sys
from collections.abc import Callable, Iterator

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def frame(payload: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(payload), payload)


def event(data: object) -> bytes:
    return b"data: %s\n\n" % json.dumps(data).encode()


def choice(index: int = 0, text: str = "x", reason: str | None = None) -> dict:
    return {"choices": [{"index": index, "text": text, "logprobs": None, "finish_reason": reason}], "usage": None}


def usage(prompt: int, output: int) -> dict:
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": output}}


def answer(body: dict) -> Iterator[bytes]:
    """A right answer, one chunk per write: max_tokens texts per sample, usage, [DONE]."""
    samples, count = body["n"], body["max_tokens"]
    for position in range(count):
        for index in range(samples):
            yield frame(event(choice(index, reason="length" if position == count - 1 else None)))
    yield frame(event(usage(len(body["prompt"]), samples * count)))
    yield frame(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def plain(status: int, document: object) -> bytes:
    body = json.dumps(document).encode()
    return b"HTTP/1.1 %d -\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


class StubServer:
    """`write(body)` yields the bytes after the head; a None among them is a pause, "cut" closes the connection."""

    def __init__(self, write: Callable[[dict], Iterator], vocab_size: int = 100_000, max_model_len: int = 4096) -> None:
        self.write, self.vocab_size, self.max_model_len = write, vocab_size, max_model_len
        self.bodies: list[dict] = []
        self.connections = 0
        self.tasks: set[asyncio.Task] = set()

    async def __aenter__(self) -> "StubServer":
        await self.listen(0)
        return self

    async def listen(self, port: int) -> None:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.base_url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}/v1"

    async def __aexit__(self, *_: object) -> None:
        self.server.close()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.tasks.add(asyncio.current_task())
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
                while await self._exchange(reader, writer):
                    pass
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
        body = await reader.readexactly(length)
        if head.startswith("get /v1/models "):
            writer.write(plain(200, {"data": [{"id": "stub", "max_model_len": self.max_model_len}]}))
            return True
        request = json.loads(body)
        self.bodies.append(request)
        if max(request["prompt"]) >= self.vocab_size:
            writer.write(plain(400, {"error": {"message": "token id out of the vocabulary"}}))
            return True
        return await self._stream(request, writer)

    async def _stream(self, request: dict, writer: asyncio.StreamWriter) -> bool:
        writer.write(HEAD)
        for piece in self.write(request):
            if piece == "cut":
                return False
            if piece is None:
                await asyncio.sleep(0.02)
            else:
                writer.write(piece)
                await writer.drain()
        return True


async def serve_forever(port: int, vocab_size: int) -> None:
    server = StubServer(answer, vocab_size)
    await server.listen(port)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve_forever(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 100_000))
