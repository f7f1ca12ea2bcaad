"""BucketBuffers: the tensors that a step of a fixed size (a bucket) reads and writes on the device. They never move.

A CUDA graph reads the addresses that it was recorded with. So the inputs of a bucket have fixed places in one packed
buffer, which the host fills and uploads in one copy. Buckets share the buffer: each has its own layout from the
buffer's start, so that a small step uploads little.
"""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy.typing as npt
import torch
from torch import Tensor

from engine.models.layers.attention import BatchMetadata, OutputRows
from engine.worker.batch.device_rows import ALIGNMENT, DeviceRows
from engine.worker.batch.step_buffer import BUFFERED_STEPS
from engine.worker.device.cuda_graphs import Bucket
from engine.worker.device.queue import DeviceQueue, Mark
from kernels.attention.plan import AttentionPlan
from kernels.sampling import FAILED

A = TypeVar("A", Tensor, npt.NDArray[Any])


@dataclass(frozen=True, slots=True)
class BucketInputs(Generic[A]):
    """The inputs of one step: T tokens and S sequences of a bucket. int64 unless noted.

    rows (S): rows of InputBatch whose next token the step samples. input_ids (T). sources (T): index of each input
    token in DeviceRows.token_source: the sequence's row, or, for a token in input_ids, first_input + its index.
    positions (T). slots (T): -1 for padding. cells (T): entries of the block tables (row * max_blocks + index) that
    change. seq_lens int32 (S): this step's tokens included. blocks int32 (T): the new values of the cells.

    For mixed steps alone: seq_rows (S), the rows of all sequences; outputs (S), the index among the tokens of each of
    `rows`; output_lens int32 (S), their lengths; cu_seqlens_q int32 (S + 1).
    """

    rows: A  # first: greedy sampling finds it at the same place in every bucket
    input_ids: A
    sources: A
    positions: A
    slots: A
    cells: A
    seq_rows: A
    outputs: A
    seq_lens: A
    blocks: A
    output_lens: A
    cu_seqlens_q: A


NUM_INT64, NUM_INT32 = 8, 4  # fields, in this order


def field_counts(bucket: Bucket) -> tuple[int, ...]:
    """The length of each field of BucketInputs."""
    t, s = bucket
    return (s, t, t, t, t, t, s, s, s, t, s, s + 1)


def input_bytes(bucket: Bucket) -> int:
    """Bytes of a bucket's packed inputs; every field starts at an address that vector loads accept."""
    return sum(_aligned(count * size) for count, size in zip(field_counts(bucket), _SIZES, strict=True))


_SIZES = (8,) * NUM_INT64 + (4,) * NUM_INT32


def input_views(memory: Tensor, bucket: Bucket) -> BucketInputs[Tensor]:
    """The fields of a bucket in a packed buffer, uint8 [input_bytes(bucket) or more]."""
    fields, start = [], 0
    for count, size in zip(field_counts(bucket), _SIZES, strict=True):
        end = start + count * size
        fields.append(memory[start:end].view(torch.int64 if size == 8 else torch.int32))
        start = _aligned(end)
    return BucketInputs(*fields)


@dataclass(frozen=True, slots=True)
class BucketViews:
    """The inputs of one bucket on the device and in each host buffer, and the bytes that hold all of them; first_input:
    see BucketInputs.sources."""

    device: BucketInputs[Tensor]
    hosts: list[BucketInputs[npt.NDArray[Any]]]
    packed: Tensor
    packed_hosts: list[Tensor]
    first_input: int


class BucketBuffers:
    """Buffers for steps of buckets up to `largest`. The host may write the arrays of `begin` until `upload`.

    Results: hidden [largest.seqs, hidden_size] and tokens int64 [largest.seqs], FAILED for a row without a token.
    """

    def __init__(
        self, queue: DeviceQueue, device_rows: DeviceRows, largest: Bucket, hidden_size: int, dtype: torch.dtype
    ) -> None:
        """device_rows.inputs has room for the inputs of `largest`."""
        device = queue.device
        self._queue = queue
        self.device_rows = device_rows
        self.hidden = torch.zeros((largest.seqs, hidden_size), dtype=dtype, device=device)
        self.tokens = torch.zeros(largest.seqs, dtype=torch.int64, device=device)
        self._no_prefills = torch.zeros(1, dtype=torch.int32, device=device)
        self._packed_host = [queue.host_bytes(input_bytes(largest)) for _ in range(BUFFERED_STEPS)]
        self._tokens_host = [queue.host_bytes(8 * largest.seqs).view(torch.int64) for _ in range(BUFFERED_STEPS)]
        self._copied: list[Mark | None] = [None] * BUFFERED_STEPS
        self._turn = 0
        self._views: dict[Bucket, BucketViews] = {}

    def views(self, bucket: Bucket) -> BucketViews:
        """The places of a bucket's inputs."""
        if (views := self._views.get(bucket)) is None:
            first = _aligned(8 * bucket.seqs) // 8  # input_ids lie behind `rows`
            views = self._views[bucket] = BucketViews(
                device=input_views(self.device_rows.inputs, bucket),
                hosts=[_as_numpy(input_views(packed, bucket)) for packed in self._packed_host],
                packed=self.device_rows.inputs[: input_bytes(bucket)],
                packed_hosts=[packed[: input_bytes(bucket)] for packed in self._packed_host],
                first_input=self.device_rows.first_input + first,
            )
        return views

    def begin(self, bucket: Bucket) -> BucketInputs[npt.NDArray[Any]]:
        """The arrays for the next step. Waits for the copy of the step that used them last, which is done by then."""
        self._turn = (self._turn + 1) % BUFFERED_STEPS
        if (copied := self._copied[self._turn]) is not None:
            copied.wait()
            self._copied[self._turn] = None
        return self.current(bucket)

    def current(self, bucket: Bucket) -> BucketInputs[npt.NDArray[Any]]:
        """The arrays that the last `begin` gave."""
        return self.views(bucket).hosts[self._turn]

    def upload(self, bucket: Bucket) -> None:
        """Queue the copy of the arrays that `begin` gave for this bucket."""
        views = self.views(bucket)
        self._queue.copy(views.packed, views.packed_hosts[self._turn])
        self._copied[self._turn] = self._queue.mark()

    def download(self, num_rows: int) -> npt.NDArray[Any]:
        """Queue the copy of `tokens` to the host. The array is valid once that is done, until the step after next
        begins."""
        host = self._tokens_host[self._turn][:num_rows]
        self._queue.copy(host, self.tokens[:num_rows])
        return host.numpy()

    def decode_metadata(self, bucket: Bucket, plan: AttentionPlan | None) -> BatchMetadata:
        """The metadata of a step of decodes alone: views that stay valid from step to step."""
        inputs = self.views(bucket).device
        return BatchMetadata(
            positions=inputs.positions,
            slot_mapping=inputs.slots,
            num_decodes=bucket.tokens,
            block_tables=self.device_rows.step_tables[: bucket.seqs],
            seq_lens=inputs.seq_lens,
            cu_seqlens_q=self._no_prefills,
            max_seqlen_q=0,
            plan=plan,
        )

    def mixed_metadata(self, bucket: Bucket, plan: AttentionPlan | None) -> BatchMetadata:
        """The metadata of a step with chunks, whose lengths only the device knows."""
        inputs, device_rows = self.views(bucket).device, self.device_rows
        return BatchMetadata(
            positions=inputs.positions,
            slot_mapping=inputs.slots,
            num_decodes=None,
            block_tables=device_rows.step_tables[: bucket.seqs],
            seq_lens=inputs.seq_lens,
            cu_seqlens_q=inputs.cu_seqlens_q,
            max_seqlen_q=bucket.tokens,
            outputs=OutputRows(inputs.outputs, device_rows.output_tables[: bucket.seqs], inputs.output_lens),
            plan=plan,
        )

    def prepare(self, bucket: Bucket, *, mixed: bool) -> Tensor:
        """On the device: update the block tables and gather those of the step; returns the input ids, int64 (T)."""
        inputs, device_rows = self.views(bucket).device, self.device_rows
        device_rows.block_tables.view(-1).index_copy_(0, inputs.cells, inputs.blocks)
        if mixed:
            device_rows.gather(inputs.seq_rows, inputs.rows)
        else:
            device_rows.gather(inputs.rows)
        return device_rows.token_source.index_select(0, inputs.sources)

    def store(self, num_rows: int, token_ids: Tensor, failed: Tensor) -> None:
        """On the device: keep the sampled tokens, int64 [num_rows], and which of them failed, bool [num_rows]."""
        self.device_rows.store(self.rows(num_rows), token_ids)
        self.tokens[:num_rows].copy_(token_ids.masked_fill(failed, FAILED))

    def rows(self, num_rows: int) -> Tensor:
        """BucketInputs.rows on the device, int64 [num_rows]: they have the same place in every bucket."""
        return self.device_rows.inputs[: 8 * num_rows].view(torch.int64)

    def token_rows(self, bucket: Bucket) -> Tensor:
        """On the device: the row of InputBatch of each token of a mixed step, int64 (T); any row for padding."""
        inputs = self.views(bucket).device
        tokens = torch.arange(bucket.tokens, dtype=torch.int32, device=inputs.cu_seqlens_q.device)
        places = torch.searchsorted(inputs.cu_seqlens_q[1:], tokens, right=True).clamp_(max=bucket.seqs - 1)
        return inputs.seq_rows.index_select(0, places)

    def pad(self, arrays: BucketInputs[npt.NDArray[Any]], num_tokens: int, num_seqs: int, num_outputs: int) -> None:
        """Make all entries from these counts on padding: they read no cache, and no row reads what they write.

        A padding token reads the last token of row 0 and has slot -1; a padding sequence is empty; an output row that
        is padding computes row 0 of the step with no key, and its token goes to the padding row.
        """
        for tokens in (arrays.sources, arrays.positions):
            tokens[num_tokens:] = 0
        arrays.slots[num_tokens:] = -1
        arrays.seq_lens[num_seqs:] = 0
        arrays.rows[num_outputs:] = self.device_rows.padding_row

    def pad_mixed(
        self, arrays: BucketInputs[npt.NDArray[Any]], num_tokens: int, num_seqs: int, num_outputs: int
    ) -> None:
        """`pad` for a mixed step, which has more fields."""
        self.pad(arrays, num_tokens, num_seqs, num_outputs)
        arrays.seq_rows[num_seqs:] = self.device_rows.padding_row
        arrays.cu_seqlens_q[num_seqs + 1 :] = num_tokens
        arrays.outputs[num_outputs:] = 0
        arrays.output_lens[num_outputs:] = 0

    def put_cells(self, arrays: BucketInputs[npt.NDArray[Any]], cells: list[int], table: npt.NDArray[Any]) -> None:
        """Enter changed cells (as many as tokens, at most) of the host's block tables int32 [max_num_seqs,
        max_blocks]."""
        n = len(cells)
        arrays.cells[:n] = cells
        arrays.blocks[:n] = table.reshape(-1)[arrays.cells[:n]]
        arrays.cells[n:] = self.device_rows.padding_row * self.device_rows.max_blocks
        arrays.blocks[n:] = 0


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _as_numpy(views: BucketInputs[Tensor]) -> BucketInputs[npt.NDArray[Any]]:
    return BucketInputs(*(getattr(views, name).numpy() for name in BucketInputs.__dataclass_fields__))
