"""QueuedPasses: the passes of a draft model on a GPU, where the host waits once, for the tokens of all of them.

A pass of few rows is a CUDA graph, which leaves its tokens as the inputs of the next pass: the same graph is replayed
for every further token of a draft. The first pass reads the known tokens that the draft model has not computed, mostly
one or two of each sequence, each as a row of its own. A longer first pass, as over the prompt of a new sequence, is
launched kernel by kernel, in chunks.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from engine.config import MAX_DRAFT_TOKENS
from engine.models.decoder import Decoder
from engine.models.layers.attention import BatchMetadata, KVCache
from engine.worker.attention_warmup import warm_up_attention
from engine.worker.batch.device_rows import DeviceRows
from engine.worker.batch.input_batch import InputBatch
from engine.worker.batch.step_buffer import IntArray, StepBuffer
from engine.worker.device.cuda_graphs import MAX_DRAFT_ROWS, Bucket, GraphRunner, Key, decode_sizes, next_size
from engine.worker.device.queue import DeviceQueue
from engine.worker.speculation.draft_passes import DraftWork, first_pass, positions_of
from kernels.attention.plan import AttentionPlan

DRAFT = "passes of the draft model"  # as work of the GraphRunner
SIZES = decode_sizes(MAX_DRAFT_ROWS)
DRAFT_KEYS: list[Key] = [(DRAFT, Bucket(size, size)) for size in reversed(SIZES)]
STATE, TOKEN = 4, 1  # int64 numbers of a row, see QueuedPasses, and the place of its token


class QueuedPasses:
    """The state of a row of a pass, int64, is the row of InputBatch, the token, its position, and the position behind
    the last one that this draft may write. A row at that position does nothing: its slot is -1 and its length 0."""

    max_rows = MAX_DRAFT_ROWS

    def __init__(
        self,
        decoder: Decoder,
        kv_caches: Sequence[KVCache],
        batch: InputBatch,
        queue: DeviceQueue,
        graphs: GraphRunner,
        device_rows: DeviceRows,
        plan: AttentionPlan | None,
        max_num_tokens: int,
    ) -> None:
        """Adds its graphs to `graphs`. plan: for the draft model's heads. max_num_tokens: of one pass."""
        self._decoder, self._kv_caches, self._batch = decoder, kv_caches, batch
        self._queue, self._graphs, self._device_rows, self._plan = queue, graphs, device_rows, plan
        blocks = device_rows.max_blocks
        self._buffer = StepBuffer(buffer_bytes(max_num_tokens, len(batch.num_tokens), blocks), queue)
        self._state = torch.zeros((STATE, MAX_DRAFT_ROWS), dtype=torch.int64, device=queue.device)
        self._tables = torch.zeros((MAX_DRAFT_ROWS, blocks), dtype=torch.int32, device=queue.device)
        self._no_prefills = torch.zeros(1, dtype=torch.int32, device=queue.device)
        self._found = torch.zeros((MAX_DRAFT_TOKENS, MAX_DRAFT_ROWS), dtype=torch.int64, device=queue.device)
        self._found_on_host = queue.host_bytes(8 * self._found.numel()).view(torch.int64).view_as(self._found)
        graphs.add(DRAFT, self._pass, self._stage_padding, DRAFT_KEYS)

    def run(self, work: DraftWork) -> tuple[IntArray, float]:
        """Seconds count from the end of the work that was queued before."""
        started, before = time.perf_counter(), self._queue.mark()
        self._buffer.start()
        cells, table = self._batch.take_changed_cells(), self._batch.block_table
        enter = self._device_rows.stage_cells(cells, table, self._buffer.put)
        passes = self._stage_first(work), self._stage_further(work)
        is_busy = not before.done()  # asked this late because a device that rests needs a moment to see the mark
        self._buffer.upload()
        self._queue.run(enter)
        for launch in passes:
            launch()
        found = self._found_on_host[: work.num_passes]
        self._queue.copy(found, self._found[: work.num_passes])
        ready = self._queue.mark()
        if is_busy:
            before.wait()
            started = time.perf_counter()
        ready.wait()
        tokens: IntArray = found.numpy().T[: len(work.rows)].copy()
        return tokens, time.perf_counter() - started

    def warm_up(self, max_model_len: int) -> None:
        warm_up_attention(self._decoder, self._kv_caches, self._plan, max_model_len)

    def _stage_first(self, work: DraftWork) -> Callable[[], object]:
        """Put the inputs of the first pass into the upload. The function returned launches it."""
        found, put = self._found[0, : len(work.rows)], self._buffer.put
        if work.counts.sum() > MAX_DRAFT_ROWS:
            chunks = first_pass(self._batch, work, put, self._plan)
            return lambda: self._queue.run(lambda: found.copy_(self._most_likely(*chunks)))
        rows, positions = np.repeat(work.rows, work.counts), positions_of(work.starts, work.counts)
        bucket, state = self._stage(
            rows, self._batch.token_ids[rows, positions], positions, np.repeat(work.ends, work.counts)
        )
        lasts = put(np.cumsum(work.counts) - 1)

        def launch() -> None:
            self._queue.run(lambda: self._state[:, : bucket.seqs].copy_(state))
            self._graphs.run((DRAFT, bucket))
            self._queue.run(lambda: found.copy_(self._state[TOKEN].index_select(0, lasts)))

        return launch

    def _stage_further(self, work: DraftWork) -> Callable[[], object]:
        """`_stage_first` for all other passes, which compute one token of each row."""
        going = np.flatnonzero(work.lengths > 1)
        n, ends = len(going), work.ends[going]
        if not n:
            return lambda: None
        bucket, state = self._stage(work.rows[going], 0 * ends, ends, ends - 1 + work.lengths[going])
        places = self._buffer.put(going)

        def begin() -> None:
            self._state[:, : bucket.seqs].copy_(state)
            self._state[TOKEN, :n].copy_(self._found[0].index_select(0, places))

        def keep(found: Tensor) -> None:
            found.index_copy_(0, places, self._state[TOKEN, :n])

        def launch() -> None:
            self._queue.run(begin)
            for number in range(1, work.num_passes):
                self._graphs.run((DRAFT, bucket))
                self._queue.run(partial(keep, self._found[number]))

        return launch

    def _stage(self, rows: IntArray, ids: IntArray, positions: IntArray, ends: IntArray) -> tuple[Bucket, Tensor]:
        """(bucket, state int64 [STATE, bucket.seqs] on the device once it is uploaded). Rows of 0 are padding."""
        size = next_size(SIZES, len(rows))
        assert size is not None, "more rows run without a graph"
        state = np.zeros((STATE, size), np.int64)
        state[:, : len(rows)] = rows, ids, positions, ends
        return Bucket(size, size), self._buffer.put(state)

    def _stage_padding(self, key: Key) -> None:
        self._queue.run(self._state.zero_)

    @torch.inference_mode()
    def _pass(self, bucket: Bucket) -> None:
        """The work of a graph."""
        rows, ids, positions, ends = self._state[:, : bucket.seqs]
        tables, block_size = self._tables[: bucket.seqs], self._batch.block_size
        torch.index_select(self._device_rows.block_tables, 0, rows, out=tables)
        is_done = positions >= ends
        at = positions.masked_fill(is_done, 0)
        blocks = tables.gather(1, (at // block_size)[:, None])[:, 0]
        metadata = BatchMetadata(
            positions=at,
            slot_mapping=(blocks * block_size + at % block_size).masked_fill_(is_done, -1),
            num_decodes=bucket.seqs,
            block_tables=tables,
            seq_lens=(at + 1).masked_fill_(is_done, 0).int(),
            cu_seqlens_q=self._no_prefills,
            max_seqlen_q=0,
            plan=self._plan,
        )
        ids.copy_(self._most_likely(ids, metadata))
        positions.add_(1)

    def _most_likely(self, input_ids: Tensor, metadata: BatchMetadata) -> Tensor:
        """The most likely token after each output row, int64 [rows]; any token where the logits are none."""
        return self._decoder.compute_logits(self._decoder.forward(input_ids, metadata, self._kv_caches)).argmax(-1)


def buffer_bytes(max_num_tokens: int, max_num_seqs: int, max_blocks: int) -> int:
    """Bytes of the arrays of the largest step: ids, positions and slots; tables of two passes, and their changed
    entries; some numbers of each row."""
    return 24 * max_num_tokens + max_num_seqs * (16 * max_blocks + 128) + 4096
