"""HostCache: the memory of the host tier (engine/host_tier.py), and what moving a block costs."""

import time

import torch
from torch import Tensor

from engine.step import BlockMove
from kernels.copy_blocks import BlockCopier

BLOCKS_PER_COPY = 64  # bounds what packing takes on the device


class HostCache:
    """uint8 [num_slots, block_bytes], pinned where the device is a GPU. Moves are queued in the order of the plans."""

    def __init__(self, copier: BlockCopier, num_slots: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self._copier = copier
        self._device = device
        self._slots = torch.empty(
            (num_slots, copier.block_bytes), dtype=torch.uint8, pin_memory=device.type == "cuda" and num_slots > 0
        )

    def offload(self, moves: list[BlockMove]) -> None:
        """Blocks of the pool to slots."""
        for part in _parts(moves):
            packed = self._copier.pack(self._blocks(part))
            for move, block in zip(part, packed, strict=True):
                self._slots[move.slot].copy_(block, non_blocking=True)

    def load(self, moves: list[BlockMove]) -> None:
        """Slots to blocks of the pool."""
        for part in _parts(moves):
            packed = torch.empty((len(part), self._copier.block_bytes), dtype=torch.uint8, device=self._device)
            for move, block in zip(part, packed, strict=True):
                block.copy_(self._slots[move.slot], non_blocking=True)
            self._copier.unpack(packed, self._blocks(part))

    def measure_load(self, num_blocks: int) -> float:
        """Seconds to load that many blocks, the median of three; writes over the first blocks of the pool."""
        moves = [BlockMove(i, i) for i in range(num_blocks)]
        seconds = []
        for _ in range(4):  # the first one compiles and touches the pages
            started = time.perf_counter()
            self.offload(moves[:1])
            self.load(moves)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            seconds.append(time.perf_counter() - started)
        return sorted(seconds[1:])[1]

    def _blocks(self, moves: list[BlockMove]) -> Tensor:
        return torch.tensor([move.block_id for move in moves], dtype=torch.int64).to(self._device)


def _parts(moves: list[BlockMove]) -> list[list[BlockMove]]:
    return [moves[i : i + BLOCKS_PER_COPY] for i in range(0, len(moves), BLOCKS_PER_COPY)]
