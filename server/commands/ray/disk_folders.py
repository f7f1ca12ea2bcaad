"""A folder of the disk cache for each replica: two of them may run on one node, and a file of blocks has one server."""

import fcntl
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.errors import ConfigError

MAX_REPLICAS = 1024  # on a node
BLOCK_FILES = "kv-blocks*"  # the files of the Workers in the folder, which lock them


class DiskFolders:
    """The settings of a replica with folders of its own: replica-0 of each `disk_cache` if no other process has that,
    else replica-1 and so on. A replica that takes the place of another finds its blocks there."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Lock the folders. Raises ConfigError if one cannot be made."""
        self._locks: list[int] = []
        self.settings = self._with_folders(settings)

    def close(self) -> None:
        """Give the folders up: the server that used them has ended."""
        for lock in self._locks:
            os.close(lock)
        self._locks = []

    def _with_folders(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        changed: dict[str, Any] = {}
        if folder := settings.get("disk_cache"):
            changed["disk_cache"] = str(self._take(Path(folder).expanduser()))
        if models := settings.get("models"):
            changed["models"] = [one if isinstance(one, str) else self._with_folders(one) for one in models]
        return {**settings, **changed}

    def _take(self, shared: Path) -> Path:
        for number in range(MAX_REPLICAS):
            folder = shared / f"replica-{number}"
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                if (lock := _lock(folder / "replica.lock")) is None:
                    continue
            except OSError as error:
                raise ConfigError(
                    f"disk_cache: cannot use {str(folder)!r} ({error.strerror}); name another folder."
                ) from None
            if all(map(_is_free, folder.rglob(BLOCK_FILES))):  # the Worker of a replica that died may be ending
                self._locks.append(lock)
                return folder
            os.close(lock)
        raise ConfigError(
            f"disk_cache: {MAX_REPLICAS} servers use the folders in {str(shared)!r}; name another folder."
        )


def _lock(path: Path) -> int | None:
    """A descriptor that holds the lock of a file; None if another process has it. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _is_free(path: Path) -> bool:
    try:
        lock = _lock(path)
    except OSError:  # the Worker says why it cannot use the file
        return True
    if lock is not None:
        os.close(lock)
    return lock is not None
