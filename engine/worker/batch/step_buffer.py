"""StepBuffer: uploads the small host arrays of a step in one copy."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.worker.device.host import StepLimits
from engine.worker.device.queue import DeviceQueue, Mark

BUFFERED_STEPS = 2  # the device works on one step while the host prepares the next
ALIGNMENT = 16  # bytes: suits vector loads and every dtype


IntArray = npt.NDArray[Any]


class StepBuffer:
    """Moves the small host arrays of one step to the device: `put` some, `upload`, launch the work that reads them.

    The tensors that `put` returns are valid after `upload`. On a CPU (no queue) they are the arrays themselves. On a
    GPU they are parts of one buffer, which is filled on the host and copied as a whole. There are as many host buffers
    as steps in flight, so that no buffer is written while its copy may still be under way.
    """

    def __init__(self, num_bytes: int, queue: DeviceQueue | None) -> None:
        self._queue = queue
        self._used = self._uploaded = 0
        self._turn = 0
        if queue is not None:
            self._hosts = [queue.host_bytes(num_bytes) for _ in range(BUFFERED_STEPS)]
            self._copied: list[Mark | None] = [None] * BUFFERED_STEPS
            self._target = torch.empty(num_bytes, dtype=torch.uint8, device=queue.device)

    def start(self) -> None:
        """Begin a step; the arrays of the step before the last are given up."""
        self._used = self._uploaded = 0
        if self._queue is not None:
            self._turn = (self._turn + 1) % BUFFERED_STEPS
            if (copied := self._copied[self._turn]) is not None:
                copied.wait()
                self._copied[self._turn] = None

    def put(self, array: npt.NDArray[Any]) -> Tensor:
        """A tensor on the device with the shape and dtype of `array`, filled by the next `upload`."""
        host = torch.from_numpy(np.ascontiguousarray(array))
        if self._queue is None:
            return host
        end = self._used + array.nbytes
        if end > self._target.numel():  # e.g. a giant logit_bias: slower, but correct
            return self._queue.run(lambda: host.to(self._target.device, copy=True))
        self._hosts[self._turn][self._used : end].view(host.dtype).copy_(host.view(-1))
        tensor = self._target[self._used : end].view(host.dtype).view(host.shape)
        self._used = -(-end // ALIGNMENT) * ALIGNMENT
        return tensor

    def upload(self) -> None:
        end = self._used
        if self._queue is not None and end > self._uploaded:
            end = min(end, self._target.numel())
            part = slice(self._uploaded, end)
            self._queue.copy(self._target[part], self._hosts[self._turn][part])
            self._copied[self._turn] = self._queue.mark()
            self._uploaded = self._used


def step_buffer_bytes(limits: StepLimits, max_model_len: int, block_size: int) -> int:
    """Bytes of all arrays of the largest step of a GPU: ids, positions, slots, scored rows and their ids; the whole
    block table, which bounds its changed entries, and the block ids of prompts; some 200 bytes per sampled row."""
    max_blocks = -(-max_model_len // block_size)
    return 40 * limits.max_num_batched_tokens + limits.max_num_seqs * (8 * max_blocks + 256) + 4096
