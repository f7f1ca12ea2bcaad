"""DecodeRunner: runs decode steps on a GPU with one copy in, one or two CUDA graphs, and one copy out.

A decode step computes one token of every sequence. The forward pass is one graph and greedy sampling another: a step
with other sampling replays the first graph alone and samples from its hidden states.
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
    """capacity: the largest number of rows of a decode step. hidden_size, dtype: those of the decoder's hidden states.

    `graphs` False: no CUDA graph is recorded.
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
        attention_plan: AttentionPlan | None,
    ) -> None:
        self.capacity = settings.capacity
        self._attention_plan = attention_plan
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
        """Enter a plan's decodes into `batch` and upload the step's inputs. `buffer` takes arrays without a fixed
        place."""
        arrays = self.buffers.begin()
        sampled = batch.fill_decodes(decodes, blocks, self.buffers, arrays)
        self._num_rows = n = len(decodes)
        self._padded = padded = self.graphs.padded(n)
        self.buffers.pad(arrays, n, padded)
        cells = batch.take_changed_cells()
        if len(cells) > padded:  # sequences joined since the last decode step
            self._send_cells(cells, batch, buffer)
            cells = []
        self.buffers.put_cells(arrays, cells, batch.block_table, padded)
        self.buffers.upload()
        return sampled

    def forward(self) -> Tensor:
        """Hidden states [rows, hidden_size] of the staged rows, valid until the next call."""
        self.graphs.run(FORWARD, self._padded)
        return self.buffers.hidden[: self._num_rows]

    def greedy(self) -> IntArray:
        """The most likely token of each row, int64 [rows], or FAILED; valid once the queue has reached this point."""
        self.graphs.run(GREEDY, self._padded)
        return self.buffers.download(self._num_rows)

    def store(self, token_ids: Tensor) -> None:
        """Keep tokens sampled otherwise, int64 [rows], on the device as the input of the next step."""
        rows = self.buffers.inputs.rows[: self._num_rows]
        self._queue.run(lambda: self.buffers.last_tokens.index_copy_(0, rows, token_ids))

    def record_first(self) -> None:
        """Record the graphs of start-up (engine/worker/device/cuda_graphs.py)."""
        self.graphs.record_first(self._stage_padding)

    def record_next(self) -> bool:
        """Record the graphs of one more size in idle time; False if none is left."""
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

    # The recorded work. It reads from and writes to `buffers` only.

    @torch.inference_mode()
    def _forward(self, num_rows: int) -> None:
        ids = self.buffers.prepare(num_rows)
        hidden = self._decoder.forward(ids, self.buffers.metadata(num_rows, self._attention_plan), self._kv_caches)
        self.buffers.hidden[:num_rows].copy_(hidden)

    @torch.inference_mode()
    def _greedy(self, num_rows: int) -> None:
        logits = self._decoder.compute_logits(self.buffers.hidden[:num_rows])
        output = sample(logits, None, self._counts)
        self.buffers.store(num_rows, output.token_ids, output.failed)
