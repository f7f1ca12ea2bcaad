"""DecodeBuffers: the tensors that a decode step reads and writes on the device. They never move.

A CUDA graph reads the addresses that it was recorded with. So the step's inputs have fixed places in one packed buffer,
which the host fills and uploads in one copy. Block tables and last tokens stay on the device, one row for each row of
InputBatch and one more row for padding to write to; only changed entries are uploaded.
"""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy.typing as npt
import torch
from torch import Tensor

from engine.models.layers.attention import BatchMetadata
from engine.worker.batch.step_buffer import BUFFERED_STEPS
from engine.worker.device.queue import DeviceQueue, Mark
from kernels.attention.plan import AttentionPlan

ALIGNED_ROWS = 16  # every field starts at an address that vector loads accept
FAILED = -1  # takes the place of a token id

A = TypeVar("A", Tensor, npt.NDArray[Any])


@dataclass(frozen=True, slots=True)
class DecodeInputs(Generic[A]):
    """One entry per row of the step, [capacity]; int64 unless noted.

    sources: index of the input token in DecodeBuffers.token_source: the sequence's row, or, for a token in input_ids,
    first_input + row of the step. slots: -1 for padding. rows: rows of InputBatch; max_num_seqs for padding. cells:
    entries of the block tables (row * max_blocks + index) that change; for padding the first entry of the last row.
    seq_lens int32: this step's token included; 0 for padding. blocks int32: the new values of the cells.
    """

    input_ids: A
    sources: A
    positions: A
    slots: A
    rows: A
    cells: A
    seq_lens: A
    blocks: A


NUM_INT64, NUM_INT32 = 6, 2  # fields, in this order
BYTES_PER_ROW = 8 * NUM_INT64 + 4 * NUM_INT32


def input_views(wide: A, narrow: A, capacity: int) -> DecodeInputs[A]:
    """The fields of a packed buffer: `wide` int64 [6 * capacity], followed by `narrow` int32 [2 * capacity]."""
    fields = [wide[i * capacity : (i + 1) * capacity] for i in range(NUM_INT64)]
    fields += [narrow[i * capacity : (i + 1) * capacity] for i in range(NUM_INT32)]
    return DecodeInputs(*fields)


class DecodeBuffers:
    """Buffers for steps of up to `capacity` rows. The host may write the arrays of `begin` until `upload`.

    Results: hidden [capacity, hidden_size] and tokens int64 [capacity], FAILED for a row without a token.
    """

    def __init__(
        self,
        queue: DeviceQueue,
        capacity: int,
        max_num_seqs: int,
        max_blocks: int,
        hidden_size: int,
        dtype: torch.dtype,
    ) -> None:
        device = queue.device
        self._queue = queue
        self.padding_row = max_num_seqs
        self.max_blocks = max_blocks
        capacity = _aligned(capacity)
        # Last tokens and input ids are adjacent, so that one gather reads any token.
        self.first_input = first = _aligned(max_num_seqs + 1)
        memory = torch.zeros(8 * first + BYTES_PER_ROW * capacity, dtype=torch.uint8, device=device)
        self.last_tokens = memory[: 8 * first].view(torch.int64)
        self._packed = memory[8 * first :]
        self.token_source = memory[: 8 * (first + capacity)].view(torch.int64)
        self.inputs = input_views(*_split(self._packed, capacity), capacity)
        self.block_tables = torch.zeros((max_num_seqs + 1, max_blocks), dtype=torch.int32, device=device)
        self.step_tables = torch.zeros((capacity, max_blocks), dtype=torch.int32, device=device)
        self.hidden = torch.zeros((capacity, hidden_size), dtype=dtype, device=device)
        self.tokens = torch.zeros(capacity, dtype=torch.int64, device=device)
        self._no_prefills = torch.zeros(1, dtype=torch.int32, device=device)
        self._packed_host = [queue.host_bytes(BYTES_PER_ROW * capacity) for _ in range(BUFFERED_STEPS)]
        self._inputs_host = [_host_views(packed, capacity) for packed in self._packed_host]
        self._tokens_host = [queue.host_bytes(8 * capacity).view(torch.int64) for _ in range(BUFFERED_STEPS)]
        self._copied: list[Mark | None] = [None] * BUFFERED_STEPS
        self._turn = 0

    def begin(self) -> DecodeInputs[npt.NDArray[Any]]:
        """The arrays for the next step. Waits for the copy of the step that used them last, which is done by then."""
        self._turn = (self._turn + 1) % BUFFERED_STEPS
        if (copied := self._copied[self._turn]) is not None:
            copied.wait()
            self._copied[self._turn] = None
        return self._inputs_host[self._turn]

    def upload(self) -> None:
        self._queue.copy(self._packed, self._packed_host[self._turn])
        self._copied[self._turn] = self._queue.mark()

    def download(self, num_rows: int) -> npt.NDArray[Any]:
        """Queue the copy of `tokens` to the host. The array is valid once that is done, until the step after next
        begins."""
        host = self._tokens_host[self._turn][:num_rows]
        self._queue.copy(host, self.tokens[:num_rows])
        return host.numpy()

    def metadata(self, num_rows: int, attention_plan: AttentionPlan | None) -> BatchMetadata:
        """The metadata of a step of num_rows decodes: views that stay valid from step to step."""
        return BatchMetadata(
            positions=self.inputs.positions[:num_rows],
            slot_mapping=self.inputs.slots[:num_rows],
            num_decodes=num_rows,
            block_tables=self.step_tables[:num_rows],
            seq_lens=self.inputs.seq_lens[:num_rows],
            cu_seqlens_q=self._no_prefills,
            max_seqlen_q=0,
            plan=attention_plan,
        )

    def prepare(self, num_rows: int) -> Tensor:
        """On the device: update the block tables; returns the input ids, int64 [num_rows]."""
        inputs = self.inputs
        self.block_tables.view(-1).index_copy_(0, inputs.cells[:num_rows], inputs.blocks[:num_rows])
        torch.index_select(self.block_tables, 0, inputs.rows[:num_rows], out=self.step_tables[:num_rows])
        return self.token_source.index_select(0, inputs.sources[:num_rows])

    def store(self, num_rows: int, token_ids: Tensor, failed: Tensor) -> None:
        """On the device: keep the sampled tokens, int64 [num_rows], and which of them failed, bool [num_rows]."""
        self.last_tokens.index_copy_(0, self.inputs.rows[:num_rows], token_ids)
        self.tokens[:num_rows].copy_(token_ids.masked_fill(failed, FAILED))

    def pad(self, arrays: DecodeInputs[npt.NDArray[Any]], start: int, end: int) -> None:
        """Make rows `start` to `end` padding: they read no cache, and no row reads what they write."""
        part = slice(start, end)
        arrays.sources[part] = arrays.positions[part] = arrays.seq_lens[part] = 0
        arrays.slots[part] = -1
        arrays.rows[part] = self.padding_row

    def put_cells(
        self, arrays: DecodeInputs[npt.NDArray[Any]], cells: list[int], table: npt.NDArray[Any], num_rows: int
    ) -> None:
        """Enter changed cells (at most num_rows) of the host's block tables int32 [max_num_seqs, max_blocks]."""
        n = len(cells)
        arrays.cells[:n] = cells
        arrays.blocks[:n] = table.reshape(-1)[arrays.cells[:n]]
        arrays.cells[n:num_rows] = self.padding_row * self.max_blocks
        arrays.blocks[n:num_rows] = 0


def _aligned(num_rows: int) -> int:
    return -(-num_rows // ALIGNED_ROWS) * ALIGNED_ROWS


def _split(packed: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    end = 8 * NUM_INT64 * capacity
    return packed[:end].view(torch.int64), packed[end:].view(torch.int32)


def _host_views(packed: Tensor, capacity: int) -> DecodeInputs[npt.NDArray[Any]]:
    wide, narrow = _split(packed, capacity)
    return input_views(wide.numpy(), narrow.numpy(), capacity)
