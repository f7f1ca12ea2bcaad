"""RecordedDecodes: decode steps on a CPU as one call each, from token ids to hidden states or most likely tokens.

Each kind of step is recorded once per number of sequences. A program (kernels/cpu/program.py) reads its inputs at fixed
addresses: inputs from elsewhere are copied there first. An embedding that calls operators of torch stays outside the
programs. Models whose layers call such operators cannot be recorded: their steps run operator by operator. Steps with
prompts: recorded_steps.py.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.models.layers.adapted import AdapterLayers
from engine.models.layers.attention import BatchMetadata, KVCache
from kernels.dispatch import cpu_kernels
from kernels.sampling.greedy import most_likely

logger = logging.getLogger(__name__)

MAX_ROWS = 128  # RecordedSteps records larger steps anew each time: 3 ms, where they take 20 and more


class Parts(Protocol):
    """The parts of a decoder that a program may hold; see Decoder for arguments and results."""

    def embed(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Token ids and positions to the input of layer 0."""

    def run(self, input_ids: Tensor, x: Tensor, metadata: BatchMetadata, kv_caches: Sequence[KVCache]) -> Tensor:
        """Token ids and the input of layer 0 to hidden states."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Hidden states to logits."""


class End(Enum):
    """The end of a program: the hidden states of a step, or its next tokens."""

    HIDDEN = "steps"
    MOST_LIKELY = "greedy steps"
    DRAWN = "drawn steps"


class StepKind(NamedTuple):
    """Steps of the same kind call the same kernels. adapted: a sequence has an adapter; head_adapted: one of these
    adapters changes the logits."""

    rows: int
    end: End
    adapted: bool
    head_adapted: bool


class NextTokens(NamedTuple):
    """The next token of each row, int64 (T), or kernels.sampling.FAILED, valid until the next step; and the
    address of these numbers."""

    token_ids: npt.NDArray[np.int64]
    address: int

    @classmethod
    def of(cls, tokens: Tensor) -> "NextTokens":
        return cls(tokens.numpy(), tokens.data_ptr())


class Recorded(NamedTuple):
    """A program, and its result: hidden states, or tokens."""

    program: Any
    result: Tensor
    tokens: NextTokens | None


def _no_draw(logits: Tensor) -> Tensor:
    raise AssertionError("HostDecodes sets it")


def place_for_embeddings(decoder: Parts, input_ids: Tensor, positions: Tensor) -> Tensor | None:
    """Memory for the embeddings of (T) tokens, (T, C), if they cannot be recorded."""
    cpu = cpu_kernels()
    assert cpu is not None, "only compiled kernels can be recorded"
    ids, places = input_ids[:1], positions[:1]
    try:
        cpu.program.record(lambda: decoder.embed(ids, places), cpu.program.Workspace())
    except cpu.program.NotRecordable:
        x = decoder.embed(ids, places)
        return x.new_empty((len(input_ids), x.shape[1]))
    return None


class RecordedDecodes:
    """Runs decode steps on `kv_caches`. A result is valid until the next step.

    draw: logits (T, V) to the tokens int64 (T) of a step whose rows are not all greedy, with kernels alone. HostDecodes
    sets it: it reads the parameters of draws at fixed addresses, too.
    """

    def __init__(
        self,
        decoder: Parts,
        kv_caches: Sequence[KVCache],
        max_rows: int,
        max_blocks: int,
        adapters: AdapterLayers | None,
    ) -> None:
        """max_blocks: the width of the widest block table. adapters: those beside the layers, whose kernels are part of
        the programs of steps that have a row with an adapter."""
        cpu = cpu_kernels()
        assert cpu is not None, "only compiled kernels can be recorded"
        self._decoder, self._kv_caches, self._cpu = decoder, kv_caches, cpu
        self.max_rows = min(max_rows, MAX_ROWS)
        self._input_ids = torch.zeros(self.max_rows, dtype=torch.int64)
        self._inputs = BatchMetadata(
            positions=torch.zeros(self.max_rows, dtype=torch.int64),
            slot_mapping=torch.zeros(self.max_rows, dtype=torch.int64),
            num_decodes=self.max_rows,
            block_tables=torch.zeros((self.max_rows, max_blocks), dtype=torch.int32),
            seq_lens=torch.zeros(self.max_rows, dtype=torch.int32),
            cu_seqlens_q=torch.zeros(1, dtype=torch.int32),
            max_seqlen_q=0,
        )
        self._parts: dict[int, tuple[Tensor, BatchMetadata]] = {}  # by number of rows: the beginnings of the inputs
        self._x: Tensor | None = None  # the embeddings of a step, if programs begin behind the embedding
        self._workspace = cpu.program.Workspace()
        self._adapters = adapters
        self.draw: Callable[[Tensor], Tensor] = _no_draw
        self.works = True  # False once the layers turned out to call operators of torch
        self._programs: dict[StepKind, Recorded | None] = {}  # None for steps that cannot be recorded

    @property
    def recorded_rows(self) -> list[int]:
        """The numbers of rows whose steps are recorded."""
        return sorted({kind.rows for kind, program in self._programs.items() if program is not None})

    def inputs(self, rows: int) -> tuple[Tensor, BatchMetadata]:
        """(input ids, metadata) of a step of so many sequences, whose memory the programs read. A step that is run with
        this very metadata is not copied."""
        if (part := self._parts.get(rows)) is None:
            whole = self._inputs
            part = self._parts[rows] = (
                self._input_ids[:rows],
                replace(
                    whole,
                    positions=whole.positions[:rows],
                    slot_mapping=whole.slot_mapping[:rows],
                    num_decodes=rows,
                    block_tables=whole.block_tables[:rows],
                    seq_lens=whole.seq_lens[:rows],
                ),
            )
        return part

    def forward(self, input_ids: Tensor, metadata: BatchMetadata, kv_caches: Sequence[KVCache]) -> Tensor | None:
        """See Decoder.forward: int64 (T) -> (T, C). None for a step that is not recorded."""
        recorded = self._run(input_ids, metadata, kv_caches, End.HIDDEN)
        return None if recorded is None else recorded.result

    def tokens(
        self, input_ids: Tensor, metadata: BatchMetadata, kv_caches: Sequence[KVCache], drawn: bool
    ) -> NextTokens | None:
        """See Decoder.decode_tokens. None for a step that is not recorded."""
        recorded = self._run(input_ids, metadata, kv_caches, End.DRAWN if drawn else End.MOST_LIKELY)
        return None if recorded is None else recorded.tokens

    def _run(
        self, input_ids: Tensor, metadata: BatchMetadata, kv_caches: Sequence[KVCache], end: End
    ) -> Recorded | None:
        rows = len(input_ids)
        decodes = metadata.num_decodes == rows and metadata.outputs is None and metadata.plan is None
        if not decodes or rows > self.max_rows or kv_caches is not self._kv_caches:
            return None
        adapters = self._adapters
        adapted = adapters is not None and adapters.tokens.active
        head_adapted = end is not End.HIDDEN and adapters is not None and adapters.logits.active
        kind = StepKind(rows, end, adapted, head_adapted)
        recorded = self._programs.get(kind)
        if recorded is None and kind in self._programs:
            return None
        if not self._programs:
            self._x = place_for_embeddings(self._decoder, self._input_ids, self._inputs.positions)
        self._place(input_ids, metadata)
        if recorded is None:
            recorded = self._programs[kind] = self._record(kind)
        if recorded is not None:
            recorded.program()
        return recorded

    def _place(self, input_ids: Tensor, metadata: BatchMetadata) -> None:
        """Copy the step's inputs to their places, if they are elsewhere."""
        rows = len(input_ids)
        if self._x is not None:
            self._x[:rows].copy_(self._decoder.embed(input_ids, metadata.positions))
        own_ids, own = self.inputs(rows)
        if metadata is own:
            return
        own_ids.copy_(input_ids)
        own.positions.copy_(metadata.positions)
        own.slot_mapping.copy_(metadata.slot_mapping)
        own.seq_lens.copy_(metadata.seq_lens)
        own.block_tables[:, : metadata.block_tables.shape[1]].copy_(metadata.block_tables)

    @torch.inference_mode()
    def _record(self, kind: StepKind) -> Recorded | None:
        decoder, (ids, metadata) = self._decoder, self.inputs(kind.rows)
        choose = self.draw if kind.end is End.DRAWN else most_likely

        def work() -> Tensor:
            x = decoder.embed(ids, metadata.positions) if self._x is None else self._x[: kind.rows]
            hidden = decoder.run(ids, x, metadata, self._kv_caches)
            return hidden if kind.end is End.HIDDEN else choose(decoder.compute_logits(hidden))

        try:
            program = self._cpu.program.record(work, self._workspace)
        except self._cpu.program.NotRecordable as error:
            self.works &= kind.end is not End.HIDDEN  # perhaps the logits alone
            logger.info("%s of %d sequences run operator by operator: %s", kind.end.value, kind.rows, error)
            return None
        return Recorded(program, program.result, None if kind.end is End.HIDDEN else NextTokens.of(program.result))
