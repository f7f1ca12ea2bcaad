"""Moves KV blocks between the pool and the slots of the host tier: at once on a CPU, beside the steps on a GPU.

On a GPU, only a step that reads a loaded block waits for its transfer. There are two streams for copies, one per
direction, and staging buffers between them and the compute stream:

    offload: pool --pack kernel, compute stream--> staging --copies, stream out--> slots
    load:    slots --copies, stream in--> staging --unpack kernel, compute stream--> pool

Only the compute stream touches the pool, and only the copies touch slots. So a step that overwrites a block runs after
the kernel that packed it, at the speed of device memory; and the copies for a step start while the previous step
computes. Events keep the rest in order: a staging buffer is filled again only after its content was read, and a slot is
read only after the copy that fills it. (A slot is also written only after the copies that read it: the compute stream
waited for those copies before it packed the new content.) Recorded graphs are replayed on the compute stream,
unaffected by this.
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

BLOCKS_PER_COPY = 64  # bounds the memory of packing on a CPU


class BlockMover(Protocol):
    """Queues moves in the order of the plans. `blocks` int64 [n] on the device are the block ids of `moves`."""

    def offload(self, moves: list[BlockMove], blocks: Tensor) -> None:
        """Copy blocks of the pool to slots, after all work queued before."""

    def load(self, moves: list[BlockMove], blocks: Tensor) -> None:
        """Copy slots to blocks of the pool, before any work queued later."""

    def mark(self) -> Mark | None:
        """A mark behind all copies from and to slots so far; None: they are done."""


class DirectMover:
    """The mover of a CPU: copies block after block, at once. slots uint8 [num_slots, block_bytes]."""

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
    """The mover of a GPU, see the top of this file. slots uint8 [num_slots, block_bytes] are pinned; the staging
    buffers (kv_cache.staging_sizes) are on the device.

    Blocks with neighbouring slots cross in one copy, so moves should be in the order of their slots.
    """

    def __init__(self, copier: BlockCopier, slots: Tensor, queue: DeviceQueue) -> None:
        self._copier, self._slots, self._queue = copier, slots, queue
        self._out, self._in = (_Lane(queue, len(slots), copier.block_bytes) for _ in range(2))
        self._num_copies = 0
        self._filled: dict[int, tuple[int, Mark]] = {}  # slot -> (number of the copy that fills it, its mark)

    def offload(self, moves: list[BlockMove], blocks: Tensor) -> None:
        lane = self._out
        for part, ids in _parts(moves, blocks, lane.blocks_per_copy):
            staging = lane.next_buffer(len(part), self._queue)
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
            staging = lane.next_buffer(len(part), lane.queue)
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
    """One direction of the link: its stream, and its staging buffers, used in turn."""

    def __init__(self, queue: DeviceQueue, num_slots: int, block_bytes: int) -> None:
        self.queue: CopyQueue = queue.copy_queue()
        self.blocks_per_copy, num_buffers = staging_sizes(num_slots, block_bytes)
        shape = (num_buffers, self.blocks_per_copy, block_bytes)
        self._staging = torch.empty(shape, dtype=torch.uint8, device=queue.device)
        self._free: list[Mark | None] = [None] * num_buffers
        self._turn = -1

    def next_buffer(self, num_blocks: int, writer: CopyQueue) -> Tensor:
        """The next buffer, uint8 [num_blocks, block_bytes]; `writer` waits until its old content was read."""
        self._turn = (self._turn + 1) % len(self._free)
        if (free := self._free[self._turn]) is not None:
            writer.after(free)
        return self._staging[self._turn, :num_blocks]

    def release(self, free: Mark) -> None:
        """Mark the last buffer taken as free once `free` is reached: its content was read by then."""
        self._free[self._turn] = free


class _Both:
    """Several marks as one mark."""

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
    """Yields (slots, places in `moves`) of the longest runs of consecutive slots."""
    start = 0
    for i in range(1, len(moves) + 1):
        if i == len(moves) or moves[i].slot != moves[i - 1].slot + 1:
            yield slice(moves[start].slot, moves[i - 1].slot + 1), slice(start, i)
            start = i
