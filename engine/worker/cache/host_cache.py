"""HostCache: the memory of the host tier (engine/memory/host_tier.py) and the cost of moving a block."""

import time
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.executor.step import BlockCopy, BlockMove, FetchBlocks, FetchedBlocks
from engine.models.config import ModelConfig
from engine.worker.cache.block_mover import BlockMover, DirectMover, StreamMover
from engine.worker.cache.disk_cache import DiskCache, block_identity, open_disk_cache
from engine.worker.cache.kv_cache import model_max_len
from engine.worker.device.queue import DeviceQueue, Mark
from kernels.cache.copy_blocks import BlockCopier


class HostCache:
    """Slots uint8 [num_slots, block_bytes], pinned for a GPU. Moves are queued in the order of the plans."""

    def __init__(
        self,
        copier: BlockCopier,
        num_slots: int,
        device: torch.device,
        disk: DiskCache | None = None,
        queue: DeviceQueue | None = None,
    ) -> None:
        """A GPU has a `queue`."""
        self._disk = disk
        self._digests: dict[int, bytes] = {}  # slot -> digest of the block to write to the disk
        self._to_keep: deque[tuple[Mark | None, list[BlockMove]]] = deque()  # for the disk, after Mark
        self.num_slots = num_slots
        self.copier = copier
        self._device = device
        self._queue = queue
        shape = (num_slots, copier.block_bytes)
        if queue is None or num_slots == 0:
            self._slots = torch.empty(shape, dtype=torch.uint8)
        else:
            self._slots = queue.host_bytes(num_slots * copier.block_bytes).view(shape)
        self._mover = self._new_mover()

    def _new_mover(self) -> BlockMover:
        if self._queue is None or self.num_slots == 0:
            return DirectMover(self.copier, self._slots)
        return StreamMover(self.copier, self._slots, self._queue)

    def leave(self) -> None:
        """Let go of the pool, once the slots hold what was moved to them; call `serve` before the next move."""
        self.synchronize()  # the copies to the slots read buffers that go with the mover
        del self.copier, self._mover
        self._queue = None

    def serve(self, copier: BlockCopier, queue: DeviceQueue | None) -> None:
        """Move to another pool with blocks of the same size; the slots and the disk keep their content."""
        self.copier, self._queue = copier, queue
        self._mover = self._new_mover()

    @property
    def has_disk(self) -> bool:
        return self._disk is not None

    @property
    def disk_digests(self) -> list[bytes]:
        """Digests of the blocks that the disk tier held when it was opened, the oldest first."""
        return [] if self._disk is None else self._disk.digests

    @property
    def num_disk_blocks(self) -> int:
        """The most blocks that the disk tier holds."""
        return 0 if self._disk is None else self._disk.num_blocks

    def offload(self, moves: list[BlockMove], blocks: Tensor) -> None:
        """Copy blocks of the pool to slots; call `keep` once the step is done. Fastest in the order of the slots.

        `blocks` int64 [n] on the device are the block ids of `moves`.
        """
        self._digests.update({move.slot: move.digest for move in moves})
        self._mover.offload(moves, blocks)

    def load(self, moves: list[BlockMove], blocks: Tensor) -> None:
        """Copy slots to blocks of the pool; `blocks` int64 [n] on the device are the block ids of `moves`."""
        self._mover.load(moves, blocks)

    def keep(self, moves: list[BlockMove], *, flush: bool = False) -> None:
        """Hand offloaded blocks to the disk tier, except those whose slots were reused since.

        `flush` waits until the disk has them. Without it the call does not wait: a later call hands over blocks whose
        copies are still under way.
        """
        if self._disk is None:
            return
        if moves:
            self._to_keep.append((self._mover.mark(), moves))
        while self._to_keep:
            mark, arrived = self._to_keep[0]
            if mark is not None:
                if not (flush or mark.done()):
                    return
                mark.wait()
            self._to_keep.popleft()
            for move in arrived:
                if move.digest and self._digests.get(move.slot) == move.digest:
                    self._disk.store(move.digest, self._slots[move.slot].numpy().tobytes(), must=flush)
        if flush:
            self._disk.flush()

    def fetch(self, request: FetchBlocks, send: Callable[[FetchedBlocks], None]) -> None:
        """Read blocks from the disk into slots. A thread then tells `send` how many; until then no plan uses the slots.

        Earlier plans may still copy from or to these slots: the thread waits for all moves queued so far.
        """
        for slot in request.slots:  # the disk tier must not keep the slot's old block from here on
            self._digests.pop(slot, None)
        queued = self._mover.mark()

        def done(contents: list[bytes]) -> None:
            if queued is not None:
                if self._device.index:  # a thread begins on GPU 0, where its wait would make a context of 0.5 GiB
                    torch.cuda.set_device(self._device)
                queued.wait()
            for slot, content in zip(request.slots, contents, strict=False):
                self._slots[slot].numpy()[:] = np.frombuffer(content, np.uint8)
            send(FetchedBlocks(request.fetch_id, len(contents)))

        if self._disk is None:
            send(FetchedBlocks(request.fetch_id, 0))
        else:
            self._disk.load(request.digests, done)

    def measure_load(self, num_blocks: int) -> float:
        """Seconds to load `num_blocks` blocks, the median of three. Writes over the first blocks of the pool."""
        moves = [BlockMove(i, i) for i in range(num_blocks)]
        blocks = torch.arange(num_blocks, device=self._device)
        seconds = []
        for _ in range(4):  # the first round compiles kernels and touches the pages
            self.offload(moves[:1], blocks[:1])
            self.synchronize()
            started = time.perf_counter()
            self.load(moves, blocks)
            self.synchronize()
            seconds.append(time.perf_counter() - started)
        return sorted(seconds[1:])[1]

    def synchronize(self) -> None:
        """Wait for all moves queued so far."""
        if self._queue is not None:
            self._queue.mark().wait()
        if (queued := self._mover.mark()) is not None:
            queued.wait()


def open_host_cache(
    config: EngineConfig,
    model: ModelConfig,
    kv_caches: list[tuple[Tensor, Tensor]],
    *,
    num_slots: int,
    queue: DeviceQueue | None,
    model_identity: bytes,
) -> HostCache:
    """The host tier of a KV cache, and the disk tier below it where the settings name one. Raises ConfigError."""
    copier = block_copier(kv_caches)
    dtype = str(kv_caches[0][0].dtype)
    identity = block_identity(model_identity, model, model_max_len(config, model), dtype)
    disk = open_disk_cache(config, copier.block_bytes, identity, model)
    return HostCache(copier, num_slots, kv_caches[0][0].device, disk, queue)


def block_copier(kv_caches: list[tuple[Tensor, Tensor]]) -> BlockCopier:
    """Copies blocks in all tensors of the cache at once."""
    own = {id(tensor): tensor for layer in kv_caches for tensor in layer}  # layers may share their tensors
    return BlockCopier(list(own.values()))


def independent_copies(copies: list[BlockCopy]) -> Iterator[list[BlockCopy]]:
    """Yields runs of copies that may be made in any order: no target of a run is a source or target of another copy.

    Nearly always there is one run. A block is a source and then a target only if its last holder was preempted between.
    """
    run: list[BlockCopy] = []
    sources: set[int] = set()
    targets: set[int] = set()
    for copy in copies:
        if copy.target in sources | targets or copy.source in targets:
            yield run
            run, sources, targets = [], set(), set()
        run.append(copy)
        sources.add(copy.source)
        targets.add(copy.target)
    if run:
        yield run
