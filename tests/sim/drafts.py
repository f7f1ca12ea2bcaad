"""SimDrafts: drafts that are right up to a place that the seed chooses, in steps of any cost."""

import math
from typing import TYPE_CHECKING

from engine.memory.sequence import Sequence
from engine.scheduling.speculation.drafts import NgramDrafts, Proposer
from engine.scheduling.speculation.step_costs import StepCosts
from tests.sim.model import mix

if TYPE_CHECKING:
    from tests.sim.monitor import Monitor


class FreeRows(StepCosts):
    """Every draft pays."""

    def needed(self, rows: int, num_tokens: float) -> float:
        return 0.0

    def rows_within(self, rows: int, growth: float) -> float:
        return math.inf


class SimDrafts(NgramDrafts):
    def __init__(self, monitor: "Monitor", max_tokens: int) -> None:
        super().__init__(max_tokens)
        self._costs = FreeRows(8.0)
        self._monitor = monitor

    def _propose(self, proposer: Proposer, seq: Sequence, num_tokens: int) -> list[int]:
        self._num_in_vain = 0
        drawn = mix(seq.seed & 2**62 - 1, len(seq.token_ids))
        start, length = seq.num_generated_tokens, drawn % (self.max_tokens + 1)
        tokens = self._monitor.reference_of(seq).token_ids[start : start + length]
        if wrong := drawn >> 8 & 3:
            place = (drawn >> 16) % (len(tokens) + 1)
            tokens = [*tokens[:place], 97 + wrong]  # which may be right, too
        return tokens[:num_tokens]

    def _length(self, proposer: Proposer, tokens: list[int], num_rows: int, num_kept: float) -> tuple[int, float]:
        return len(tokens), num_kept
