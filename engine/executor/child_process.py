"""Starts our child processes, each behind a socket pair: the Worker and the helpers for grammars and templates. No
fork."""

import asyncio
import os
import re
import socket
import subprocess
import weakref
from collections.abc import Mapping
from pathlib import Path

BUFFER_BYTES = 1 << 20
# Matches HF_TOKEN, OPENAI_API_KEY, AWS_SECRET_ACCESS_KEY and OpenTelemetry's headers; not TOKENIZERS_PARALLELISM.
SECRET = re.compile(r"(^|_)(\w*KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|HEADERS)(_|$)", re.IGNORECASE)
_children: weakref.WeakSet[subprocess.Popen[bytes]] = weakref.WeakSet()


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Remove the variables whose names say that they hold a key, a token or a password.

    A child needs none: it loads local files and talks to its parent only. Its environment can be read in more places.
    """
    return {name: value for name, value in environment.items() if not SECRET.search(name)}


def spawn(
    command: tuple[str, ...], *arguments: str, environment: dict[str, str] | None = None
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start `command FD arguments...`, where FD is its end. Returns the process and our end. Raises OSError."""
    # The child imports this source tree, wherever the caller's working directory is.
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
    """Kill all processes that `spawn` has started and that still run; returns at once."""
    for process in list(_children):
        process.kill()


async def connect(ours: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open streams over our end. On failure or cancellation, close it: then the child process ends itself."""
    try:
        return await asyncio.open_unix_connection(sock=ours, limit=BUFFER_BYTES)
    except BaseException:
        ours.close()
        raise
