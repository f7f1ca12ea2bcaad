"""DiskCache: KV blocks in one file that outlives the server. A lost, torn or foreign block is a miss, never an error.

The file has a header and slots of equal size, as many as the quota allows. A slot starts with the digest of its block's
key and a checksum over digest and content. One call writes them with the content, so the mixture of old and new bytes
that a crash may leave does not match its checksum. The file is not flushed against a crash of the machine: a block lost
that way is a miss too.
"""

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import queue
import stat
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.models.config import ModelConfig
from engine.settings import parse_size

logger = logging.getLogger(__name__)

FILE_NAME = "kv-blocks"
MAGIC = b"pageserve kv 1\0\0"
FILE_HEADER = struct.Struct("<16sQ32s")  # magic, block_bytes, model identity
DATA_START = 4096
SLOT_HEADER = struct.Struct("<32s16sQ8x")  # digest, checksum, age
MAX_AGE = 1 << 62  # counted in writes; a greater number is damage: erased flash reads as ones
MAX_QUEUED_WRITES = 64


class BlockFile:
    """The file: which slot holds which digest. The least recently written block is overwritten first. Not
    thread-safe."""

    def __init__(self, folder: Path, quota: int, block_bytes: int, identity: bytes, file_name: str = FILE_NAME) -> None:
        """Raises ConfigError if the folder cannot be used, or if another server uses it."""
        self.block_bytes = block_bytes
        self._slot_bytes = SLOT_HEADER.size + block_bytes
        self.num_slots = max(0, quota - DATA_START) // self._slot_bytes
        if self.num_slots == 0:
            raise ConfigError(
                f"disk_cache_size: {quota} bytes do not hold one block of {block_bytes} bytes; give it more."
            )
        self._fd = _open_locked(folder, file_name)
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # digest -> slot, in the order of writing
        self._age = 0
        header = FILE_HEADER.pack(MAGIC, block_bytes, identity)
        if self._begins_with(header):
            self._read_slots()
        else:
            self._begin_anew(header)
        with contextlib.suppress(OSError):  # cut the slots of an earlier, larger quota
            if os.fstat(self._fd).st_size > (size := self._offset(self.num_slots)):
                os.ftruncate(self._fd, size)
        used = set(self._slots.values())
        self._free = [slot for slot in range(self.num_slots - 1, -1, -1) if slot not in used]

    def digests(self) -> list[bytes]:
        return list(self._slots)

    def store(self, digest: bytes, content: bytes) -> None:
        """Write a block, in place of an older block with its digest. Raises OSError if the disk refuses it."""
        if digest in self._slots:
            slot = self._slots.pop(digest)
        elif self._free:
            slot = self._free.pop()
        else:
            _, slot = self._slots.popitem(last=False)
        self._age += 1
        header = SLOT_HEADER.pack(digest, _checksum(digest, content), self._age)
        try:
            written = os.pwrite(self._fd, header + content, self._offset(slot))
        except OSError:
            self._free.append(slot)
            raise
        if written == self._slot_bytes:
            self._slots[digest] = slot
        else:
            self._free.append(slot)

    def load(self, digest: bytes) -> bytes | None:
        """The checked content of a block; None if it is missing or damaged."""
        slot = self._slots.get(digest)
        if slot is None:
            return None
        record = os.pread(self._fd, self._slot_bytes, self._offset(slot))
        content = record[SLOT_HEADER.size :]
        if len(record) == self._slot_bytes:
            found, checksum, _ = SLOT_HEADER.unpack_from(record)
            if found == digest and checksum == _checksum(digest, content):
                return content
        logger.warning("a KV block on the disk is damaged: it counts as missing")
        self._free.append(self._slots.pop(digest))
        return None

    def close(self) -> None:
        os.close(self._fd)

    def _begins_with(self, header: bytes) -> bool:
        with contextlib.suppress(OSError):  # an unreadable header counts as missing
            return os.pread(self._fd, len(header), 0) == header
        return False

    def _begin_anew(self, header: bytes) -> None:
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, header, 0)
        except OSError as error:  # a broken or full disk must not stop a Worker from starting
            logger.warning("disk_cache: the file cannot be begun (%s); nothing will outlive the server", error.strerror)

    def _offset(self, slot: int) -> int:
        return DATA_START + slot * self._slot_bytes

    def _read_slots(self) -> None:
        """Read the digests that the file claims to hold; loading a block checks its content."""
        num_slots = min(self.num_slots, max(0, os.fstat(self._fd).st_size - DATA_START) // self._slot_bytes)
        found = []
        for slot in range(num_slots):
            try:
                digest, _, age = SLOT_HEADER.unpack(os.pread(self._fd, SLOT_HEADER.size, self._offset(slot)))
            except (OSError, struct.error):
                continue
            if 0 < age < MAX_AGE:
                found.append((age, digest, slot))
        for age, digest, slot in sorted(found):
            self._slots[digest] = slot
            self._age = age


class DiskCache:
    """A BlockFile with its own thread, so that no step waits for the disk.

    Reads go before writes. A write that finds too many writes waiting is dropped: its block is not kept. A flush waits
    instead.
    """

    def __init__(self, file: BlockFile) -> None:
        self.digests = file.digests()  # claimed by the file when it was opened, the oldest first
        self.num_blocks = file.num_slots
        self._file = file
        self._tasks: queue.PriorityQueue[tuple[int, int, Callable[[], None]]] = queue.PriorityQueue()
        self._num_tasks = 0
        self._num_asked = 0  # writes queued, counted by the caller
        self._num_done = 0  # writes done, counted by the thread
        self._thread = threading.Thread(target=self._run, name="disk-cache", daemon=True)
        self._thread.start()

    def store(self, digest: bytes, content: bytes, *, must: bool = False) -> None:
        """Queue a block to be written. While too many wait it is dropped; with `must` the call waits for them."""
        if self._num_asked - self._num_done >= MAX_QUEUED_WRITES:
            if not must:
                return
            self.flush()  # a queue without a limit could hold the whole pool a second time
        self._num_asked += 1
        self._put(1, lambda: self._store(digest, content))

    def load(self, digests: list[bytes], done: Callable[[list[bytes]], None]) -> None:
        """Read a chain of blocks up to the first missing one; the thread calls `done` with their contents."""
        self._put(0, lambda: done(self._load(digests)))

    def flush(self) -> None:
        """Wait until all queued blocks are written."""
        done = threading.Event()
        self._put(2, done.set)
        done.wait()

    def _put(self, priority: int, task: Callable[[], None]) -> None:
        self._num_tasks += 1
        self._tasks.put((priority, self._num_tasks, task))

    def _run(self) -> None:
        while True:
            task = self._tasks.get()[2]
            try:
                task()
            except Exception:  # a dead thread would serve no later read, and requests would wait forever
                logger.exception("a task of the disk cache failed")

    def _store(self, digest: bytes, content: bytes) -> None:
        try:
            self._file.store(digest, content)
        except OSError as error:
            logger.warning("a KV block could not be written to the disk: %s", error.strerror)
        self._num_done += 1

    def _load(self, digests: list[bytes]) -> list[bytes]:
        contents: list[bytes] = []
        with contextlib.suppress(OSError):
            for digest in digests:
                content = self._file.load(digest)
                if content is None:
                    break
                contents.append(content)
        return contents


def open_disk_cache(config: EngineConfig, block_bytes: int, identity: bytes, model: ModelConfig) -> DiskCache | None:
    """The disk tier of `config.disk_cache`; None where that is not set. Every rank of `model` has a file of its own.
    Raises ConfigError."""
    if config.disk_cache is None:
        return None
    quota = parse_size(config.disk_cache_size)
    assert quota is not None, "EngineConfig checked it"
    shard = model.shard
    name = FILE_NAME if shard is None else f"{FILE_NAME}-{shard.rank}-of-{shard.size}"
    return DiskCache(BlockFile(Path(config.disk_cache).expanduser(), quota, block_bytes, identity, name))


def block_identity(model_identity: bytes, model: ModelConfig, max_model_len: int, dtype: str) -> bytes:
    """The identity of a model's blocks in the file. LongRoPE's long factors make other keys, and the device may choose
    the dtype: each gives another identity."""
    long = b"long" if model.has_long_rope(max_model_len) else b""
    return hashlib.sha256(model_identity + dtype.encode() + long).digest()


def _open_locked(folder: Path, file_name: str) -> int:
    """Open and lock the file. It gets overwritten from its start, so any other kind of file is refused."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # NONBLOCK: for named pipes
        fd = os.open(folder / file_name, flags, 0o600)  # the file reveals prompts
    except OSError as error:
        reason = f"{file_name} there is a link" if error.errno == errno.ELOOP else error.strerror
        raise ConfigError(f"disk_cache: cannot use {str(folder)!r} ({reason}); name another folder.") from None
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid not in (os.geteuid(), 0) or found.st_nlink != 1:
        os.close(fd)
        raise ConfigError(
            f"disk_cache: {file_name} in {str(folder)!r} is not a file of this user's, or has another name, too; "
            "name another folder."
        )
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise ConfigError(f"disk_cache: {str(folder)!r} is in use by another server; give each a folder.") from None
    return fd


def _checksum(digest: bytes, content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16, key=digest).digest()
