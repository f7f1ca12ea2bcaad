"""HostDecodes: the inputs of decode steps on a CPU, written by a compiled kernel to the memory of recorded programs."""

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from engine.executor.step import Draft
from engine.models.recorded_decodes import NextTokens, RecordedDecodes
from engine.worker.batch.input_batch import InputBatch, SampleTargets, StepInputs, nothing
from engine.worker.batch.step_buffer import IntArray
from kernels.dispatch import cpu_kernels

Draws = Callable[[IntArray, IntArray], Callable[[Tensor], Tensor]]


class HostDecodes:
    """Builds the StepInputs of decodes of `batch` for the programs of `recorded`. Its results are valid until the
    next step."""

    def __init__(self, batch: InputBatch, recorded: RecordedDecodes, draws: Draws) -> None:
        """draws: from the rows of a step and the positions of its tokens, in arrays that never move, to
        RecordedDecodes.draw."""
        cpu = cpu_kernels()
        assert cpu is not None, "there are no programs without compiled kernels"
        self._batch, self._recorded = batch, recorded
        self._rows, self._offsets, self._lengths = (np.zeros(recorded.max_rows, np.int64) for _ in range(3))
        self._ends = np.arange(1, recorded.max_rows + 1)
        input_ids, metadata = recorded.inputs(recorded.max_rows)
        self._inputs = cpu.decode_rows.DecodeInputs(
            rows=self._rows,
            offsets=self._offsets,
            input_ids=input_ids.numpy(),
            positions=metadata.positions.numpy(),
            slots=metadata.slot_mapping.numpy(),
            lengths=self._lengths,
            seq_lens=metadata.seq_lens.numpy(),
            block_tables=metadata.block_tables.numpy(),
        )
        recorded.draw = draws(self._rows, self._lengths)
        rows = cpu.decode_rows.Rows(
            batch.num_tokens, batch.num_computed, batch.num_blocks, batch.token_ids, batch.block_table
        )
        self._gathered = cpu.decode_rows.DecodeRows(rows, self._inputs, batch.block_size)
        self._seen: IntArray | None = None  # the rows of the last step
        self._seq_ids = self._lengths[:0]
        self._built: StepInputs | None = None

    def build(self, rows: IntArray, drafts: Sequence[Draft]) -> StepInputs | None:
        """InputBatch.build_decodes. None where no program will run, or the rows are not ready for such a step:
        build_decodes says why."""
        batch, inputs = self._batch, self._inputs
        count = len(rows) + sum(len(draft.token_ids) for draft in drafts)
        if count > len(self._rows) or not self._recorded.works:
            return None  # build_decodes makes narrower block tables
        if rows is not self._seen:
            self._rows[: len(rows)], self._offsets[: len(rows)] = rows, 0
            self._seen, self._seq_ids = rows, batch.seq_ids[rows]
        seq_ids = self._seq_ids
        if drafts:
            self._append(drafts, len(rows))
            rows = self._rows[:count]
            seq_ids = batch.seq_ids[rows]
        if not self._gathered.advance(count):
            return None
        input_ids, metadata = self._recorded.inputs(count)
        self._built = StepInputs(
            input_ids=input_ids,
            metadata=metadata,
            has_pending=False,
            targets=SampleTargets(seq_ids, rows, self._lengths[:count]),
            sample_indices=None,
            slots=inputs.slots[:count],
            rows=rows,
            starts=inputs.positions[:count],
            ends=self._ends[:count],
            prepare=nothing,
        )
        return self._built

    def _append(self, drafts: Sequence[Draft], start: int) -> None:
        """Enter a row for each token of `drafts`, from `start` on."""
        batch = self._batch
        for draft in drafts:
            row, length = batch.enter_draft(draft), len(draft.token_ids)
            self._rows[start : start + length] = row
            self._offsets[start : start + length] = self._ends[:length]
            start += length

    def has_built(self, inputs: StepInputs) -> bool:
        """True if the last `build` made them."""
        return inputs is self._built

    def store(self, tokens: NextTokens) -> None:
        """Enter the tokens that the step of the last `build` sampled."""
        self._gathered.store(tokens.address)
