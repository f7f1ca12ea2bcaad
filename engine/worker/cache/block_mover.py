"""How KV blocks travel between the pool and the slots of the host tier: at once on a CPU, beside the steps on a GPU.

On a GPU nobody waits for the link to host memory but who must. There are two streams for copies, one each way, and
staging buffers between them and the compute stream:

    offload: pool --pack kernel, compute stream--> staging --copies, stream out--> slots
    load:    slots --copies, stream in--> staging --unpack kernel, compute stream--> pool

The pool is touched by the compute stream alone, slots by the copies alone. So a step that writes over a block comes
after the kernel that packed it, at the speed of device memory; copies for a step begin while the one before it still
computes; and the step that reads a loaded block is the only one that waits for it. Events keep the rest in order:
staging is filled again only when what it held has left, and a slot is read only after the copy that fills it. (It is
written after the copies that read it: what is packed later was packed after the compute stream had waited for these.)
Recorded graphs are replayed on the compute stream and never see any of this.
"""

from collections.abc import Iterator
from functools import partial
from operator import itemgetter
from typing import Protocol

import torch
from torch import Tensor

from engine.executor.step import BlockMove
from engine.worker.cache.kv_cache import staging_sizes
from engine.worker.device.queue import CopyQueue, DeviceQueue, Mark
from kernels.cache.copy_blocks import BlockCopier

BLOCKS_PER_COPY = 64  # bounds what packing takes on a CPU


class BlockMover(Protocol):
    """Moves are queued in the order of the plans. `blocks` int64 [n] on the device are the block ids of `moves`."""

    def offload(self, moves: list[BlockMove], blocks: Tensor) -> None:
        """Blocks of the pool, as what was queued before leaves them, to slots."""

    def load(self, moves: list[BlockMove], blocks: Tensor) -> None:
        """Slots to blocks of the pool, before what is queued next."""

    def mark(self) -> Mark | None:
        """Waits for the copies asked for so far, from and to slots; None: they are done."""


class DirectMover:
    """On a CPU: block after block, there and then. slots uint8 [num_slots, block_bytes]."""

    def __init__(self, copier: BlockCopier, slots: Tensor) -> None:
        self._copier, self._slots = copier, slots

    def offload(self, moves: list[BlockMove], blocks: Tensor) -> None:
        for part, ids in _parts(moves, blocks, BLOCKS_PER_COPY):
            for move, block in zip(part, self._copier.pack(ids), strict=True):
                self._slots[move.slot].copy_(block)

    def load(self, moves: list[BlockMove], blocks: Tensor) -> None:
        for part, ids in _parts(moves, blocks, BLOCKS_PER_COPY):
            packed = torch.empty((len(part), self._copier.block_bytes), dtype=torch.uint8)
            for move, block in zip(part, packed, strict=True):
                block.copy_(self._slots[move.slot])
            self._copier.unpack(packed, ids)

    def mark(self) -> Mark | None:
        return None


class StreamMover:
    """On a GPU, as above. slots uint8 [num_slots, block_bytes] is pinned; kv_cache.staging_sizes are on the device.

    Blocks whose slots lie side by side cross in one copy: moves should come in the order of their slots.
    """

    def __init__(self, copier: BlockCopier, slots: Tensor, queue: DeviceQueue) -> None:
        self._copier, self._slots, self._queue = copier, slots, queue
        self._out, self._in = (_Lane(queue, len(slots), copier.block_bytes) for _ in range(2))
        self._num_copies = 0
        self._filled: dict[int, tuple[int, Mark]] = {}  # by slot: the copy that fills it; later ones are higher

    def offload(self, moves: list[BlockMove], blocks: Tensor) -> None:
        lane = self._out
        for part, ids in _parts(moves, blocks, lane.blocks_per_copy):
            staging = lane.take(len(part), self._queue)
            self._queue.run(partial(self._copier.pack, ids, staging))
            lane.queue.after(self._queue.mark())
            for slots, rows in _runs(part):
                lane.queue.copy(self._slots[slots], staging[rows])
            copied = lane.queue.mark()
            lane.release(copied)
            self._num_copies += 1
            self._filled.update(dict.fromkeys([move.slot for move in part], (self._num_copies, copied)))

    def load(self, moves: list[BlockMove], blocks: Tensor) -> None:
        lane = self._in
        for part, ids in _parts(moves, blocks, lane.blocks_per_copy):
            staging = lane.take(len(part), lane.queue)
            fills = [self._filled[move.slot] for move in part if move.slot in self._filled]
            if fills:
                lane.queue.after(max(fills, key=itemgetter(0))[1])
            for slots, rows in _runs(part):
                lane.queue.copy(staging[rows], self._slots[slots])
            self._queue.after(lane.queue.mark())
            self._queue.run(partial(self._copier.unpack, staging, ids))
            lane.release(self._queue.mark())

    def mark(self) -> Mark | None:
        return _Both(self._out.queue.mark(), self._in.queue.mark())


class _Lane:
    """One way of the link: its stream, and its staging buffers in turn."""

    def __init__(self, queue: DeviceQueue, num_slots: int, block_bytes: int) -> None:
        self.queue: CopyQueue = queue.copy_queue()
        self.blocks_per_copy, num_buffers = staging_sizes(num_slots, block_bytes)
        shape = (num_buffers, self.blocks_per_copy, block_bytes)
        self._staging = torch.empty(shape, dtype=torch.uint8, device=queue.device)
        self._free: list[Mark | None] = [None] * num_buffers
        self._turn = -1

    def take(self, num_blocks: int, writer: CopyQueue) -> Tensor:
        """The next buffer uint8 [num_blocks, block_bytes]; `writer` waits until what it held has been read."""
        self._turn = (self._turn + 1) % len(self._free)
        if (free := self._free[self._turn]) is not None:
            writer.after(free)
        return self._staging[self._turn, :num_blocks]

    def release(self, free: Mark) -> None:
        """What was put into the buffer that was taken last has been read when `free` is reached."""
        self._free[self._turn] = free


class _Both:
    """Two marks as one."""

    def __init__(self, *marks: Mark) -> None:
        self._marks = marks

    def wait(self) -> None:
        for mark in self._marks:
            mark.wait()

    def done(self) -> bool:
        return all(mark.done() for mark in self._marks)


def _parts(moves: list[BlockMove], blocks: Tensor, size: int) -> Iterator[tuple[list[BlockMove], Tensor]]:
    for start in range(0, len(moves), size):
        yield moves[start : start + size], blocks[start : start + size]


def _runs(moves: list[BlockMove]) -> Iterator[tuple[slice, slice]]:
    """(slots, places in `moves`) of the longest runs of slots that follow each other."""
    start = 0
    for i in range(1, len(moves) + 1):
        if i == len(moves) or moves[i].slot != moves[i - 1].slot + 1:
            yield slice(moves[start].slot, moves[i - 1].slot + 1), slice(start, i)
            start = i
