"""A process of our own at the other end of a socket pair: the Worker, and those that check grammars. No fork."""

import os
import socket
import subprocess
from pathlib import Path


def spawn(
    command: tuple[str, ...], *arguments: str, environment: dict[str, str] | None = None
) -> tuple["subprocess.Popen[bytes]", socket.socket]:
    """Start `command FD arguments...`, where FD is its end of the pair; returns the process and our end. OSError."""
    # It imports this very source tree, wherever the caller's working directory is.
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            process = subprocess.Popen(
                [*command, str(theirs.fileno()), *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path, **(environment or {})},
            )
        except BaseException:
            ours.close()
            raise
    return process, ours
