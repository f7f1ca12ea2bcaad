"""The disk tier in the simulation: its real file and its real queues, a thread that lives in virtual time, and faults.

The file lies in a folder that outlives Workers and servers, as it should. What fails is drawn from counts, so that the
same seed has the same faults.
"""

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.executor.step import BlockMove, FetchBlocks, FetchedBlocks
from engine.worker.cache.disk_cache import DATA_START, FILE_NAME, SLOT_HEADER, BlockFile, DiskCache
from engine.worker.cache.host_cache import HostCache
from tests.sim.device import KvMemory
from tests.sim.model import mix
from tests.sim.swarm import SimConfig
from tests.sim.violation import fail, require

IDENTITY = b"simulated".ljust(32, b"\0")
ACCESS_SECONDS, SLOW_ACCESS_SECONDS = 0.3, 5.0


class FaultyOs:
    """The module `os` for engine.worker.cache.disk_cache: writes fail now and then, reads while a Worker starts."""

    def __init__(self, config: SimConfig, saw: Callable[[str], None]) -> None:
        self.tears = False  # the next write is cut by the death of who writes
        self.loading = False
        self._config, self._saw = config, saw
        self._num_writes = self._num_reads = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        self._num_writes += 1
        every, drawn = self._config.disk_fault_every, mix(self._config.seed, self._num_writes)
        if self.tears:
            self._saw("write to the disk torn by the death of the Worker")
            return os.pwrite(fd, data[: 1 + drawn % len(data)], offset)
        if every and drawn % every == 0 and not self.loading:
            self._saw("write to the disk failed" if drawn & 1024 else "write to the disk cut short")
            if drawn & 1024:
                raise OSError(errno.ENOSPC, "No space left on device")
            return os.pwrite(fd, data[: drawn % len(data)], offset)
        return os.pwrite(fd, data, offset)

    def pread(self, fd: int, count: int, offset: int) -> bytes:
        self._num_reads += 1
        if self.loading and self._config.disk_fault_every and mix(self._config.seed, -self._num_reads) % 20 == 0:
            self._saw("disk unreadable when a Worker starts")
            raise OSError(errno.EIO, "Input/output error")
        return os.pread(fd, count, offset)


class SimDiskCache(DiskCache):
    """Its thread is a timer: one access after the other, some of them slow."""

    def __init__(
        self,
        file: BlockFile,
        config: SimConfig,
        faults: FaultyOs,
        saw: Callable[[str], None],
        content_of: dict[bytes, bytes],
    ) -> None:
        super().__init__(file)  # the module's thread is one that never starts
        self.file = file
        self._content_of = content_of
        self.paused = False
        self._config, self._faults, self._saw = config, faults, saw
        self._timer: asyncio.TimerHandle | None = None
        self._num_accesses = 0

    def pause(self, paused: bool) -> None:
        self.paused = paused
        if paused and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._go_on()

    def die(self) -> None:
        """With the Worker: what waits is lost, and a write that is under way is torn."""
        if self._timer is not None:
            self._timer.cancel()
        waiting = self._tasks.queue
        if any(priority == 1 for priority, *_ in waiting):
            self._saw("Worker lost with writes to the disk queued")
        if self._timer is not None and waiting and waiting[0][0] == 1:
            self._faults.tears = True
            self._tasks.get_nowait()[2]()
            self._faults.tears = False
        self.file.close()

    def store(self, digest: bytes, content: bytes, *, must: bool = False) -> None:
        if content != self._content_of.get(digest):
            fail("disk-content", f"what is kept under {digest.hex()[:8]} is not what was computed")
        num_asked = self._num_asked
        super().store(digest, content, must=must)
        if self._num_asked == num_asked:
            self._saw("write to the disk dropped, too many wait")

    def flush(self) -> None:
        while not self._tasks.empty():
            self._tasks.get_nowait()[2]()

    def _put(self, priority: int, task: Callable[[], None]) -> None:
        super()._put(priority, task)
        self._go_on()

    def _go_on(self) -> None:
        if self._timer is None and not self.paused and not self._tasks.empty():
            self._num_accesses += 1
            every = self._config.slow_disk_every
            slow = every > 0 and mix(self._config.seed, self._num_accesses) % every == 0
            seconds = SLOW_ACCESS_SECONDS if slow else ACCESS_SECONDS
            self._timer = asyncio.get_running_loop().call_later(seconds, self._access)

    def _access(self) -> None:
        self._timer = None
        if not self._tasks.empty():
            self._tasks.get_nowait()[2]()
        self._go_on()

    def _store(self, digest: bytes, content: bytes) -> None:
        full = not self.file._free and digest not in self.file._slots
        super()._store(digest, content)
        if full and digest in self.file._slots:
            self._saw("oldest block on the disk written over")
        size, quota = os.fstat(self.file._fd).st_size, quota_bytes(self._config)
        require(size <= quota, "disk-quota", f"the file has {size} bytes, the quota is {quota}")


class PoolCopier:
    """BlockCopier (kernels/cache/copy_blocks.py) as HostCache uses it, over the pool of the simulated device."""

    def __init__(self, slots: np.ndarray) -> None:
        self._blocks = torch.from_numpy(slots.view(np.uint8))
        self.block_bytes = self._blocks.shape[1]

    def pack(self, block_ids: Tensor) -> Tensor:
        return self._blocks[block_ids]

    def unpack(self, packed: Tensor, block_ids: Tensor) -> None:
        self._blocks[block_ids] = packed


class SimHost:
    """The host tier of a Worker that has a disk tier behind it: the real HostCache over the simulated pool."""

    def __init__(
        self,
        config: SimConfig,
        folder: Path,
        faults: FaultyOs,
        saw: Callable[[str], None],
        content_of: dict[bytes, bytes],
    ) -> None:
        self._config, self._saw, self._content_of = config, saw, content_of
        faults.loading = True
        try:
            file = BlockFile(folder, quota_bytes(config), config.block_size * 8, IDENTITY)
        finally:
            faults.loading = False
        self.digests = file.digests()
        self.disk = SimDiskCache(file, config, faults, saw, content_of)

    def allocate(self, num_blocks: int, num_host_blocks: int) -> KvMemory:
        """The memory of the Worker; moves between pool and host then go through `cache`."""
        memory = KvMemory(num_blocks, 0, self._config.block_size)
        self.cache = HostCache(PoolCopier(memory.slots), num_host_blocks, torch.device("cpu"), self.disk)
        memory.host = self.cache._slots.numpy().view(np.int64)
        memory.host[:] = -1
        memory.cache = self.cache
        self._memory = memory
        return memory

    def keep(self, moves: list[BlockMove], flush: bool) -> None:
        """A step is done. After a flush all of it must be on the disk, where nothing failed and the quota holds it."""
        self.cache.keep(moves, flush=flush)
        if not flush:
            return
        self._saw("pool flushed to the disk at the end")
        digests = {move.digest for move in moves if move.digest}
        if not self._config.disk_fault_every and len(digests) <= self._config.disk_blocks:
            missing = digests - set(self.disk.file.digests())
            require(not missing, "flush", f"{len(missing)} of {len(digests)} blocks were not written")

    def fetch(self, message: FetchBlocks, send: Callable[[FetchedBlocks], None]) -> None:
        def done(answer: FetchedBlocks) -> None:
            for digest, slot in list(zip(message.digests, message.slots, strict=True))[: answer.num_blocks]:
                if self._memory.host[slot].tobytes() != self._content_of.get(digest):
                    fail("disk-content", f"what the disk has under {digest.hex()[:8]} is not what was computed")
            if answer.num_blocks:
                self._saw("prefix came from the disk")
            if answer.num_blocks < len(message.digests):
                self._saw("request sees only the start of its prefix on the disk")
            self._memory.fetching.difference_update(message.slots)
            send(answer)

        self.cache.fetch(message, done)


def quota_bytes(config: SimConfig) -> int:
    return DATA_START + config.disk_blocks * (SLOT_HEADER.size + config.block_size * 8)


def damage(folder: Path, config: SimConfig, pick: int) -> bool:
    """Flip a byte in every third record, erase one, put one in the place of another, or cut the file.

    Returns whether there was any record.
    """
    size = SLOT_HEADER.size + config.block_size * 8
    path = folder / FILE_NAME
    num_records = (path.stat().st_size - DATA_START) // size if path.exists() else 0
    if num_records <= 0:
        return False
    kind, offset = pick % 4, DATA_START + (pick >> 2) % num_records * size
    with path.open("r+b") as file:
        if kind == 0:
            for number in range((pick >> 2) % 3, num_records, 3):
                file.seek(DATA_START + number * size + (pick >> 20) % size)
                byte = file.read(1)[0]
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte ^ 1 << pick % 8]))
        elif kind == 1:
            file.seek(offset)
            file.write(b"\xff" * size)  # as a cell of flash memory that was erased
        elif kind == 2:
            file.seek(DATA_START + (pick >> 20) % num_records * size)
            record = file.read(size)
            file.seek(offset)
            file.write(record)
        else:
            file.truncate(offset + (pick >> 20) % size)
    return True
