"""PaddedSteps: steps with prompts on a CPU as one call each, padded to sizes that are recorded once.

To record a hundred kernels anew takes Python 3 to 5 ms, a fifth of a step with a short prompt. A program
(kernels/cpu/program.py) reads its inputs at fixed addresses, and the attention kernels read there, too, how many
sequences the step has. So a program serves every step of up to as many tokens: the rows behind them are padding, whose
results nothing reads.
"""

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.models.layers.attention import BatchMetadata, KVCache, OutputRows
from engine.models.recorded_decodes import Parts, place_for_embeddings
from kernels.dispatch import cpu_kernels

logger = logging.getLogger(__name__)

MAX_TOKENS = 512  # a longer step takes 50 ms and more
MAX_PROGRAMS = 128  # the one that was not needed for the longest time goes


class Size(NamedTuple):
    """Rows of a program: tokens, and rows of the last layer."""

    tokens: int
    outputs: int


class PaddedSteps:
    """Runs steps of up to MAX_TOKENS tokens on `kv_caches`. A result is valid until the next step."""

    def __init__(self, decoder: Parts, kv_caches: Sequence[KVCache], max_tokens: int, max_blocks: int) -> None:
        """max_tokens: those of the largest step; max_blocks: the width of the widest block table."""
        cpu = cpu_kernels()
        assert cpu is not None, "only compiled kernels can be recorded"
        self._decoder, self._kv_caches, self._cpu = decoder, kv_caches, cpu
        # Tokens are padded to a multiple of it. AMX multiplies rows faster than others, so there are fewer sizes.
        self._step = 8 if cpu.features.HAS_BF16_TILES else 4
        self.max_tokens = n = min(max_tokens, MAX_TOKENS)
        self._ids = torch.zeros(n, dtype=torch.int64)
        self._counts = torch.zeros(2, dtype=torch.int64)
        tables = torch.zeros((n, max_blocks), dtype=torch.int32)
        outputs = OutputRows(torch.zeros(n, dtype=torch.int64), tables.clone(), torch.zeros(n, dtype=torch.int32))
        self._inputs = BatchMetadata(
            positions=torch.zeros(n, dtype=torch.int64),
            slot_mapping=torch.full((n,), -1, dtype=torch.int64),
            num_decodes=None,
            block_tables=tables,
            seq_lens=torch.zeros(n, dtype=torch.int32),
            cu_seqlens_q=torch.zeros(n + 1, dtype=torch.int32),
            max_seqlen_q=n,
            outputs=outputs,
            counts=self._counts,
        )
        self._x: Tensor | None = None  # the embeddings of a step, if programs begin behind the embedding
        self._workspace = cpu.program.Workspace()
        self._programs: OrderedDict[Size, Any] = OrderedDict()
        self.works = True  # False once a step turned out to call operators of torch

    @property
    def num_programs(self) -> int:
        """Sizes that are recorded."""
        return len(self._programs)

    @torch.inference_mode()
    def forward(self, input_ids: Tensor, metadata: BatchMetadata, kv_caches: Sequence[KVCache]) -> Tensor | None:
        """See Decoder.forward: int64 (T) -> (R, C). None, and nothing is done, for a step that needs another way."""
        size = self._size_of(metadata, len(input_ids)) if kv_caches is self._kv_caches and self.works else None
        if size is None or metadata.outputs is None:
            return None
        if (program := self._programs.get(size)) is None and (program := self._record(size)) is None:
            return None
        self._programs.move_to_end(size)
        self._place(input_ids, metadata, size.tokens)
        if self._x is not None:
            ids, positions = self._ids[: size.tokens], self._inputs.positions[: size.tokens]
            self._x[: size.tokens] = self._decoder.embed(ids, positions)  # (T), (T) -> (T, C)
        self._place_outputs(metadata.outputs, size.outputs)
        return program()[: len(metadata.outputs.indices)]  # type: ignore[no-any-return]

    def _size_of(self, metadata: BatchMetadata, num_tokens: int) -> Size | None:
        """The size of the program for a step; None if there is none for it."""
        if metadata.outputs is None or metadata.num_decodes is None or metadata.plan is not None:
            return None
        num_outputs, num_seqs = len(metadata.outputs.indices), len(metadata.seq_lens)
        if max(num_tokens, num_outputs, num_seqs) > self.max_tokens:
            return None
        tokens = -(-max(num_tokens, num_seqs) // self._step) * self._step  # forks have no token in the step
        outputs = -(-num_outputs // 16) * 16 if num_outputs > 16 else 1 << (num_outputs - 1).bit_length()
        return Size(min(tokens, self.max_tokens), min(outputs, self.max_tokens))

    def _place(self, input_ids: Tensor, metadata: BatchMetadata, size: int) -> None:
        """Copy the step's inputs to their places. Padding writes nothing to the cache."""
        own, n, tokens = self._inputs, metadata.num_decodes or 0, len(input_ids)
        num_seqs, width = metadata.block_tables.shape
        for place, values, padding in (
            (self._ids, input_ids, 0),
            (own.positions, metadata.positions, 0),
            (own.slot_mapping, metadata.slot_mapping, -1),
        ):
            place[:tokens] = values
            place[tokens:size] = padding
        own.block_tables[:num_seqs, :width] = metadata.block_tables
        own.seq_lens[:num_seqs] = metadata.seq_lens
        torch.arange(n, out=own.cu_seqlens_q[:n])
        torch.add(metadata.cu_seqlens_q, n, out=own.cu_seqlens_q[n : num_seqs + 1])
        self._counts[0], self._counts[1] = n, num_seqs

    def _place_outputs(self, outputs: OutputRows, size: int) -> None:
        """Copy the rows wanted of the last layer. Padding takes the first row, and sees no key."""
        own, rows = self._inputs.outputs, len(outputs.indices)
        assert own is not None
        own.indices[:rows] = outputs.indices
        own.indices[rows:size] = 0
        own.block_tables[:rows, : outputs.block_tables.shape[1]] = outputs.block_tables
        own.seq_lens[:rows] = outputs.seq_lens
        own.seq_lens[rows:size] = 0

    def _record(self, size: Size) -> Any:
        """The program of a size; None if it cannot be recorded."""
        largest = Size(self.max_tokens, self.max_tokens)
        if not self._programs and size != largest:
            self._record(largest)  # its memory serves all others
            if not self.works:
                return None
        elif not self._programs:
            self._x = place_for_embeddings(self._decoder, self._ids, self._inputs.positions)
        ids, metadata = self._ids[: size.tokens], self._part(size)

        def work() -> Tensor:
            x = self._decoder.embed(ids, metadata.positions) if self._x is None else self._x[: size.tokens]
            return self._decoder.run(ids, x, metadata, self._kv_caches)  # (T), (T, C) -> (R, C)

        try:
            program = self._cpu.program.record(work, self._workspace)
        except self._cpu.program.NotRecordable as error:
            self.works = False
            logger.info("steps with prompts are not padded: %s", error)
            return None
        if len(self._programs) == MAX_PROGRAMS:
            self._programs.popitem(last=False)
        self._programs[size] = program
        return program

    def _part(self, size: Size) -> BatchMetadata:
        """The beginnings of the inputs."""
        own, n = self._inputs, size.tokens
        outputs = own.outputs
        assert outputs is not None
        return replace(
            own,
            positions=own.positions[:n],
            slot_mapping=own.slot_mapping[:n],
            block_tables=own.block_tables[:n],
            seq_lens=own.seq_lens[:n],
            cu_seqlens_q=own.cu_seqlens_q[: n + 1],
            max_seqlen_q=n,
            outputs=OutputRows(
                *(part[: size.outputs] for part in (outputs.indices, outputs.block_tables, outputs.seq_lens))
            ),
        )
