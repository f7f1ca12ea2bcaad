"""RecordedSteps: steps with prompts on a CPU as one call each.

The shapes of such steps differ. Short ones are padded to sizes that are recorded once (padded_steps.py). Each other one
is recorded for itself (kernels/cpu/program.py) and run once: to record a hundred kernels takes Python 3 to 5 ms. To
start one after the other takes 7 to 13 ms, while the other threads wait, because each kernel leaves none of Python's
memory in the caches.
"""

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.models.layers.adapted import AdapterLayers
from engine.models.layers.attention import BatchMetadata, KVCache
from engine.models.padded_steps import PaddedSteps
from engine.models.recorded_decodes import Parts
from kernels.dispatch import cpu_kernels

logger = logging.getLogger(__name__)


class Kind(NamedTuple):
    """Steps of the same kind call the same operators. size: bits of the number of rows."""

    size: int
    has_decodes: bool
    has_outputs: bool
    adapted: bool


class RecordedSteps:
    """Runs steps of any shape. A result is valid until the next step."""

    def __init__(self, decoder: Parts, adapters: AdapterLayers | None) -> None:
        """adapters: those beside the layers."""
        cpu = cpu_kernels()
        assert cpu is not None, "only compiled kernels can be recorded"
        self._decoder, self._adapters, self._cpu = decoder, adapters, cpu
        self.padded: PaddedSteps | None = None
        self._workspace = cpu.program.Workspace()
        self._most_rows = 0  # the largest step so far
        self.refused: set[Kind] = set()  # kinds that call operators of torch

    def pad(self, kv_caches: Sequence[KVCache], max_tokens: int, max_blocks: int) -> None:
        """Pad short steps on these caches; see PaddedSteps."""
        self.padded = PaddedSteps(self._decoder, kv_caches, max_tokens, max_blocks)

    @property
    def num_bytes(self) -> int:
        """Memory for the results of kernels inside a step that is not padded."""
        return self._workspace.num_bytes  # type: ignore[no-any-return]

    @torch.inference_mode()
    def forward(self, input_ids: Tensor, metadata: BatchMetadata, kv_caches: Sequence[KVCache]) -> Tensor | None:
        """See Decoder.forward: int64 (T) -> (R, C). None, and nothing is done, for a step that cannot be recorded."""
        hidden = None if self.padded is None else self.padded.forward(input_ids, metadata, kv_caches)
        if hidden is not None:
            return hidden
        kind = self._kind_of(metadata, len(input_ids))
        if metadata.plan is not None or kind in self.refused:
            return None
        if len(input_ids) > self._most_rows:  # its results are larger than those before: the old blocks go
            self._most_rows, self._workspace = len(input_ids), self._cpu.program.Workspace()
        x = self._decoder.embed(input_ids, metadata.positions)  # (T), (T) -> (T, C); some call operators of torch
        try:
            program = self._cpu.program.record(
                lambda: self._decoder.run(input_ids, x, metadata, kv_caches),  # (T), (T, C) -> (R, C)
                self._workspace,
            )
        except self._cpu.program.NotRecordable as error:
            self.refused.add(kind)
            logger.info("steps with prompts run operator by operator: %s (%s)", error, kind)
            return None
        return program()  # type: ignore[no-any-return]

    def _kind_of(self, metadata: BatchMetadata, rows: int) -> Kind:
        adapted = self._adapters is not None and self._adapters.tokens.active
        return Kind(rows.bit_length(), bool(metadata.num_decodes), metadata.outputs is not None, adapted)
