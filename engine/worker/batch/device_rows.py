"""DeviceRows: the device's copy of the rows of InputBatch: block tables, and the last sampled tokens.

A step uploads only the entries of the block tables that changed since the step before, and the rows that it computes;
the device gathers the tables of these rows. One more row is padding: recorded steps write to it.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Put = Callable[[npt.NDArray[Any]], Tensor]  # moves a host array to the device: StepBuffer.put

CELL_BYTES = 8 + 4  # an int64 place and an int32 block id
BLOCK_ID_BYTES = 4
ALIGNMENT = 16  # bytes


class DeviceRows:
    """last_tokens int64 [max_num_seqs + 1]; block_tables int32 [max_num_seqs + 1, max_blocks].

    step_tables and output_tables, int32 [max_num_seqs, max_blocks], hold the gathered tables of one step: of its
    sequences, and of those whose last token is an output row. `inputs` is uint8 [input_bytes] of memory right behind
    last_tokens, and token_source int64 covers both, so that one gather reads a token from either.
    """

    def __init__(self, device: torch.device, max_num_seqs: int, max_blocks: int, input_bytes: int) -> None:
        self.padding_row = max_num_seqs
        self.max_blocks = max_blocks
        num_bytes = -(-8 * (max_num_seqs + 1) // ALIGNMENT) * ALIGNMENT
        self.first_input = num_bytes // 8  # the place of `inputs` in token_source
        memory = torch.zeros(num_bytes + -(-input_bytes // ALIGNMENT) * ALIGNMENT, dtype=torch.uint8, device=device)
        self.token_source = memory.view(torch.int64)
        self.last_tokens = self.token_source[: self.first_input]
        self.inputs = memory[num_bytes:]
        self.block_tables = torch.zeros((max_num_seqs + 1, max_blocks), dtype=torch.int32, device=device)
        self.step_tables = torch.zeros((max_num_seqs, max_blocks), dtype=torch.int32, device=device)
        self.output_tables = torch.zeros((max_num_seqs, max_blocks), dtype=torch.int32, device=device)

    def stage_cells(self, cells: list[int], table: npt.NDArray[Any], put: Put) -> Callable[[], None]:
        """Put changed cells (row * max_blocks + index) of the host's block tables int32 [max_num_seqs, max_blocks]
        into the step's upload: the whole table where that takes fewer bytes. The function returned enters them; call
        it in the device's queue, after the upload."""
        if not cells:
            return lambda: None
        if len(cells) * CELL_BYTES >= table.size * BLOCK_ID_BYTES:
            whole = put(table)
            return lambda: _copy_rows(self.block_tables, whole)
        places = np.array(cells, np.int64)
        indices, values = put(places), put(table.reshape(-1)[places])
        return lambda: _enter(self.block_tables, indices, values)

    def gather(self, rows: Tensor, output_rows: Tensor | None = None) -> None:
        """On the device: fill step_tables and output_tables; rows and output_rows int64 [n], rows of InputBatch."""
        torch.index_select(self.block_tables, 0, rows, out=self.step_tables[: len(rows)])
        if output_rows is not None:
            torch.index_select(self.block_tables, 0, output_rows, out=self.output_tables[: len(output_rows)])

    def store(self, rows: Tensor, token_ids: Tensor) -> None:
        """On the device: keep the sampled tokens of rows, int64 [n] each."""
        self.last_tokens.index_copy_(0, rows, token_ids)


def _copy_rows(tables: Tensor, rows: Tensor) -> None:
    tables[: len(rows)].copy_(rows)


def _enter(tables: Tensor, indices: Tensor, values: Tensor) -> None:
    tables.view(-1).index_copy_(0, indices, values)
