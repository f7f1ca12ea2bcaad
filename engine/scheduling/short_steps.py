"""ShortSteps: steps that end soon, while a request of another tenant may come at any moment and would have to wait.

A step may take `seconds`, by what was learnt of steps: so long a first token waits for the step under way. It may take
MIN_RATIO times as long as a step with an empty prompt in any case, where a slow model needs longer for that. All of its
time but that of an empty step goes into work. So at most one part in MIN_RATIO of the throughput is given up, and much
less where steps may take many times as long as an empty one.
Chunks of prompts get half of the work and decodes the other half, or either of them all where the other is not wanted.
Those that decode take turns.
"""

from itertools import count
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.executor.step import StepPlan, StepResult
from engine.memory.sequence import Sequence

Numbers = npt.NDArray[np.floating]

MIN_RATIO = 3.0
CHUNK_SHARE = 16  # of a step's tokens go to chunks while it is not known how long steps take


class StepRoom(NamedTuple):
    """What lets a step take as long as it may: decodes and nothing else; beside an empty prompt decodes, or tokens."""

    decodes_alone: float
    decodes: float
    tokens: float


class StepTimes:
    """How long a step takes, learnt from those that were computed.

    Seconds are taken to be base + per_decode * decodes, and with chunks of prompts first_token + per_token * tokens
    more: the weights are read once, each decode reads what it attends to, each token of a prompt has to be computed; a
    GPU runs decodes alone as a recorded graph, and with chunks kernel by kernel. The four are fitted by least
    squares of the relative errors, the last steps weighing most. Where those do not tell them apart, the last fit
    stands (ridge regression towards it).
    """

    MEMORY = 0.99  # weight of a step beside the one after it
    RIDGE = 1e-3
    MIN_STEPS = 16  # before that many there is no fit

    def __init__(self) -> None:
        self._products: Numbers = np.zeros((4, 4))
        self._sums: Numbers = np.zeros(4)
        self._fit: Numbers = np.zeros(4)  # base, first_token, per_decode, per_token
        self._num_steps = 0

    def observe(self, num_decodes: int, num_chunk_tokens: int, seconds: float) -> None:
        """A step was computed, in more than no time."""
        features = np.array([1, num_chunk_tokens > 0, num_decodes, num_chunk_tokens]) / seconds  # times the fit: 1
        self._products = self.MEMORY * self._products + np.outer(features, features)
        self._sums = self.MEMORY * self._sums + features
        self._num_steps += 1

    def within(self, seconds: float) -> StepRoom | None:
        """What lets a step take so long, or MIN_RATIO times as long as one with an empty prompt. None: unknown yet."""
        if self._num_steps < self.MIN_STEPS:
            return None
        pull = np.diag(self.RIDGE * np.diag(self._products) + 1e-9)
        self._fit = np.linalg.solve(self._products + pull, self._sums + pull @ self._fit)
        base, first_token, per_decode, per_token = np.maximum(self._fit, 1e-9)
        empty = base + first_token
        work = max(seconds, MIN_RATIO * empty) - empty
        return StepRoom((work + first_token) / per_decode, work / per_decode, work / per_token)


class ShortSteps:
    """Limits plans, and is told of those it limited and of their results (a step costs it some 30 microseconds)."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
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
        room = self._times.within(self._seconds)
        if room is None:
            return sequences, min(most, len(sequences) + -(-most // CHUNK_SHARE)), set()
        single = [seq for seq in sequences if seq.in_worker and seq.num_uncomputed_tokens == 1]
        decodes = [seq for seq in single if seq.has_started]
        has_chunks = more_wait or any(seq.num_uncomputed_tokens > 1 for seq in sequences)
        resting = self._resting(decodes, round(room.decodes / 2 if has_chunks else room.decodes_alone))
        for seq in single:
            if not seq.has_started:  # the end of a prompt waits for no turn, others may wait for it; this was its own
                seq.last_turn = next(self._turns)
        num_decodes = len(decodes) - len(resting)
        num_tokens = round(room.tokens * max(0.0, 1.0 - num_decodes / room.decodes))
        others = [seq for seq in sequences if seq not in resting] if resting else sequences
        return others, min(most, len(single) - len(resting) + max(1, num_tokens)), resting

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
