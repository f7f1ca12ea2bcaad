"""DecodeRunner: steps in which every sequence computes one token, on a GPU: one copy in, a graph or two, one copy out.

The forward pass is one recorded piece of work and greedy sampling another, so that a step with any other sampling
replays the first alone and goes on from its hidden states.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.models.decoder import Decoder
from engine.models.layers.attention import KVCache
from engine.worker.batch.decode_buffers import DecodeBuffers
from engine.worker.batch.input_batch import InputBatch, SampleTargets
from engine.worker.batch.step_buffer import IntArray, StepBuffer
from engine.worker.device.cuda_graphs import GraphRunner, bucket_sizes
from engine.worker.device.queue import DeviceQueue
from engine.worker.sampling.sampler import TokenCounts, sample
from kernels.attention.plan import AttentionPlan

FORWARD, GREEDY = "the forward pass", "greedy sampling"


@dataclass(frozen=True, slots=True)
class DecodeSettings:
    """capacity: most rows of a step that comes here. hidden_size, dtype: of the decoder's hidden states.

    `graphs` False: nothing is recorded.
    """

    capacity: int
    max_num_seqs: int
    max_blocks: int
    hidden_size: int
    dtype: torch.dtype
    graphs: bool = True


class DecodeRunner:
    """Call `stage`, then `forward`, then `greedy` or `store`, for each step."""

    def __init__(
        self,
        queue: DeviceQueue,
        decoder: Decoder,
        kv_caches: Sequence[KVCache],
        counts: TokenCounts,
        settings: DecodeSettings,
        plan: AttentionPlan | None,
    ) -> None:
        self.capacity = settings.capacity
        self._plan = plan
        self.buffers = DecodeBuffers(
            queue,
            settings.capacity,
            settings.max_num_seqs,
            settings.max_blocks,
            settings.hidden_size,
            settings.dtype,
        )
        self._queue = queue
        self._decoder = decoder
        self._kv_caches = kv_caches
        self._counts = counts
        work = {FORWARD: self._forward, GREEDY: self._greedy}
        self.graphs = GraphRunner(queue, work, bucket_sizes(settings.capacity), settings.graphs)
        self._num_rows = self._padded = 0

    def stage(self, batch: InputBatch, decodes: list[int], blocks: list[int], buffer: StepBuffer) -> SampleTargets:
        """Take a plan's decodes into `batch`, and send what the step reads. `buffer` is for what has no place here."""
        arrays = self.buffers.begin()
        sampled = batch.fill_decodes(decodes, blocks, self.buffers, arrays)
        self._num_rows = n = len(decodes)
        self._padded = padded = self.graphs.padded(n)
        self.buffers.pad(arrays, n, padded)
        cells = batch.take_changed_cells()
        if len(cells) > padded:  # new prompts since the last step of decodes
            self._send_cells(cells, batch, buffer)
            cells = []
        self.buffers.put_cells(arrays, cells, batch.block_table, padded)
        self.buffers.upload()
        return sampled

    def forward(self) -> Tensor:
        """Hidden states of the staged rows; they hold until the next call."""
        self.graphs.run(FORWARD, self._padded)
        return self.buffers.hidden[: self._num_rows]

    def greedy(self) -> IntArray:
        """The most likely token of each row: int64 [rows], FAILED for none; there once the queue has come this far."""
        self.graphs.run(GREEDY, self._padded)
        return self.buffers.download(self._num_rows)

    def store(self, token_ids: Tensor) -> None:
        """What was sampled in another way, int64 [rows]: the input of each row's next step."""
        rows = self.buffers.inputs.rows[: self._num_rows]
        self._queue.run(lambda: self.buffers.last_tokens.index_copy_(0, rows, token_ids))

    def record_first(self) -> None:
        """The graphs to begin with (engine/worker/device/cuda_graphs.py)."""
        self.graphs.record_first(self._stage_padding)

    def record_next(self) -> bool:
        """One more, in idle time; False when there is none to come."""
        return self.graphs.record_next(self._stage_padding)

    def _send_cells(self, cells: list[int], batch: InputBatch, buffer: StepBuffer) -> None:
        places = np.array(cells, np.int64)
        indices, values = buffer.put(places), buffer.put(batch.block_table.reshape(-1)[places])
        buffer.upload()
        self._queue.run(lambda: self.buffers.block_tables.view(-1).index_copy_(0, indices, values))

    def _stage_padding(self, num_rows: int) -> None:
        arrays = self.buffers.begin()
        self.buffers.pad(arrays, 0, num_rows)
        self.buffers.put_cells(arrays, [], np.zeros(0, np.int32), num_rows)
        self.buffers.upload()

    # What is recorded. Everything is read from, and left in, `buffers`.

    @torch.inference_mode()
    def _forward(self, num_rows: int) -> None:
        ids = self.buffers.prepare(num_rows)
        hidden = self._decoder.forward(ids, self.buffers.metadata(num_rows, self._plan), self._kv_caches)
        self.buffers.hidden[:num_rows].copy_(hidden)

    @torch.inference_mode()
    def _greedy(self, num_rows: int) -> None:
        logits = self._decoder.compute_logits(self.buffers.hidden[:num_rows])
        output = sample(logits, None, self._counts)
        self.buffers.store(num_rows, output.token_ids, output.failed)
