"""Connections: too many, too slow, and such that try to be two requests, or somebody else."""

import asyncio
import os
import signal

from benchmarks.processes import session_and_descendants
from tests.attacks.frame import Target, attack, forever, read_answer
from tests.attacks.measure import Limits

FEW_FILES = 1024


async def hold(target: Target, number: int, held: list[asyncio.StreamWriter]) -> None:
    """Open connections that ask for /health once, and keep them; those that the server closes are opened again."""

    async def one() -> None:
        reader, writer = await target.connect()
        held.append(writer)
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        await read_answer(reader)
        await reader.read()
        await asyncio.sleep(0.2)

    await forever(*[one] * number)


async def as_it_should(target: Target) -> str | None:
    """Whether a valid key gets a structured answer on a new connection."""
    body = {"model": target.model, "prompt": "a", "max_tokens": 8, "structured_outputs": {"regex": "[ab]{3}"}}
    try:
        answer = await target.post("/v1/completions", body)
    except OSError as error:
        return f"a valid key's connection failed: {error}"
    return None if answer.status == 200 else f"a structured answer has status {answer.status}"


@attack(18, seconds=10.0, open_files=FEW_FILES)
async def idle_connections(target: Target) -> str | None:
    """1,300 kept connections without a key, where the server may open 1,024 files."""
    holding = asyncio.create_task(hold(target, 1300, held := []))
    try:
        await asyncio.sleep(6.0)
        return await as_it_should(target)
    finally:
        holding.cancel()
        for writer in held:
            writer.transport.abort()


# The other key has to wait until the next Worker has loaded.
UNTIL_LOADED = Limits(other_key_worst_ms=30_000.0, other_key_p50_ratio=1000.0)


@attack(18, seconds=40.0, open_files=FEW_FILES, limits=UNTIL_LOADED)
async def idle_connections_when_the_worker_dies(target: Target) -> str | None:
    """The same, and a Worker that is killed meanwhile: the next one finds the descriptors that it needs."""
    holding = asyncio.create_task(hold(target, 1300, held := []))
    try:
        await asyncio.sleep(3.0)
        workers = [pid for pid in session_and_descendants(target.pid) if is_worker(pid)]
        os.kill(workers[0], signal.SIGKILL)
        await asyncio.sleep(0.5)
        return await as_it_should(target)
    finally:
        holding.cancel()
        for writer in held:
            writer.transport.abort()


def is_worker(pid: int) -> bool:
    with open(f"/proc/{pid}/cmdline", "rb") as command:
        return b"engine.worker.worker" in command.read()


@attack(18, seconds=8.0)
async def connections_that_come_and_go(target: Target) -> None:
    """Forty clients that open a connection, ask for /health and close it, as fast as they can."""

    async def one() -> None:
        await target.get("/health", key="")

    await forever(*[one] * 40)


@attack(18, seconds=15.0)
async def heads_that_never_end(target: Target) -> None:
    """Five hundred connections that send a byte of a header twice a second."""

    async def one() -> None:
        reader, writer = await target.connect()
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nx-a: ")
        try:
            while not reader.at_eof():
                writer.write(b"a")
                await writer.drain()
                await asyncio.sleep(0.5)
        finally:
            writer.transport.abort()

    await forever(*[one] * 500)


@attack(18, seconds=6.0)
async def pipelined_requests(target: Target) -> None:
    """Twenty connections that send requests for a page of metrics without waiting for answers."""
    raw = target.head("/metrics", 0, method="GET") * 50

    async def one() -> None:
        reader, writer = await target.connect()
        try:
            writer.write(raw)
            for _ in range(50):
                await read_answer(reader)
        finally:
            writer.transport.abort()

    await forever(*[one] * 20)


@attack(18, seconds=6.0)
async def wrong_keys(target: Target) -> str | None:
    """Keys by the thousand on forty connections, of 4 KB each; and paths that look public."""
    paths = ("/v1/models", "//health/../v1/models", "/health/..%2fv1/models", "/HEALTH", "/health/", "/./metrics")
    statuses = set[int]()

    async def one() -> None:
        reader, writer = await target.connect()
        try:
            for i in range(200):
                key = f"{i:04x}" * 1000
                writer.write(target.head(paths[i % len(paths)], 0, key=key, method="GET"))
                statuses.add((await read_answer(reader)).status)
        finally:
            writer.close()

    try:
        await asyncio.wait_for(forever(*[one] * 40), 5.0)
    except asyncio.TimeoutError:
        pass
    return None if statuses == {401} else f"answers had the statuses {sorted(statuses)}"


# Each tries to have a part of it taken for a second request, of /metrics, by the server or by a proxy in front of it.
SMUGGLED = b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n"
SMUGGLING = (
    b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n\r\n0\r\n\r\n" + SMUGGLED,
    b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    b"content-length: 0\r\ncontent-length: 40\r\n\r\n" + SMUGGLED,
    b"content-length: +0\r\n\r\n" + SMUGGLED,
    b"content-length: 0x0\r\n\r\n" + SMUGGLED,
    b"transfer-encoding: chunked\r\n\r\n-1\r\n\r\n" + SMUGGLED,
    b"transfer-encoding: chunked\r\n\r\nffffffffffffffff1\r\n\r\n" + SMUGGLED,
)


@attack(18, seconds=6.0)
async def smuggled_requests(target: Target) -> str | None:
    """Heads whose end two parsers could see in different places: none may be answered as two requests."""

    async def one(framing: bytes) -> str | None:
        reader, writer = await target.connect()
        try:
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n" + framing)
            writer.write_eof()
            received = await reader.read()
        except ConnectionResetError:
            return None
        finally:
            writer.close()
        answers = received.count(b"HTTP/1.1 ")
        return f"{framing[:40]!r} got {answers} answers" if answers > 1 or b" 200 OK" in received else None

    faults = await asyncio.gather(*(one(framing) for framing in SMUGGLING))
    return next(filter(None, faults), None)
