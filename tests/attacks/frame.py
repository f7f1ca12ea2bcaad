"""The interface of an attack: what it is given, and what it may return.

An attack is an async function of a Target in a file of its subject under tests/attacks/subjects/, with a docstring:

    @attack(15, seconds=6.0)
    async def brackets_in_a_prompt(target: Target) -> str | None:
        '''A prompt of 32 MB of brackets, 600 levels deep.'''
        await target.post("/v1/completions", BODY)

It runs in a process of its own, which ends it after `seconds`, and may go on for ever until then. What it returns, if
anything, is what went wrong beside what the table shows, such as an answer with a status that it should not have.
Every file of the folder is imported, so a new one needs to be named nowhere.
"""

import asyncio
import importlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.attacks.measure import Limits

SUBJECTS = Path(__file__).parent / "subjects"


@dataclass(frozen=True)
class Target:
    """The server under attack, and the attacker's key, which is not the one of the probe beside it."""

    host: str
    port: int
    key: str
    model: str
    max_model_len: int
    pid: int  # of the server's process, for what an operator or the kernel does to it

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.host, self.port)

    def head(self, path: str, length: int, key: str | None = None, method: str = "POST") -> bytes:
        """The head of a request with a JSON body of `length` bytes; `key` "" leaves the header out."""
        key = self.key if key is None else key
        bearer = f"authorization: Bearer {key}\r\n" if key else ""
        return (
            f"{method} {path} HTTP/1.1\r\nhost: {self.host}\r\n{bearer}content-type: application/json\r\n"
            f"content-length: {length}\r\n\r\n"
        ).encode()

    async def post(self, path: str, body: bytes | dict, key: str | None = None) -> "Answer":
        """Send a request on a connection of its own and read the answer to its end. Raises OSError."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        reader, writer = await self.connect()
        try:
            return await self.ask(reader, writer, self.head(path, len(raw), key) + raw)
        finally:
            writer.close()

    async def get(self, path: str, key: str | None = None) -> "Answer":
        reader, writer = await self.connect()
        try:
            return await self.ask(reader, writer, self.head(path, 0, key, "GET"))
        finally:
            writer.close()

    async def ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, raw: bytes) -> "Answer":
        """Send these bytes and read one answer, which may come before all of them are sent."""
        sending = asyncio.create_task(self._send(writer, raw))
        try:
            return await read_answer(reader)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    @staticmethod
    async def _send(writer: asyncio.StreamWriter, raw: bytes) -> None:
        writer.write(raw)
        await writer.drain()


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


async def read_answer(reader: asyncio.StreamReader) -> Answer:
    """The answer may have any length, or come in chunks. Raises OSError where the connection ends before it does."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
        status = int(head[0].split()[1])
        if "content-length" in headers:
            return Answer(status, headers, await reader.readexactly(int(headers["content-length"])))
        parts = []
        while size := int(await reader.readuntil(b"\r\n"), 16):
            parts.append((await reader.readexactly(size + 2))[:-2])
        return Answer(status, headers, b"".join(parts))
    except asyncio.IncompleteReadError:
        raise ConnectionResetError("the connection ended before the answer did") from None


Function = Callable[[Target], Awaitable[str | None]]


@dataclass(frozen=True)
class Attack:
    """`options` are the server's; `prepare` makes files for them in a folder and returns more of them.

    `open_files` is the soft limit that the server starts with; `log_pipe`: what it logs goes into a pipe that
    nobody reads. `limits` differ where the attack leaves no choice, as one that kills the Worker.
    """

    name: str
    item: int
    function: Function
    seconds: float
    options: tuple[str, ...] = ()
    prepare: Callable[[Path], list[str]] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    open_files: int | None = None
    log_pipe: bool = False
    limits: Limits = field(default_factory=Limits)


ATTACKS: dict[str, Attack] = {}


def attack(item: int, seconds: float = 8.0, **settings) -> Callable[[Function], Function]:
    """Registers an attack under the name of its function; `item` groups attacks of one kind in the table."""

    def register(function: Function) -> Function:
        name = function.__name__
        assert name not in ATTACKS and function.__doc__, f"{name} needs a name of its own and a docstring"
        ATTACKS[name] = Attack(name, item, function, seconds, **settings)
        return function

    return register


def load_attacks() -> dict[str, Attack]:
    for path in sorted(SUBJECTS.glob("*.py")):
        importlib.import_module(f"tests.attacks.subjects.{path.stem}")
    return ATTACKS


async def forever(*functions: Callable[[], Awaitable[object]]) -> None:
    """Each of them again and again, side by side; refusals and cut connections do not end that."""

    async def again(function: Callable[[], Awaitable[object]]) -> None:
        while True:
            try:
                await function()
            except OSError:
                await asyncio.sleep(0.01)

    await asyncio.gather(*(again(function) for function in functions))
