"""HostDecodes: the inputs of decode steps on a CPU, written by a compiled kernel to the memory of recorded programs."""

import numpy as np

from engine.models.recorded_decodes import GreedyTokens, RecordedDecodes
from engine.worker.batch.input_batch import InputBatch, SampleTargets, StepInputs, nothing
from engine.worker.batch.step_buffer import IntArray
from kernels.dispatch import cpu_kernels


class HostDecodes:
    """Builds the StepInputs of decodes of `batch` for the programs of `recorded`. What it returns is valid until the
    next step."""

    def __init__(self, batch: InputBatch, recorded: RecordedDecodes) -> None:
        cpu = cpu_kernels()
        assert cpu is not None, "there are no programs without compiled kernels"
        self._batch, self._recorded = batch, recorded
        self._rows, self._lengths = (np.zeros(recorded.max_rows, np.int64) for _ in range(2))
        self._ends = np.arange(1, recorded.max_rows + 1)
        input_ids, metadata = recorded.inputs(recorded.max_rows)
        self._inputs = cpu.decode_rows.DecodeInputs(
            rows=self._rows,
            input_ids=input_ids.numpy(),
            positions=metadata.positions.numpy(),
            slots=metadata.slot_mapping.numpy(),
            lengths=self._lengths,
            seq_lens=metadata.seq_lens.numpy(),
            block_tables=metadata.block_tables.numpy(),
        )
        rows = cpu.decode_rows.Rows(
            batch.num_tokens, batch.num_computed, batch.num_blocks, batch.token_ids, batch.block_table
        )
        self._gathered = cpu.decode_rows.DecodeRows(rows, self._inputs, batch.block_size)
        self._seen: IntArray | None = None  # the rows of the last step
        self._seq_ids = self._lengths[:0]
        self._built: StepInputs | None = None

    def build(self, rows: IntArray) -> StepInputs | None:
        """InputBatch.build_decodes for a step without drafts. None, and nothing is done, where no program
        will run, or the rows are not ready for such a step: build_decodes says why."""
        count, inputs = len(rows), self._inputs
        if count > len(self._rows) or not self._recorded.works:
            return None  # build_decodes makes narrower block tables
        if rows is not self._seen:
            self._rows[:count] = rows
            self._seen, self._seq_ids = rows, self._batch.seq_ids[rows]
        if not self._gathered.advance(count):
            return None
        input_ids, metadata = self._recorded.inputs(count)
        self._built = StepInputs(
            input_ids=input_ids,
            metadata=metadata,
            has_pending=False,
            targets=SampleTargets(self._seq_ids, rows, self._lengths[:count]),
            sample_indices=None,
            slots=inputs.slots[:count],
            rows=rows,
            starts=inputs.positions[:count],
            ends=self._ends[:count],
            prepare=nothing,
        )
        return self._built

    def store(self, inputs: StepInputs, tokens: GreedyTokens) -> bool:
        """Enter the tokens that a step sampled greedily. False, and nothing is done, if the last `build` did not make
        its inputs."""
        if inputs is not self._built:
            return False
        self._gathered.store(tokens.address)
        return True
