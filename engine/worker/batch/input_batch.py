"""InputBatch: the Worker's mirror of the live sequences; makes the tensors of a step.

Every sequence has a fixed row from the plan that brings it to the plan that removes it, so a step costs a few
vectorised gathers and no Python code per token. On a GPU all arrays of a step are uploaded in one copy (StepBuffer). A
token that was sampled but has not reached the host yet is -(row + 1) in its sequence's row; the device replaces it by
the real token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from engine.errors import EngineError
from engine.executor.step import NewSequence, SequenceStep
from engine.models.layers.attention import BatchMetadata, OutputRows
from engine.worker.batch.decode_buffers import DecodeBuffers, DecodeInputs
from engine.worker.batch.step_buffer import IntArray, StepBuffer
from kernels.attention.flashinfer import PlannedPrefill
from kernels.attention.plan import AttentionPlan

DISAGREE = "the plan and the Worker disagree on the number of known tokens"
NO_BLOCK = "the plan computes tokens that have no KV block"


@dataclass(frozen=True, slots=True)
class SampleTargets:
    """The tokens that a step samples, one entry each: sequence id, row in the batch, position (number of tokens
    before)."""

    seq_ids: IntArray
    rows: IntArray
    positions: IntArray


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs of the decoder and the sampler for one step.

    input_ids int64 [num_tokens]: a negative id (has_pending) stands for the last token of row -id - 1, which is on the
    device only. sample_indices: the rows of the hidden states to sample; None if these are all rows in order. rows,
    starts, ends: for each sequence that computes tokens, its row in the batch, the position of its first such token,
    and the end of its tokens among those of the step.
    """

    input_ids: Tensor
    metadata: BatchMetadata
    has_pending: bool
    targets: SampleTargets
    sample_indices: Tensor | None
    rows: IntArray
    starts: IntArray
    ends: IntArray


class InputBatch:
    """Rows of host arrays, one per live sequence.

    `token_ids` int32 [max_num_seqs, max_model_len + 1] holds the known tokens, also those that the Worker sampled;
    `block_table` int32 [max_num_seqs, max_blocks]. Pages of rows that were never used take no memory.
    """

    def __init__(
        self, max_num_seqs: int, max_model_len: int, block_size: int, attention_plan: AttentionPlan | None = None
    ) -> None:
        max_blocks = -(-max_model_len // block_size)
        self.block_size = block_size
        self.attention_plan = attention_plan
        self._slots_per_block = np.int64(block_size)
        self.max_model_len = max_model_len
        self.token_ids = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        self.block_table = np.zeros((max_num_seqs, max_blocks), np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int64)  # known tokens
        self.num_computed = np.zeros(max_num_seqs, np.int64)
        self.num_prompt = np.zeros(max_num_seqs, np.int64)
        self.num_blocks = np.zeros(max_num_seqs, np.int64)
        self.seq_ids = np.full(max_num_seqs, -1, np.int64)
        self.parent_row = np.full(max_num_seqs, -1, np.int64)  # for a fork, the row that computes its logits
        self.row_of: dict[int, int] = {}
        # Changed entries of the block table (row * max_blocks + index), for a device with a copy of the table; None: no
        # copy.
        self.changed_cells: list[int] | None = None
        self._decodes: tuple[list[int], IntArray] | None = None  # decodes of the last step, and their rows
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    def add(self, new: NewSequence) -> int:
        """Give a sequence a row and return it. EngineError if the Worker cannot hold the sequence."""
        if new.seq_id in self.row_of:
            raise EngineError(f"sequence {new.seq_id} was sent as new while it is live")
        if not self._free_rows:
            raise EngineError(f"the plan brings more than max_num_seqs={len(self.num_tokens)} live sequences")
        if len(new.token_ids) > self.token_ids.shape[1]:
            raise EngineError(f"sequence {new.seq_id} has {len(new.token_ids)} tokens, more than max_model_len")
        row = self._free_rows.pop()
        self._decodes = None
        self.row_of[new.seq_id] = row
        self.parent_row[row] = -1 if new.fork_of is None else self.row_of[new.fork_of]
        self.seq_ids[row] = new.seq_id
        self.token_ids[row, : len(new.token_ids)] = new.token_ids
        self.num_tokens[row] = len(new.token_ids)
        self.num_computed[row] = new.num_computed_tokens
        self.num_prompt[row] = new.num_prompt_tokens
        self.num_blocks[row] = 0
        self._append_blocks(row, new.block_ids)
        return row

    def remove(self, seq_id: int) -> int | None:
        """Free a row and return it; None for an unknown id: a sequence may be removed before it reached the Worker."""
        row = self.row_of.pop(seq_id, None)
        if row is not None:
            self._decodes = None
            self.seq_ids[row] = -1
            self._free_rows.append(row)
        return row

    def replace_last_block(self, seq_id: int, block_id: int) -> None:
        """Copy-on-write: the sequence writes to `block_id` from here on, in place of its last block."""
        row = self.row_of[seq_id]
        self._set_blocks(row, int(self.num_blocks[row]) - 1, [block_id])

    def fill_decodes(
        self, decodes: list[int], blocks: list[int], buffers: DecodeBuffers, arrays: DecodeInputs[IntArray]
    ) -> SampleTargets:
        """`build` for a step of decodes alone, whose inputs go into the arrays of DecodeBuffers."""
        before = self._decodes
        rows = self._decode_rows(decodes, blocks)
        n = len(rows)
        computed = self.num_computed[rows]
        seq_lens = computed + 1
        self._check_decodes(rows, seq_lens)
        arrays.rows[:n] = rows
        arrays.positions[:n] = computed
        arrays.seq_lens[:n] = seq_lens
        places, offsets = np.divmod(computed, self.block_size)
        slots = self.block_table[rows, places] * self._slots_per_block
        arrays.slots[:n] = np.add(slots, offsets, out=slots)
        if self._decodes is before:  # the step before sampled all of these tokens on the device
            arrays.sources[:n] = rows
        else:
            arrays.input_ids[:n] = input_ids = self.token_ids[rows, computed]
            on_host = np.arange(buffers.first_input, buffers.first_input + n)
            arrays.sources[:n] = np.where(input_ids < 0, -1 - input_ids, on_host)
        self.num_computed[rows] = seq_lens
        self.token_ids[rows, seq_lens] = -1 - rows
        self.num_tokens[rows] = seq_lens + 1
        return SampleTargets(self.seq_ids[rows], rows, seq_lens)

    def take_changed_cells(self) -> list[int]:
        changed, self.changed_cells = self.changed_cells or [], []
        return changed

    def build(
        self,
        decodes: list[int],
        blocks: list[int],
        chunks: Sequence[SequenceStep],
        buffer: StepBuffer,
        *,
        every_row: bool = False,
    ) -> StepInputs:
        """The inputs of a step, sequences with one token first; counts its tokens as computed and as sampled.

        `decodes`, `blocks` and `chunks` are those of StepPlan. every_row asks for the hidden states of all rows, not of
        the sampled rows alone. The place of a sampled token holds a placeholder until `store_tokens`.
        """
        rows, counts, samples = self._step_rows(self._decode_rows(decodes, blocks), chunks)
        self._decodes = None
        if chunks:
            order = np.argsort(np.where(counts == 0, 2, counts > 1), kind="stable")  # decodes, prefills, forks
            order, forks = np.split(order, [len(counts) - np.count_nonzero(counts == 0)])
            forks, rows, counts, samples = rows[forks], rows[order], counts[order], samples[order]
        else:
            forks = rows[:0]
        starts = self.num_computed[rows]
        seq_lens = starts + counts
        self._check(rows, seq_lens, samples)

        ends = np.cumsum(counts)
        token_rows = np.repeat(rows, counts)
        positions = np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)
        input_ids = self.token_ids[token_rows, positions].astype(np.int64)
        blocks = self.block_table[token_rows, positions // self.block_size].astype(np.int64)
        slots = blocks * self.block_size + positions % self.block_size

        num_decodes = len(rows) - int(np.count_nonzero(counts > 1))
        cu_seqlens_q = np.zeros(len(rows) - num_decodes + 1, np.int32)
        np.cumsum(counts[num_decodes:], out=cu_seqlens_q[1:])
        widest = -(-int(seq_lens.max()) // self.block_size)
        sampled, parents = np.flatnonzero(samples), self._parents(rows, samples, forks)
        metadata = BatchMetadata(
            positions=buffer.put(positions),
            slot_mapping=buffer.put(slots),
            num_decodes=num_decodes,
            block_tables=buffer.put(self.block_table[rows, :widest]),
            seq_lens=buffer.put(seq_lens.astype(np.int32)),
            cu_seqlens_q=buffer.put(cu_seqlens_q),
            max_seqlen_q=int(counts[num_decodes:].max(initial=0)),
            outputs=None if every_row else self._outputs(rows, ends, seq_lens, sampled, widest, buffer),
            plan=self.attention_plan,
            prefill=self._plan_prefills(rows[num_decodes:], cu_seqlens_q, seq_lens[num_decodes:], buffer),
        )
        hidden_rows = np.concatenate([np.arange(len(sampled)), np.searchsorted(sampled, parents)])
        sampled = np.concatenate([sampled, parents])
        if every_row:
            hidden_rows = ends[sampled] - 1
        sample_rows = np.concatenate([rows[samples], forks])
        inputs = StepInputs(
            input_ids=buffer.put(input_ids),
            metadata=metadata,
            has_pending=bool((input_ids < 0).any()),
            targets=SampleTargets(self.seq_ids[sample_rows], sample_rows, seq_lens[sampled]),
            sample_indices=buffer.put(hidden_rows) if len(forks) or every_row else None,
            rows=rows,
            starts=starts,
            ends=ends,
        )
        self._advance(rows, seq_lens, sample_rows)
        return inputs

    def store_tokens(self, targets: SampleTargets, token_ids: IntArray) -> None:
        """Enter the sampled tokens of a step once the host knows them; skips sequences removed meanwhile."""
        live = self.seq_ids[targets.rows] == targets.seq_ids
        self.token_ids[targets.rows[live], targets.positions[live]] = token_ids[live]

    def _plan_prefills(
        self, rows: IntArray, cu_seqlens_q: IntArray, seq_lens: IntArray, buffer: StepBuffer
    ) -> PlannedPrefill | None:
        """FlashInfer's plan of a step's prefills, if FlashInfer computes them."""
        flashinfer = None if self.attention_plan is None else self.attention_plan.flashinfer
        if flashinfer is None or not len(rows):
            return None
        num_blocks = -(-seq_lens // self.block_size)
        widest = int(num_blocks.max())
        block_ids = self.block_table[rows, :widest][np.arange(widest) < num_blocks[:, None]]
        return flashinfer.plan(cu_seqlens_q, seq_lens, buffer.put(block_ids))

    def _outputs(
        self, rows: IntArray, ends: IntArray, seq_lens: IntArray, sampled: IntArray, widest: int, buffer: StepBuffer
    ) -> OutputRows | None:
        """The output rows: the last tokens of `sampled`; None if these are all tokens of the step.

        A step that samples nothing has one output row too, whose result nothing reads.
        """
        if len(sampled) == ends[-1]:
            return None
        wanted = sampled if len(sampled) else np.zeros(1, np.int64)
        return OutputRows(
            indices=buffer.put(ends[wanted] - 1),
            block_tables=buffer.put(self.block_table[rows[wanted], :widest]),
            seq_lens=buffer.put(seq_lens[wanted].astype(np.int32)),
        )

    def _decode_rows(self, decodes: list[int], blocks: list[int]) -> IntArray:
        """The rows of `decodes`; also enters their new blocks, pairs of sequence id and block id."""
        row_of = self.row_of
        for seq_id, block_id in zip(blocks[::2], blocks[1::2], strict=True):
            self._append_blocks(row_of[seq_id], [block_id])
        if self._decodes is None or self._decodes[0] != decodes:  # rare: decodes mostly repeat
            self._decodes = decodes, np.fromiter(map(row_of.__getitem__, decodes), np.int64, len(decodes))
        return self._decodes[1]

    def _step_rows(self, decodes: IntArray, chunks: Sequence[SequenceStep]) -> tuple[IntArray, IntArray, IntArray]:
        if not chunks:
            return decodes, np.ones(len(decodes), np.int64), np.ones(len(decodes), np.bool_)
        rows = np.concatenate([decodes, np.empty(len(chunks), np.int64)])
        counts = np.ones(len(rows), np.int64)
        samples = np.ones(len(rows), np.bool_)
        row_of = self.row_of
        for i, step in enumerate(chunks, start=len(decodes)):
            row = row_of[step.seq_id]
            rows[i], counts[i], samples[i] = row, step.num_tokens, step.sample
            if step.new_block_ids:
                self._append_blocks(row, step.new_block_ids)
        return rows, counts, samples

    def _parents(self, rows: IntArray, samples: IntArray, forks: IntArray) -> IntArray:
        """The index in `rows` (the rows that compute) of the parent of each fork."""
        place = np.full(len(self.num_tokens), -1, np.int64)
        place[rows] = np.arange(len(rows))
        parents = place[self.parent_row[forks]]
        if (parents < 0).any() or not samples[parents].all():
            raise EngineError("the plan forks a sequence that samples nothing in this step")
        return parents

    def _append_blocks(self, row: int, block_ids: list[int]) -> None:
        start = int(self.num_blocks[row])
        self._set_blocks(row, start, block_ids)
        self.num_blocks[row] = start + len(block_ids)

    def _set_blocks(self, row: int, start: int, block_ids: list[int]) -> None:
        end = start + len(block_ids)
        self.block_table[row, start:end] = block_ids
        if self.changed_cells is not None:
            first = row * self.block_table.shape[1]
            self.changed_cells += range(first + start, first + end)

    def _check_decodes(self, rows: IntArray, seq_lens: IntArray) -> None:
        if (seq_lens != self.num_tokens[rows]).any():
            raise EngineError(DISAGREE)
        if (seq_lens > self.num_blocks[rows] * self.block_size).any():
            raise EngineError(NO_BLOCK)

    def _check(self, rows: IntArray, seq_lens: IntArray, samples: IntArray) -> None:
        """EngineError if plan and Worker disagree: going on would write into blocks of other sequences."""
        if (seq_lens > self.num_tokens[rows]).any() or ((seq_lens == self.num_tokens[rows]) != samples).any():
            raise EngineError(DISAGREE)
        if (seq_lens > self.num_blocks[rows] * self.block_size).any():
            raise EngineError(NO_BLOCK)

    def _advance(self, rows: IntArray, seq_lens: IntArray, sample_rows: IntArray) -> None:
        self.num_computed[rows] = seq_lens
        self.token_ids[sample_rows, self.num_tokens[sample_rows]] = -(sample_rows + 1)
        self.num_tokens[sample_rows] += 1
