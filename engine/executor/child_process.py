"""A process of our own at the other end of a socket pair: the Worker, and those that check grammars. No fork."""

import asyncio
import os
import re
import socket
import subprocess
import weakref
from collections.abc import Mapping
from pathlib import Path

BUFFER_BYTES = 1 << 20
# HF_TOKEN, OPENAI_API_KEY, AWS_SECRET_ACCESS_KEY; headers of OpenTelemetry carry keys. Not TOKENIZERS_PARALLELISM.
SECRET = re.compile(r"(^|_)(\w*KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|HEADERS)(_|$)", re.IGNORECASE)
_children: "weakref.WeakSet[subprocess.Popen[bytes]]" = weakref.WeakSet()


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables but for those whose name says that they hold a key, a token or a password.

    A child loads what lies on this machine and talks to us alone, and its environment can be read in more places.
    """
    return {name: value for name, value in environment.items() if not SECRET.search(name)}


def spawn(
    command: tuple[str, ...], *arguments: str, environment: dict[str, str] | None = None
) -> tuple["subprocess.Popen[bytes]", socket.socket]:
    """Start `command FD arguments...`, where FD is its end of the pair; returns the process and our end. OSError."""
    # It imports this very source tree, wherever the caller's working directory is.
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            process = subprocess.Popen(
                [*command, str(theirs.fileno()), *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**without_secrets(os.environ), "PYTHONPATH": path, **(environment or {})},
            )
        except BaseException:
            ours.close()
            raise
    _children.add(process)
    return process, ours


def kill_children() -> None:
    """Kill whatever `spawn` has started and has not been waited for; returns at once."""
    for process in list(_children):
        process.kill()


async def connect(ours: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Streams over our end; it is closed, which is the process's sign to go, where that fails or is cancelled."""
    try:
        return await asyncio.open_unix_connection(sock=ours, limit=BUFFER_BYTES)
    except BaseException:
        ours.close()
        raise
