"""BucketRunner: runs steps of fixed sizes on a GPU with one copy in, one or two CUDA graphs, and one copy out.

There are two kinds of steps. A decode step computes one token of every sequence. A mixed step computes chunks of
prompts too: its lengths are inputs on the device, so that one graph serves every step of up to as many tokens and
sequences. The forward pass is one graph and greedy sampling another: a step with other sampling replays the first graph
alone and samples from its hidden states.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.executor.step import StepPlan
from engine.models.decoder import Decoder
from engine.models.layers.attention import KVCache
from engine.worker.batch.adapter_slots import AdapterSlots
from engine.worker.batch.bucket_buffers import BucketBuffers, input_bytes
from engine.worker.batch.device_rows import DeviceRows
from engine.worker.batch.input_batch import InputBatch, SampleTargets
from engine.worker.batch.step_buffer import IntArray, StepBuffer
from engine.worker.device.cuda_graphs import (
    Bucket,
    GraphRunner,
    Key,
    decode_sizes,
    mixed_buckets,
    mixed_seq_sizes,
    mixed_token_sizes,
    next_size,
)
from engine.worker.device.queue import DeviceQueue
from engine.worker.sampling.sampler import TokenCounts, sample
from kernels.attention.plan import AttentionPlan

DECODE, MIXED, GREEDY = "decode steps", "mixed steps", "greedy sampling"


@dataclass(frozen=True, slots=True)
class BucketSettings:
    """max_seqs: most sequences of a step in a bucket; max_tokens: most tokens of a step. hidden_size, dtype: those of
    the decoder's hidden states.

    `graphs` False: no CUDA graph is recorded, and steps with chunks run without buckets. graph_bytes: device memory
    that graphs may take, None for any.
    """

    max_seqs: int
    max_num_seqs: int
    max_tokens: int
    max_blocks: int
    hidden_size: int
    dtype: torch.dtype
    graphs: bool = True
    graph_bytes: int | None = None


class BucketRunner:
    """Call `stage_decodes` or `stage_mixed`, then `forward`, then `greedy` or `store`, for each step. `slots`: those
    that the staged step writes, int64 [tokens]."""

    def __init__(
        self,
        queue: DeviceQueue,
        decoder: Decoder,
        kv_caches: Sequence[KVCache],
        counts: TokenCounts,
        settings: BucketSettings,
        attention_plan: AttentionPlan | None,
        adapters: AdapterSlots | None,
    ) -> None:
        self._adapters = adapters
        self.max_seqs = settings.max_seqs
        self._decode_sizes = decode_sizes(settings.max_seqs)
        self._token_sizes = mixed_token_sizes(settings.max_tokens)
        self._seq_sizes = mixed_seq_sizes(settings.max_seqs)
        largest = Bucket(max(self._token_sizes[-1], settings.max_seqs), settings.max_seqs)
        self.device_rows = DeviceRows(queue.device, settings.max_num_seqs, settings.max_blocks, input_bytes(largest))
        self.buffers = BucketBuffers(queue, self.device_rows, largest, settings.hidden_size, settings.dtype)
        self._queue = queue
        self._decoder = decoder
        self._kv_caches = kv_caches
        self._counts = counts
        self._attention_plan = attention_plan
        self.graphs = GraphRunner(
            queue,
            {DECODE: self._forward_decodes, MIXED: self._forward_mixed, GREEDY: self._greedy},
            self._stage_padding,
            graph_keys(settings),
            enabled=settings.graphs,
            max_bytes=settings.graph_bytes,
        )
        self._step: Key = (DECODE, Bucket(0, 0))  # the staged step
        self._num_rows = 0  # rows that it samples
        self.slots: IntArray = np.zeros(0, np.int64)

    def mixed_bucket(self, num_tokens: int, num_seqs: int) -> Bucket | None:
        """The bucket of a step with chunks; None where no graph for it is recorded (yet)."""
        tokens, seqs = next_size(self._token_sizes, num_tokens), next_size(self._seq_sizes, num_seqs)
        if tokens is None or seqs is None or not self.graphs.enabled:
            return None
        bucket = Bucket(tokens, seqs)
        return bucket if self.graphs.has((MIXED, bucket)) else None

    def has_decode_graph(self, num_seqs: int) -> bool:
        """True if the forward pass of a decode step is replayed; otherwise its graph is the next to be recorded."""
        if num_seqs > self.max_seqs or not self.graphs.enabled:
            return False
        return self.graphs.has((DECODE, self._decode_bucket(num_seqs)))

    def stage_decodes(self, batch: InputBatch, plan: StepPlan, buffer: StepBuffer) -> SampleTargets:
        """Enter a plan of decodes and drafts, at most max_seqs rows, into `batch` and upload the step's inputs.
        `buffer` takes arrays without a fixed place."""
        n = plan.num_rows
        bucket = self._decode_bucket(n)
        arrays = self.buffers.begin(bucket)
        first_input = self.buffers.views(bucket).first_input
        sampled = batch.fill_decodes(plan.decodes, plan.decode_blocks, first_input, arrays, plan.drafts)
        self.buffers.pad(arrays, n, n, n)
        self._step, self._num_rows, self.slots = (DECODE, bucket), n, arrays.slots[:n]
        self._upload(batch, buffer)
        return sampled

    def stage_mixed(self, bucket: Bucket, batch: InputBatch, plan: StepPlan, buffer: StepBuffer) -> SampleTargets:
        """`stage_decodes` for a plan with chunks and without forks, in the bucket that mixed_bucket gave."""
        arrays = self.buffers.begin(bucket)
        layout = batch.lay_out(plan.decodes, plan.decode_blocks, plan.chunks, plan.drafts)
        layout.fill(arrays, self.buffers.views(bucket).first_input)
        n = len(layout.sampled)
        self.buffers.pad_mixed(arrays, len(layout.positions), len(layout.rows), n)
        self._step, self._num_rows, self.slots = (MIXED, bucket), n, layout.slots
        self._upload(batch, buffer)
        return layout.targets

    def forward(self) -> Tensor:
        """Hidden states [rows to sample, hidden_size] of the staged step, valid until the next call."""
        self.graphs.run(self._step)
        return self.buffers.hidden[: self._num_rows]

    def greedy(self) -> IntArray:
        """The most likely token of each row, int64 [rows], or FAILED; valid once the queue has reached this point."""
        self.graphs.run((GREEDY, self._decode_bucket(self._num_rows)))
        return self.buffers.download(self._num_rows)

    def begin_sampling(self) -> None:
        """Call it before compute_logits of the hidden states that `forward` gave."""
        if (adapters := self._adapters) is not None:
            rows = self.buffers.rows(self._num_rows)
            self._queue.run(lambda: adapters.layers.set_logits_rows(adapters.slots_of(rows), True))

    def store(self, token_ids: Tensor) -> None:
        """Keep tokens sampled otherwise, int64 [rows], on the device as the input of the next step."""
        rows = self.buffers.rows(self._num_rows)
        self._queue.run(lambda: self.device_rows.store(rows, token_ids))

    def _decode_bucket(self, num_rows: int) -> Bucket:
        size = next_size(self._decode_sizes, num_rows) if self.graphs.enabled else num_rows
        assert size is not None, "steps of more sequences do not run in buckets"
        return Bucket(size, size)

    def _upload(self, batch: InputBatch, buffer: StepBuffer) -> None:
        """Upload the staged arrays with the changed cells, which go before them where they are too many."""
        bucket, cells = self._step[1], batch.take_changed_cells()
        if len(cells) > bucket.tokens:  # e.g. a prompt whose prefix is cached
            enter = self.device_rows.stage_cells(cells, batch.block_table, buffer.put)
            buffer.upload()
            self._queue.run(enter)
            cells = []
        self.buffers.put_cells(self.buffers.current(bucket), cells, batch.block_table)
        self.buffers.upload(bucket)

    def _stage_padding(self, key: Key) -> None:
        name, bucket = key
        arrays = self.buffers.begin(bucket)
        if name == MIXED:
            arrays.cu_seqlens_q[0] = 0
            self.buffers.pad_mixed(arrays, 0, 0, 0)
        else:
            self.buffers.pad(arrays, 0, 0, 0)
        self.buffers.put_cells(arrays, [], np.zeros(0, np.int32))
        self.buffers.upload(bucket)

    # The recorded work. It reads from and writes to `buffers` only.

    @torch.inference_mode()
    def _forward_decodes(self, bucket: Bucket) -> None:
        ids = self.buffers.prepare(bucket, mixed=False)
        if self._adapters is not None:
            self._adapters.layers.set_rows(self._adapters.slots_of(self.buffers.rows(bucket.seqs)), None, True)
        metadata = self.buffers.decode_metadata(bucket, self._attention_plan)
        self.buffers.hidden[: bucket.seqs].copy_(self._decoder.forward(ids, metadata, self._kv_caches))

    @torch.inference_mode()
    def _forward_mixed(self, bucket: Bucket) -> None:
        ids = self.buffers.prepare(bucket, mixed=True)
        metadata = self.buffers.mixed_metadata(bucket, self._attention_plan)
        if self._adapters is not None and metadata.outputs is not None:
            slots = self._adapters.slots_of(self.buffers.token_rows(bucket))
            self._adapters.layers.set_rows(slots, metadata.outputs.indices, True)
        self.buffers.hidden[: bucket.seqs].copy_(self._decoder.forward(ids, metadata, self._kv_caches))

    @torch.inference_mode()
    def _greedy(self, bucket: Bucket) -> None:
        if self._adapters is not None:
            self._adapters.layers.set_logits_rows(self._adapters.slots_of(self.buffers.rows(bucket.seqs)), True)
        logits = self._decoder.compute_logits(self.buffers.hidden[: bucket.seqs])
        output = sample(logits, None, self._counts)
        self.buffers.store(bucket.seqs, output.token_ids, output.failed)


def graph_keys(settings: BucketSettings) -> list[Key]:
    """All graphs, in the order of recording: the largest mixed step, whose temporary memory all share; decode steps,
    the largest first; then mixed steps, the smallest first, because there the host is the bound."""
    *mixed, largest = mixed_buckets(settings.max_tokens, settings.max_seqs)
    sizes = reversed(decode_sizes(settings.max_seqs))
    decodes = [(name, Bucket(n, n)) for n in sizes for name in (GREEDY, DECODE)]
    return [(MIXED, largest), *decodes, *((MIXED, bucket) for bucket in mixed)]
