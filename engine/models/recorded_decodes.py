"""RecordedDecodes: decode steps on a CPU as one call each, from token ids to hidden states or most likely tokens.

Each kind of step is recorded once per number of sequences. A program (kernels/cpu/program.py) reads its inputs at fixed
addresses, so the inputs of a step are copied there first. An embedding that calls operators of torch stays outside the
programs. Models whose layers call such operators cannot be recorded: their steps run operator by operator, as steps
with prompts do.
"""

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from engine.models.layers.adapted import AdapterLayers
from engine.models.layers.attention import BatchMetadata, KVCache
from kernels.dispatch import cpu_kernels
from kernels.sampling.greedy import most_likely

logger = logging.getLogger(__name__)

MAX_ROWS = 128  # above, the time between kernels is under 1 % of a step


class Parts(Protocol):
    """The parts of a decoder that a program may hold; see Decoder for arguments and results."""

    run_layers: Any

    def embed(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Token ids and positions to the input of layer 0."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Hidden states to logits."""


class StepKind(NamedTuple):
    """Steps of the same kind call the same kernels. greedy: the program ends with tokens, not with hidden states.
    adapted: a sequence has an adapter; head_adapted: one of these adapters changes the logits."""

    rows: int
    greedy: bool
    adapted: bool
    head_adapted: bool


class RecordedDecodes:
    """Runs decode steps on `kv_caches`. A result is valid until the next step."""

    def __init__(
        self,
        decoder: Parts,
        kv_caches: Sequence[KVCache],
        max_rows: int,
        max_blocks: int,
        adapters: AdapterLayers | None = None,
    ) -> None:
        """max_blocks: the width of the widest block table. adapters: those beside the layers, whose kernels are part of
        the programs of steps that have a row with an adapter."""
        cpu = cpu_kernels()
        assert cpu is not None, "only compiled kernels can be recorded"
        self._decoder, self._kv_caches, self._cpu = decoder, kv_caches, cpu
        self._max_rows = min(max_rows, MAX_ROWS)
        self._input_ids = torch.zeros(self._max_rows, dtype=torch.int64)
        self._positions = torch.zeros(self._max_rows, dtype=torch.int64)
        self._slots = torch.zeros(self._max_rows, dtype=torch.int64)
        self._seq_lens = torch.zeros(self._max_rows, dtype=torch.int32)
        self._block_tables = torch.zeros((self._max_rows, max_blocks), dtype=torch.int32)
        self._no_prefills = torch.zeros(1, dtype=torch.int32)
        self._x: Tensor | None = None  # the embeddings of a step, if programs begin behind the embedding
        self._workspace = cpu.program.Workspace()
        self._adapters = adapters
        self._programs: dict[StepKind, Any] = {}  # None for steps that cannot be recorded

    @property
    def recorded_rows(self) -> list[int]:
        """The numbers of rows whose steps are recorded."""
        return sorted({kind.rows for kind, program in self._programs.items() if program is not None})

    def forward(self, input_ids: Tensor, metadata: BatchMetadata, kv_caches: Sequence[KVCache]) -> Tensor | None:
        """See Decoder.forward: int64 (T) -> (T, C). None for a step that is not recorded."""
        return self._run(input_ids, metadata, kv_caches, greedy=False)

    def greedy(self, input_ids: Tensor, metadata: BatchMetadata, kv_caches: Sequence[KVCache]) -> Tensor | None:
        """See Decoder.decode_greedily: int64 (T) -> int64 (T). None for a step that is not recorded."""
        return self._run(input_ids, metadata, kv_caches, greedy=True)

    def _run(
        self, input_ids: Tensor, metadata: BatchMetadata, kv_caches: Sequence[KVCache], greedy: bool
    ) -> Tensor | None:
        rows = len(input_ids)
        decodes = metadata.num_decodes == rows and metadata.outputs is None and metadata.plan is None
        if not decodes or rows > self._max_rows or kv_caches is not self._kv_caches:
            return None
        adapters = self._adapters
        adapted = adapters is not None and adapters.tokens.active
        kind = StepKind(rows, greedy, adapted, greedy and adapters is not None and adapters.logits.active)
        program = self._programs.get(kind)
        if program is None and kind in self._programs:
            return None
        if not self._programs:
            self._x = self._place_for_embeddings()
        self._place(input_ids, metadata)
        if program is None:
            program = self._programs[kind] = self._record(kind)
        return None if program is None else program()

    def _place(self, input_ids: Tensor, metadata: BatchMetadata) -> None:
        """Copy the step's inputs to their places."""
        rows, width = metadata.block_tables.shape
        if self._x is not None:
            self._x[:rows].copy_(self._decoder.embed(input_ids, metadata.positions))
        self._input_ids[:rows].copy_(input_ids)
        self._positions[:rows].copy_(metadata.positions)
        self._slots[:rows].copy_(metadata.slot_mapping)
        self._seq_lens[:rows].copy_(metadata.seq_lens)
        self._block_tables[:rows, :width].copy_(metadata.block_tables)

    def _record(self, kind: StepKind) -> Any:
        rows = kind.rows
        metadata = BatchMetadata(
            positions=self._positions[:rows],
            slot_mapping=self._slots[:rows],
            num_decodes=rows,
            block_tables=self._block_tables[:rows],
            seq_lens=self._seq_lens[:rows],
            cu_seqlens_q=self._no_prefills,
            max_seqlen_q=0,
        )

        def work() -> Tensor:
            ids, decoder = self._input_ids[:rows], self._decoder
            x = decoder.embed(ids, metadata.positions) if self._x is None else self._x[:rows]
            hidden = decoder.run_layers(x, metadata, self._kv_caches)
            return most_likely(decoder.compute_logits(hidden)) if kind.greedy else hidden

        try:
            return self._cpu.program.record(work, self._workspace)
        except self._cpu.program.NotRecordable as error:
            name = "greedy steps" if kind.greedy else "steps"
            logger.info("%s of %d sequences run operator by operator: %s", name, rows, error)
            return None

    def _place_for_embeddings(self) -> Tensor | None:
        """Memory for the embeddings of a step (max_rows, C), if they cannot be recorded."""
        ids, positions = self._input_ids[:1], self._positions[:1]
        try:
            self._cpu.program.record(lambda: self._decoder.embed(ids, positions), self._workspace)
        except self._cpu.program.NotRecordable:
            x = self._decoder.embed(ids, positions)
            return x.new_empty((self._max_rows, x.shape[1]))
        return None
