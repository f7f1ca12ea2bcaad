"""ShortSteps: steps that end soon, while a request of another tenant may come at any moment and would have to wait.

A step may take SLOWDOWN times as long as an empty one would. Of its time all but that of the empty step goes into work,
so at most one part in SLOWDOWN of the throughput is given up; where decodes cost next to nothing beside the reading of
the weights, as on a GPU, next to nothing is. Chunks of prompts get half of the work and decodes the other half, or
either of them all where the other is not wanted. Those that decode take turns.
"""

from itertools import count

import numpy as np
import numpy.typing as npt

from engine.sequence import Sequence
from engine.step import StepPlan, StepResult

Numbers = npt.NDArray[np.floating]

SLOWDOWN = 3.0
CHUNK_SHARE = 16  # of a step's tokens go to chunks while it is not known how long steps take


class StepTimes:
    """How long a step takes, learnt from those that were computed.

    Seconds are taken to be base + per_decode * decodes + per_token * tokens of chunks: the weights are read once, each
    decode reads what it attends to, each token of a prompt has to be computed. The three are fitted by least squares of
    the relative errors, the last steps weighing most. Where those do not tell them apart, the last fit stands (ridge
    regression towards it).
    """

    MEMORY = 0.99  # weight of a step beside the one after it
    RIDGE = 1e-3
    MIN_STEPS = 16  # before that many there is no fit

    def __init__(self) -> None:
        self._products: Numbers = np.zeros((3, 3))
        self._sums: Numbers = np.zeros(3)
        self._fit: Numbers = np.zeros(3)  # base, per_decode, per_token
        self._num_steps = 0

    def observe(self, num_decodes: int, num_chunk_tokens: int, seconds: float) -> None:
        """A step was computed, in more than no time."""
        features = np.array([1, num_decodes, num_chunk_tokens]) / seconds  # times the fit it should be 1
        self._products = self.MEMORY * self._products + np.outer(features, features)
        self._sums = self.MEMORY * self._sums + features
        self._num_steps += 1

    def within(self, slowdown: float) -> tuple[float, float] | None:
        """How many decodes alone, and how many tokens of chunks alone, let a step take `slowdown` times an empty one.

        None where too little is known.
        """
        if self._num_steps < self.MIN_STEPS:
            return None
        pull = np.diag(self.RIDGE * np.diag(self._products) + 1e-9)
        self._fit = np.linalg.solve(self._products + pull, self._sums + pull @ self._fit)
        base, per_decode, per_token = np.maximum(self._fit, 1e-9)
        work = (slowdown - 1.0) * base
        return work / per_decode, work / per_token


class ShortSteps:
    """Limits plans, and is told of those it limited and of their results (a step costs it some 30 microseconds)."""

    def __init__(self) -> None:
        self._times = StepTimes()
        self._planned: dict[int, tuple[int, int]] = {}  # decodes and tokens of chunks
        self._turns = count(1)

    def planned(self, plan: StepPlan) -> None:
        num_decodes = len(plan.decodes)
        self._planned[plan.step_id] = num_decodes, plan.num_tokens - num_decodes

    def computed(self, result: StepResult) -> None:
        """A result is back: of any step."""
        if (found := self._planned.pop(result.step_id, None)) is not None and result.compute_seconds > 0.0:
            self._times.observe(*found, result.compute_seconds)

    def lose_plans(self) -> None:
        """Their results will not come: the Worker is gone."""
        self._planned.clear()

    def limit(self, sequences: list[Sequence], more_wait: bool, most: int) -> tuple[list[Sequence], int, set[Sequence]]:
        """Who of `sequences` may be in the next step, in order (`sequences` itself: all), its tokens (`most` at most)
        and who of them rests. `more_wait` says whether others could be admitted.
        """
        limits = self._times.within(SLOWDOWN)
        if limits is None:
            return sequences, min(most, len(sequences) + -(-most // CHUNK_SHARE)), set()
        decodes = [seq for seq in sequences if seq.in_worker and seq.num_uncomputed_tokens == 1]
        has_chunks = more_wait or any(seq.num_uncomputed_tokens > 1 for seq in sequences)
        resting = self._resting(decodes, round(limits[0] / 2 if has_chunks else limits[0]))
        num_decodes = len(decodes) - len(resting)
        num_tokens = round(limits[1] * max(0.0, 1.0 - num_decodes / limits[0]))
        others = [seq for seq in sequences if seq not in resting] if resting else sequences
        return others, min(most, num_decodes + max(1, num_tokens)), resting

    def _resting(self, decodes: list[Sequence], most: int) -> set[Sequence]:
        """Who is left out so that about `most` are in: as many of each tenant (max-min fair), in turns."""
        if len(decodes) <= most:
            return set()
        by_tenant: dict[str, list[Sequence]] = {}
        for seq in decodes:
            seq.last_turn = seq.last_turn or next(self._turns)  # a new one is behind all others
            by_tenant.setdefault(seq.tenant, []).append(seq)
        resting, num_left = set[Sequence](), max(most, len(by_tenant))
        for number, rows in enumerate(sorted(by_tenant.values(), key=len)):
            share = num_left // (len(by_tenant) - number)
            rows.sort(key=lambda seq: seq.last_turn)
            for seq in rows[:share]:
                seq.last_turn = next(self._turns)
            resting.update(rows[share:])
            num_left -= len(rows[:share])
        return resting
