"""InputBatch: the Worker's mirror of the live sequences, and the tensors of a step made from it.

Every sequence has a stable row from the plan that brings it to the plan that removes it, so a step costs a few
vectorised gathers and nothing per token in Python. On a GPU all arrays of a step cross in one copy (StepBuffer), and a
token that was sampled but has not reached the host yet stands in its row as -(row + 1): the device puts the real one
in its place.
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
from kernels.attention.plan import AttentionPlan

DISAGREE = "the plan and the Worker disagree on the number of known tokens"
NO_BLOCK = "the plan computes tokens that have no KV block"


@dataclass(frozen=True, slots=True)
class SampleTargets:
    """One entry per sampled token: its sequence, its row in the batch, its position (the number of tokens before)."""

    seq_ids: IntArray
    rows: IntArray
    positions: IntArray


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the decoder and the sampler get for one step.

    input_ids int64 [num_tokens], negative (has_pending) where the last token of row -id - 1 is on the device only.
    sample_indices: the rows among the hidden states that are sampled (None where they are these rows in order).
    rows, starts, ends: per sequence that computes tokens its row in the batch, the position of the first of these
    tokens, and where they end among those of the step.
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

    `token_ids` int32 [max_num_seqs, max_model_len + 1] holds known tokens, those that the Worker sampled itself
    included; `block_table` int32 [max_num_seqs, max_blocks]. Pages of rows that were never used cost no memory.
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
        self.num_tokens = np.zeros(max_num_seqs, np.int64)  # known
        self.num_computed = np.zeros(max_num_seqs, np.int64)
        self.num_prompt = np.zeros(max_num_seqs, np.int64)
        self.num_blocks = np.zeros(max_num_seqs, np.int64)
        self.seq_ids = np.full(max_num_seqs, -1, np.int64)
        self.parent_row = np.full(max_num_seqs, -1, np.int64)  # of a fork: the row that computes for it
        self.row_of: dict[int, int] = {}
        # Entries of the block table (row * max_blocks + index) that changed, for a device that keeps a copy.
        self.changed_cells: list[int] | None = None
        self._decodes: tuple[list[int], IntArray] | None = None  # of the last step, and their rows
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    def add(self, new: NewSequence) -> int:
        """Give a sequence a row, which is returned. EngineError if the Driver sent what cannot be held."""
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
        """Free a row and return it. An unknown id is fine: a sequence may be removed before it reached the Worker."""
        row = self.row_of.pop(seq_id, None)
        if row is not None:
            self._decodes = None
            self.seq_ids[row] = -1
            self._free_rows.append(row)
        return row

    def replace_last_block(self, seq_id: int, block_id: int) -> None:
        """Copy-on-write: what the sequence writes next goes to `block_id`."""
        row = self.row_of[seq_id]
        self._set_blocks(row, int(self.num_blocks[row]) - 1, [block_id])

    def fill_decodes(
        self, decodes: list[int], blocks: list[int], buffers: DecodeBuffers, arrays: DecodeInputs[IntArray]
    ) -> SampleTargets:
        """As `build`, for a step of decodes alone that goes through DecodeBuffers."""
        before = self._decodes
        rows = self._take_decodes(decodes, blocks)
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
        if self._decodes is before:  # all were sampled by the step before, on the device
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
        """The inputs of a step, rows of one token first, and count its tokens as computed and as sampled.

        `decodes`, `blocks` and `chunks` as in StepPlan. With every_row the hidden states of all rows are wanted, and
        not of those alone that are sampled. A sampled token's place holds its stand-in until
        `store_tokens`.
        """
        rows, counts, samples = self._take_steps(self._take_decodes(decodes, blocks), chunks)
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

    def store_tokens(self, sampled: SampleTargets, token_ids: IntArray) -> None:
        """The values of a step's sampled tokens, once the host knows them; skips sequences removed meanwhile."""
        live = self.seq_ids[sampled.rows] == sampled.seq_ids
        self.token_ids[sampled.rows[live], sampled.positions[live]] = token_ids[live]

    def _outputs(
        self, rows: IntArray, ends: IntArray, seq_lens: IntArray, sampled: IntArray, widest: int, buffer: StepBuffer
    ) -> OutputRows | None:
        """The last tokens of `sampled`; None where that is every token. No step is without: one that samples nothing
        names one, of which nothing is read."""
        if len(sampled) == ends[-1]:
            return None
        wanted = sampled if len(sampled) else np.zeros(1, np.int64)
        return OutputRows(
            indices=buffer.put(ends[wanted] - 1),
            block_tables=buffer.put(self.block_table[rows[wanted], :widest]),
            seq_lens=buffer.put(seq_lens[wanted].astype(np.int32)),
        )

    def _take_decodes(self, decodes: list[int], blocks: list[int]) -> IntArray:
        """Their rows, and new blocks into these."""
        row_of = self.row_of
        for seq_id, block_id in zip(blocks[::2], blocks[1::2], strict=True):
            self._append_blocks(row_of[seq_id], [block_id])
        if self._decodes is None or self._decodes[0] != decodes:  # seldom: most steps repeat the one before
            self._decodes = decodes, np.fromiter(map(row_of.__getitem__, decodes), np.int64, len(decodes))
        return self._decodes[1]

    def _take_steps(self, decodes: IntArray, chunks: Sequence[SequenceStep]) -> tuple[IntArray, IntArray, IntArray]:
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
        """Where in `rows`, those that compute, the parent of each fork stands."""
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
        """A Driver and a Worker that disagree would write into foreign blocks: stop instead."""
        if (seq_lens > self.num_tokens[rows]).any() or ((seq_lens == self.num_tokens[rows]) != samples).any():
            raise EngineError(DISAGREE)
        if (seq_lens > self.num_blocks[rows] * self.block_size).any():
            raise EngineError(NO_BLOCK)

    def _advance(self, rows: IntArray, seq_lens: IntArray, sample_rows: IntArray) -> None:
        self.num_computed[rows] = seq_lens
        self.token_ids[sample_rows, self.num_tokens[sample_rows]] = -(sample_rows + 1)
        self.num_tokens[sample_rows] += 1
