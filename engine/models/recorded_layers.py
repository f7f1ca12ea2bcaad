"""RecordedLayers: decode steps on a CPU as one call each, recorded once per number of sequences (with adapters, twice).

A program (kernels/cpu/program.py) reads its inputs at fixed addresses, so the inputs of a step are copied there first.
Models whose layers call operators of torch cannot be recorded: their steps run layer by layer, as steps with prompts
do.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.models.layers.adapted import AdapterLayers
from engine.models.layers.attention import BatchMetadata, KVCache
from kernels.dispatch import cpu_kernels

logger = logging.getLogger(__name__)

RunLayers = Callable[[Tensor, BatchMetadata, Sequence[KVCache]], Tensor]
MAX_ROWS = 128  # above, the time between kernels is under 1 % of a step


class RecordedLayers:
    """Takes the place of Decoder.run_layers. The result of a recorded step is valid until the next one."""

    def __init__(
        self,
        run_layers: RunLayers,
        kv_caches: Sequence[KVCache],
        max_rows: int,
        max_blocks: int,
        adapters: AdapterLayers | None = None,
    ) -> None:
        """kv_caches: those of the steps to record. max_blocks: the width of the widest block table. adapters: those
        beside the layers, whose kernels are part of the programs of steps that have a row with an adapter."""
        cpu = cpu_kernels()
        assert cpu is not None, "only compiled kernels can be recorded"
        self._run_layers, self._kv_caches, self._cpu = run_layers, kv_caches, cpu
        self._max_rows = min(max_rows, MAX_ROWS)
        self._positions = torch.zeros(self._max_rows, dtype=torch.int64)
        self._slots = torch.zeros(self._max_rows, dtype=torch.int64)
        self._seq_lens = torch.zeros(self._max_rows, dtype=torch.int32)
        self._block_tables = torch.zeros((self._max_rows, max_blocks), dtype=torch.int32)
        self._no_prefills = torch.zeros(1, dtype=torch.int32)
        self._x: Tensor | None = None
        self._workspace = cpu.program.Workspace()
        self._adapted = None if adapters is None else adapters.tokens
        # By number of rows, and whether adapters are added; None for steps that cannot be recorded.
        self._programs: dict[tuple[int, bool], Any] = {}

    @property
    def recorded_rows(self) -> list[int]:
        """The numbers of rows whose steps are recorded."""
        return sorted({rows for (rows, _), program in self._programs.items() if program is not None})

    def __call__(self, x: Tensor, metadata: BatchMetadata, kv_caches: Sequence[KVCache]) -> Tensor:
        """See Decoder.forward: x (T, C) -> (R, C)."""
        rows = len(x)
        decodes = metadata.num_decodes == rows and metadata.outputs is None and metadata.plan is None
        if not decodes or rows > self._max_rows or kv_caches is not self._kv_caches:
            return self._run_layers(x, metadata, kv_caches)
        inputs = self._place(x, metadata)
        kind = rows, self._adapted is not None and self._adapted.active
        if kind not in self._programs:
            self._programs[kind] = self._record(rows, inputs)
        program = self._programs[kind]
        return self._run_layers(x, metadata, kv_caches) if program is None else program()

    def _place(self, x: Tensor, metadata: BatchMetadata) -> Tensor:
        """Copy the step's inputs to their places; returns x there."""
        rows, width = metadata.block_tables.shape
        if self._x is None:
            self._x = x.new_empty((self._max_rows, x.shape[1]))
        self._positions[:rows].copy_(metadata.positions)
        self._slots[:rows].copy_(metadata.slot_mapping)
        self._seq_lens[:rows].copy_(metadata.seq_lens)
        self._block_tables[:rows, :width].copy_(metadata.block_tables)
        return self._x[:rows].copy_(x)

    def _record(self, rows: int, x: Tensor) -> Any:
        metadata = BatchMetadata(
            positions=self._positions[:rows],
            slot_mapping=self._slots[:rows],
            num_decodes=rows,
            block_tables=self._block_tables[:rows],
            seq_lens=self._seq_lens[:rows],
            cu_seqlens_q=self._no_prefills,
            max_seqlen_q=0,
        )
        try:
            return self._cpu.program.record(lambda: self._run_layers(x, metadata, self._kv_caches), self._workspace)
        except self._cpu.program.NotRecordable as error:
            logger.info("steps of %d sequences run operator by operator: %s", rows, error)
            return None
